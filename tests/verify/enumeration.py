"""All drawings of small trees times all outcomes of a walk, with their exact chances.

A walk makes its decisions by drawing from distributions. Here each row of a batch is one drawing of the tree and one *script*:
what comes out of each draw. The draws are replaced by ones that follow the script and note its chance; the rest is the code
that runs in production.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from polydraft.devices import values_hidden
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree, Topology
from polydraft.verify import BlockWalk, NodeWalk, Scheme, Verdict, Walk, block
from polydraft.verify import node as node_walk
from polydraft.verify.walk import TargetDistribution, TreeDistributions

from . import doubles

TOLERANCE = 1e-9
"""Of enumerations: float64 leaves about 1e-15."""

Tables = dict[tuple[int, ...], np.ndarray]
"""Tokens so far to the next token's probabilities."""


def random_tables(
    random: np.random.Generator, vocabulary: int, depth: int, sharpness: float, agreement: float
) -> tuple[Tables, Tables]:
    """Make target and draft distributions after every text of up to `depth` tokens, in the theory note's order."""
    target: Tables = {}
    draft: Tables = {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocabulary), repeat=length):
            target[text] = random.dirichlet(np.full(vocabulary, sharpness))
            draft[text] = agreement * target[text] + (1 - agreement) * random.dirichlet(np.full(vocabulary, sharpness))
    return target, draft


def awkward_tables(random: np.random.Generator, vocabulary: int, depth: int) -> tuple[Tables, Tables]:
    """Make distributions with zeros, distributions of one token, and equal pairs."""
    target, draft = random_tables(random, vocabulary, depth, 0.7, 0.3)
    for distributions in (target, draft):
        for text, distribution in distributions.items():
            kind = random.integers(3)
            if kind == 0:
                distribution = (
                    np.where(random.random(vocabulary) < 0.5, 0.0, distribution)
                    + np.eye(vocabulary)[random.integers(vocabulary)] * 0.2
                )
            elif kind == 1:
                distribution = np.eye(vocabulary)[random.integers(vocabulary)]
            distributions[text] = distribution / distribution.sum()
    for text in target:
        if random.random() < 0.2:
            draft[text] = target[text]
    return target, draft


@dataclass(frozen=True, eq=False)
class Batch:
    """Cases of one shape, enumerated together: C cases, R rows."""

    topology: Topology
    cases: Sequence[tuple[Tables, Tables]]
    """Target and draft of each."""
    target_scale: float = 1.0
    """What the walk sees is not the target's distribution but so many times that; the same for the draft's."""
    draft_scale: float = 1.0

    @cached_property
    def vocabulary(self) -> int:
        return len(self.cases[0][0][()])

    @property
    def digits_D(self) -> Tensor:
        """A text as a number: digit 0 for no token, so that trailing ones do not count."""
        return (self.vocabulary + 1) ** torch.arange(self.topology.depth + 1)

    def table(self, which: int) -> Tensor:
        """Distributions of all cases by number of the text; not a number where there is no such text."""
        numbers = int(self.digits_D[-1]) * (self.vocabulary + 1)
        table_CXV = torch.full((len(self.cases), numbers, self.vocabulary), torch.nan, dtype=torch.float64)
        for case, tables in enumerate(self.cases):
            for text, distribution in tables[which].items():
                number = sum((token + 1) * int(self.digits_D[place]) for place, token in enumerate(text))
                table_CXV[case, number] = torch.tensor(distribution)
        return table_CXV

    @cached_property
    def target_CXV(self) -> Tensor:
        return self.table(0)

    @cached_property
    def draft_CXV(self) -> Tensor:
        return self.table(1)

    def number(self, tokens_RP: Tensor) -> Tensor:
        """Number of each text."""
        return ((tokens_RP + 1) * self.digits_D[: tokens_RP.shape[1]]).sum(-1)

    def drawings(self, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
        """Enumerate all trees: case_R, tokens_RN, and the chance of each in its case."""
        topology = self.topology
        case_R = torch.arange(len(self.cases))
        tokens_RN = torch.full((len(case_R), topology.num_nodes), NO_TOKEN)
        tokens_RN[:, 0] = 0
        chance_R = torch.ones(len(case_R), dtype=torch.float64)
        for node, children in enumerate(topology.children):
            for rank, child in enumerate(children):
                draft_RV = self.node_distributions(self.draft_CXV, case_R, tokens_RN, node)
                earlier_RJ = tokens_RN[:, list(children[:rank])]
                distribution_RV = scheme.child_distribution(draft_RV, earlier_RJ, len(children))
                # Below a missing node drafters draw all the same; what they draw must not matter.
                missing_R1 = tokens_RN[:, node : node + 1] == NO_TOKEN
                distribution_RV = torch.where(missing_R1, torch.eye(self.vocabulary, dtype=torch.float64)[:1], distribution_RV)
                distribution_RX = torch.cat([distribution_RV, (distribution_RV.sum(-1, keepdim=True) == 0).double()], dim=1)
                row_S, token_S = distribution_RX.nonzero(as_tuple=True)
                chance_R = chance_R[row_S] * distribution_RX[row_S, token_S]
                tokens_RN, case_R = tokens_RN[row_S].clone(), case_R[row_S]
                tokens_RN[:, child] = torch.where(token_S == self.vocabulary, NO_TOKEN, token_S)
        return case_R, tokens_RN, chance_R

    def picked_chains(self, scheme: Scheme) -> "Batch":
        """Return chains whose drafts are distributed as the picked children: all that block verification sees of a tree."""
        topology = self.topology
        counts = [len(topology.children[level[0]]) for level in topology.levels[:-1]]
        chains: list[tuple[Tables, Tables]] = []
        for target, draft in self.cases:
            picked = {}
            for text, distribution in draft.items():
                if len(text) < topology.depth:
                    target_1V, draft_1V = torch.tensor(target[text])[None], torch.tensor(distribution)[None]
                    children_1K = scheme.draw(draft_1V, torch.full((1, counts[len(text)]), 0.5, dtype=torch.float64))
                    uniforms_1U = torch.full((1, scheme.select_uniforms or 0), 0.5, dtype=torch.float64)
                    picked[text] = scheme.select(target_1V, draft_1V, children_1K, uniforms_1U).distribution_RV[0].numpy()
            chains.append((target, picked))
        return Batch(Topology.fork(1, topology.depth), chains)

    def path(self, node: int) -> list[int]:
        """Nodes below the root down to a node."""
        path: list[int] = []
        while node:
            path.insert(0, node)
            node = self.topology.parents[node]
        return path

    def node_distributions(self, table_CXV: Tensor, case_R: Tensor, tokens_RN: Tensor, node: int) -> Tensor:
        """Distributions of one node in every row; a uniform one where the node is missing, which nobody may use."""
        path_RP = tokens_RN[:, self.path(node)]
        distribution_RV = table_CXV[case_R, self.number(path_RP)]
        return torch.where((path_RP == NO_TOKEN).any(-1, keepdim=True), 1 / self.vocabulary, distribution_RV)

    def draft(self, case_R: Tensor, tokens_RN: Tensor, dtype: torch.dtype = torch.float64) -> DraftTree:
        """Put drawings into the form that walks take."""
        distributions, distribution_rows_N = [], torch.zeros(self.topology.num_nodes, dtype=torch.long)
        for level in self.topology.levels[:-1]:
            drawing = [node for node in level if self.topology.children[node]]
            distribution_rows_N[drawing] = torch.arange(len(drawing))
            distributions_RGV = torch.stack(
                [self.node_distributions(self.draft_CXV, case_R, tokens_RN, node) for node in drawing], dim=1
            )
            distributions.append((distributions_RGV * self.draft_scale).to(dtype))
        return DraftTree.from_topology(self.topology, tokens_RN, tuple(distributions), distribution_rows_N)

    def target_distribution(
        self, case_R: Tensor, tokens_RN: Tensor, dtype: torch.dtype, strict: bool = False
    ) -> TargetDistribution:
        """Return the target's distributions of some drawings; if strict, no numbers where a path is not the node's own."""
        depth = self.topology.depth
        paths_NP = torch.tensor([(self.path(node) + [0] * depth)[:depth] for node in range(self.topology.num_nodes)])

        def target_distribution(node_B: Tensor, path_BP: Tensor) -> Tensor:
            nodes_BP = paths_NP.view(-1, depth)[node_B]
            tokens_BP = torch.where(nodes_BP > 0, tokens_RN.gather(1, nodes_BP), NO_TOKEN)
            distribution_BV = (self.target_CXV[case_R, self.number(tokens_BP)] * self.target_scale).to(dtype)
            own_B = self.number(path_BP) == self.number(tokens_BP)
            return torch.where(own_B[:, None], distribution_BV, torch.nan) if strict else distribution_BV

        return target_distribution

    def texts(self) -> Tensor:
        """All texts of one token more than the tree is deep."""
        width = self.topology.depth + 1
        return torch.cartesian_prod(*[torch.arange(self.vocabulary)] * width).view(-1, width)

    def text_distributions(self) -> Tensor:
        """Chance of every text of depth + 1 tokens after each beginning of it: row i for a beginning of i tokens."""
        texts_SD = self.texts()
        chance_CSD = torch.ones(len(self.cases), len(texts_SD), self.topology.depth + 2, dtype=torch.float64)
        for place in range(self.topology.depth, -1, -1):
            distribution_CSV = self.target_CXV[:, self.number(texts_SD[:, :place])]
            token_CS1 = texts_SD[:, place].expand(len(self.cases), -1)[..., None]
            chance_CSD[..., place] = chance_CSD[..., place + 1] * distribution_CSV.gather(2, token_CS1)[..., 0]
        return chance_CSD


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Everything that a walk may do on a batch, and how likely it is."""

    batch: Batch
    case_R: Tensor
    chance_R: Tensor
    verdict: Verdict

    def _sum(self, values_R: Tensor) -> Tensor:
        return torch.zeros(len(self.batch.cases), dtype=torch.float64).index_add_(0, self.case_R, values_R)

    def totals(self) -> Tensor:
        """Sum of all chances in each case."""
        return self._sum(self.chance_R)

    def accepted(self) -> Tensor:
        """Mean number of accepted tokens in each case."""
        return self._sum(self.chance_R * self.verdict.accepted_B)

    def text_error(self) -> float:
        """Largest error of the distribution of texts that begin with what was emitted and are completed by the target."""
        batch, verdict = self.batch, self.verdict
        width = batch.topology.depth + 1
        expected_CSD = batch.text_distributions()
        texts_SD = batch.texts()
        distribution_CS = torch.zeros_like(expected_CSD[..., 0])
        for length in range(1, width + 1):
            ends_R = verdict.accepted_B == length - 1
            number_R = batch.number(verdict.tokens_BD[:, :length])
            emitted_CX = torch.zeros(len(batch.cases), batch.target_CXV.shape[1], dtype=torch.float64)
            index = self.case_R[ends_R], number_R[ends_R]
            emitted_CX.index_put_(index, self.chance_R[ends_R], accumulate=True)
            distribution_CS += emitted_CX[:, batch.number(texts_SD[:, :length])] * expected_CSD[..., length]
        return (distribution_CS - expected_CSD[..., 0]).abs().max().item()


class _Scripted:
    """Draws that come out as their script says, and the chance that they do.

    Walks that ask all nodes at once draw at nodes that are not on the path too: of those draws only the ones on the path count.
    """

    def __init__(self, rows: int) -> None:
        self.chance_R = torch.ones(rows, dtype=torch.float64)
        self.factor_RN: Tensor | None = None
        self.path_RD: Tensor | None = None
        self.outcomes = 1

    def noted(self, followed: Callable[[Tensor, int], Tensor], next_BN: Tensor, depth: int) -> Tensor:
        """Note which nodes a walk comes by."""
        self.path_RD = followed(next_BN, depth)
        return self.path_RD

    def finished(self) -> Tensor:
        """Return the chances, with those of the draws that were made at all nodes at once."""
        if self.factor_RN is None:
            return self.chance_R
        assert self.path_RD is not None
        arrived_RL = torch.cat(
            [torch.ones_like(self.path_RD[:, :1]), self.path_RD[:, 1:-1].diff(prepend=self.path_RD[:, :1])], 1
        )
        # Behind a path's end all scripts come to the same.
        factor_RL = self.factor_RN.gather(1, self.path_RD[:, :-1]).where(arrived_RL != 0, 1 / self.outcomes)
        return torch.where(self.chance_R == 0, 0.0, self.chance_R * factor_RL.prod(-1))

    def draw_one(self, weights_RV: Tensor, script_R: Tensor) -> Tensor:
        """Take the token of the script; nothing can be drawn without weight, which only script 0 says."""
        weights_RX = torch.nn.functional.pad(weights_RV.double(), (0, 1))  # scripts may name more than there is
        total_R = weights_RX.sum(-1)
        outcome_R = script_R.long().clamp(max=weights_RV.shape[1])
        chosen_R = weights_RX.gather(1, outcome_R[:, None])[:, 0]
        factor_R = torch.where(total_R == 0, (outcome_R == 0).double(), chosen_R / total_R)
        if len(factor_R) != len(self.chance_R):
            assert self.factor_RN is None, "one draw for all nodes is all that can be told apart"
            self.factor_RN, self.outcomes = factor_R.view(len(self.chance_R), -1), weights_RV.shape[1]
            return torch.where(total_R == 0, NO_TOKEN, outcome_R)
        # What cannot happen leads to places where nothing is said about the weights.
        self.chance_R = torch.where(self.chance_R == 0, 0.0, self.chance_R * factor_R)
        return torch.where(total_R == 0, NO_TOKEN, outcome_R)


class _DistributionsEverywhere(TreeDistributions):
    """The target's distributions of some drawings, at all nodes if asked; no numbers at single ones."""

    greedy, whole = False, True

    def __init__(self, batch: Batch, case_R: Tensor, tokens_RN: Tensor) -> None:
        distributions = [
            batch.node_distributions(batch.target_CXV, case_R, tokens_RN, node) for node in range(batch.topology.num_nodes)
        ]
        self.distribution_RNV = torch.stack(distributions, dim=1) * batch.target_scale

    def __call__(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        return torch.full_like(self.distribution_RNV[:, 0], torch.nan)

    def everywhere(self, draft: DraftTree) -> Tensor:
        return self.distribution_RNV

    def likeliest(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        raise NotImplementedError

    def likeliest_everywhere(self, draft: DraftTree) -> Tensor:
        raise NotImplementedError


def enumerate_walk(walk: Walk, scheme: Scheme, batch: Batch, at_once: bool = False) -> Outcomes:
    """Run a walk on every drawing and every script, step by step or, as where the host may not look, at all nodes at once."""
    case_S, tokens_SN, chance_S = batch.drawings(scheme)
    alphabets = _alphabets(walk, scheme, batch)
    scripts_XU = torch.cartesian_prod(*map(torch.arange, alphabets)).double().view(-1, len(alphabets))
    drawing_R = torch.arange(len(case_S)).repeat_interleave(len(scripts_XU))
    case_R, tokens_RN = case_S[drawing_R], tokens_SN[drawing_R]
    draft = batch.draft(case_R, tokens_RN)
    # Rows that the node walk has stopped ask on, with what they emitted as their path.
    target_distribution = batch.target_distribution(case_R, tokens_RN, torch.float64, strict=not isinstance(walk, NodeWalk))
    if at_once:
        target_distribution = _DistributionsEverywhere(batch, case_R, tokens_RN)
    scripted = _Scripted(len(case_R))
    with pytest.MonkeyPatch.context() as patch, values_hidden() if at_once else nullcontext():
        for module in ("verify.scheme", "verify.node", "verify.block"):
            patch.setattr(f"polydraft.{module}.draw_one", scripted.draw_one)
        if at_once:
            for module in (node_walk, block):
                patch.setattr(module, "followed", partial(scripted.noted, module.followed))
        patch.setattr(doubles, "draw_one", scripted.draw_one)
        verdict = walk.run(scheme, draft, target_distribution, scripts_XU.repeat(len(case_S), 1))
    chance_R = scripted.finished() * chance_S[drawing_R]
    outcomes = Outcomes(batch, case_R, chance_R, verdict)
    _check_verdict(outcomes, draft)
    return outcomes


def _alphabets(walk: Walk, scheme: Scheme, batch: Batch) -> list[int]:
    """How many outcomes each draw of a walk has at most."""
    depth, vocabulary = batch.topology.depth, batch.vocabulary
    if isinstance(walk, BlockWalk):
        return [batch.topology.max_children] * ((scheme.select_uniforms or 0) * depth) + [depth + 1, vocabulary]
    assert scheme.verify_uniforms == 1
    return [vocabulary] * (depth + 1)


def _check_verdict(outcomes: Outcomes, draft: DraftTree) -> None:
    """Check that the parts of a verdict fit together, wherever it may happen."""
    verdict, possible_R = outcomes.verdict, outcomes.chance_R > 0
    assert not outcomes.chance_R.isnan().any()
    path_RD, accepted_R1 = verdict.path_BD[possible_R], verdict.accepted_B[possible_R, None]
    tokens_RN, tokens_RD = draft.tokens_BN[possible_R], verdict.tokens_BD[possible_R]
    places_D = torch.arange(path_RD.shape[1])
    assert (verdict.fault_B[possible_R] == 0).all()
    assert (path_RD[:, 0] == 0).all()
    parents_N = torch.tensor(outcomes.batch.topology.parents)
    on_path_RD = (places_D >= 1) & (places_D <= accepted_R1)
    assert ((parents_N[path_RD] == path_RD.roll(1, dims=1)) | ~on_path_RD).all()
    assert ((path_RD == path_RD.gather(1, accepted_R1)) | (places_D < accepted_R1)).all()
    emitted_RD = tokens_RN.gather(1, path_RD)[:, 1:]
    assert ((tokens_RD[:, :-1] == emitted_RD) | ~on_path_RD[:, 1:]).all()
    assert ((tokens_RD >= 0) | (places_D > accepted_R1)).all()
    last_R = path_RD.gather(1, accepted_R1)[:, 0]
    table_NK = outcomes.batch.topology.tables(torch.device("cpu")).child_table_NK
    children_RK = table_NK[last_R]
    has_candidates_R = ((children_RK > 0) & (tokens_RN.gather(1, children_RK) != NO_TOKEN)).any(-1)
    assert (verdict.offered_B[possible_R] == accepted_R1[:, 0] + has_candidates_R).all()
