"""Improved MCSD's target-initialised trees and their verification, a lossy rule.

A tree begins with several tokens from the target's distribution, and the longest accepted path is kept. This favours first
tokens that the draft continues well, so the text no longer follows the target's distribution (docs/dynamic.md measures by how
much).

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.draft import LOSSY_DRAFTERS, DistributionSource, Drafter, DraftSession, Parts, TreeDrafter
from polydraft.draft.static_plan import LevelPlan
from polydraft.draft.stopping_builder import Decision, StoppingBuilder
from polydraft.errors import UsageError
from polydraft.models import Head, LanguageModel
from polydraft.sampling import NO_TOKEN, RowParams, draw_distinct, draw_one
from polydraft.trees import DraftTree, Topology
from polydraft.verify import SCHEMES, Fault, Scheme, TargetDistributions, Verdict, Walk
from polydraft.verify.walk import TargetDistribution

_TOP = SCHEMES.get("top")()


def check_lossy(name: str, topology: Topology) -> None:
    """Refuse unknown lossy drafters, and trees that they cannot grow."""
    LOSSY_DRAFTERS.get(name)
    chains = max(len(topology.children[0]), 1)
    if topology.depth < 1 or topology != Topology.fork(chains, topology.depth):
        raise UsageError(f"--lossy {name} grows forks only, not tree {topology}; use a tree such as fork:16x5")


class TargetInit(Drafter):
    """Begins with W tokens from the target, drafts D more after each, and keeps the longest accepted path ([1] §3.1).

    The text does not follow the target's distribution. The lossless counterpart is a fork of the same width below a single
    token from the target. Every tree here has such a token as its root, the pending token, so that counterpart is `fork:WxD`,
    also called `target-root:WxD`. `topology` is a fork whose depth D counts drafted tokens only. A decision may stop rows early
    ([1] §3.3), but not at first tokens from the target.
    """

    name = "target-init"
    lossless = False

    def __init__(self, model: LanguageModel | Head, topology: Topology, decision: Decision | None = None) -> None:
        check_lossy(self.name, topology)
        self.model: LanguageModel | Head = model
        self.decision = decision
        self.topology: Topology = Topology.fork(len(topology.children[0]), topology.depth + 1)

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Return the session for a batch."""
        if params.mixed:
            raise UsageError("--lossy target-init cannot mix rows of temperature 0 with others; decode them separately")
        source = TreeDrafter(self.model, self.topology, "rrs-wor").source(len(params))
        builder = TargetInitBuilder(source, self.topology, params, target.vocab_size, self.decision)
        return DraftSession(self.name, drawn=builder)


class TargetInitBuilder(StoppingBuilder):
    """Grows a fork whose first level consists of tokens from the target's distribution.

    In a text's first round that distribution is unknown, because the target has not read the prompt's last token yet. Then the
    first level comes from the draft.
    """

    elastic = False

    def __init__(
        self,
        source: DistributionSource,
        topology: Topology,
        params: RowParams,
        vocab_size: int,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(source, topology, params, vocab_size, scheme="rrs-wor", decision=decision)
        self.obstacle = "target-initialised trees, a lossy rule kept for comparison, are not captured"
        self._width, self._greedy = len(topology.children[0]), params.all_greedy
        self._walk = LongestWalk(self._greedy)
        self._next: tuple[Tensor, Tensor] | None = None
        """`next_distribution_BV` and `known_B` of the last `LongestVerdict`: what the next tree begins with."""

    @property
    def num_uniforms(self) -> int:
        """The tree's random numbers, and one for each token from the target."""
        return super().num_uniforms + self._width

    def resolve_walk(self, name: str) -> Walk:
        """Return the walk that keeps the longest path, whatever the name."""
        return self._walk

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Let new rows begin with the draft's tokens."""
        super().begin(texts, rows, params)
        if self._next is not None:
            known_B = self._next[1].clone()
            known_B[list(rows)] = False
            self._next = self._next[0], known_B

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Grow a tree, and tell the walk which rows begin with tokens from the target."""
        self._walk.given_B = None if self._next is None else self._next[1]
        return super().build(tail_B2, uniforms_BU)

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> Tensor | None:
        """Draw a level; the first one comes from the target's distribution, as its likeliest tokens at temperature 0."""
        probs_BGV = super().draw(level, logits_BGV, tokens_BN, uniforms_BU)
        if level.first > 0 or self._next is None:
            return probs_BGV
        distribution_BV, known_B = self._next
        draw = _TOP.draw if self._greedy else draw_distinct
        given_BW = draw(distribution_BV, uniforms_BU[:, -self._width :])
        firsts = slice(1, 1 + self._width)
        tokens_BN[:, firsts] = torch.where(known_B[:, None], given_BW, tokens_BN[:, firsts])
        return probs_BGV

    def stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Never stop at first tokens from the target, because the draft's features say nothing about them."""
        stops = super().stops(features_BGF, logits_BGV)
        if self.decision is None or self._drawn > 1 or self._next is None:
            return stops
        self._going_B = self._going_B | self._next[1]
        return not bool(self._going_B.any())

    def learn(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Remember the distribution that the next tree begins with."""
        assert isinstance(verdict, LongestVerdict)
        self._next = verdict.next_distribution_BV, verdict.known_B


@LOSSY_DRAFTERS.register("target-init")
def _build(parts: Parts) -> TargetInit:
    if parts.draft is None:
        raise UsageError("--lossy target-init needs a draft; pass draft=NAME, a folder, or early-exit:k")
    return TargetInit(parts.draft, parts.topology, parts.decision)


@dataclass(frozen=True, eq=False)
class LongestVerdict(Verdict):
    """A verdict with the distribution that the next tree begins with."""

    next_distribution_BV: Tensor
    """The target's distribution after the last emitted token, or its residual after a rejection; at temperature 0 a ranking."""
    known_B: Tensor
    """Whether that distribution is known: false if nothing was accepted."""


class LongestWalk(Walk):
    """Verifies every chain of a fork independently, and keeps the longest; of several, the first.

    Not registered, because registered walks are lossless.
    """

    name = "longest"

    def __init__(self, greedy: bool) -> None:
        self.greedy = greedy
        self.given_B: Tensor | None = None
        """Rows whose first level comes from the target's own distribution, and so is accepted without a test."""

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Return False: only `TargetInitBuilder` uses this walk."""
        return False

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """One for each node of a chain; chains share them, because only one chain is kept."""
        return depth + 1

    def run(
        self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor
    ) -> LongestVerdict:
        """Verify the chains one after the other."""
        batch_size, device = len(draft.tokens_BN), draft.tokens_BN.device
        given_B = torch.zeros(batch_size, dtype=torch.bool, device=device) if self.given_B is None else self.given_B
        root_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        firsts_BK, tokens_BK = draft.children(root_B)
        best_B = torch.full_like(root_B, -1)
        path_BD = torch.zeros(batch_size, draft.depth + 1, dtype=torch.long, device=device)
        kept_BD = torch.full_like(path_BD, NO_TOKEN)
        end_B = root_B
        for chain in range(firsts_BK.shape[1]):
            nodes_BD, texts_BD, length_B = self._chain(
                draft, target_distribution, firsts_BK[:, chain], tokens_BK[:, chain], given_B, uniforms_BU
            )
            better_B1 = (length_B > best_B)[:, None]
            path_BD, kept_BD = torch.where(better_B1, nodes_BD, path_BD), torch.where(better_B1, texts_BD, kept_BD)
            best_B = torch.maximum(best_B, length_B)
            end_B = path_BD.gather(1, best_B.clamp(min=0)[:, None])[:, 0]
        return self._verdict(draft, target_distribution, uniforms_BU, best_B, path_BD, kept_BD, end_B)

    def _chain(
        self,
        draft: DraftTree,
        target_distribution: TargetDistribution,
        first_B: Tensor,
        token_B: Tensor,
        given_B: Tensor,
        uniforms_BU: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chain's nodes, root first, its tokens, and the number of accepted tokens."""
        batch_size = len(first_B)
        node_B, going_B = torch.zeros_like(first_B), torch.ones_like(given_B)
        length_B = torch.zeros_like(first_B)
        nodes_BD = torch.zeros(batch_size, draft.depth + 1, dtype=torch.long, device=first_B.device)
        texts_BD = torch.full_like(nodes_BD, NO_TOKEN)
        for step in range(draft.depth):
            if step:
                first_B, token_B = (values_BK[:, 0] for values_BK in draft.children(node_B))
            target_B = _at(target_distribution(node_B, texts_BD[:, :step]), token_B)
            draft_B = torch.ones_like(target_B) if self.greedy else _at(draft.draft_distribution(step, node_B), token_B)
            accepted_B = uniforms_BU[:, step] * draft_B < target_B
            if step == 0:
                accepted_B = accepted_B | given_B
            going_B = going_B & accepted_B & (token_B != NO_TOKEN)
            if can_sync(first_B) and not going_B.any():
                break
            length_B = length_B + going_B
            node_B = torch.where(going_B, first_B, node_B)
            nodes_BD[:, step + 1], texts_BD[:, step] = node_B, torch.where(going_B, token_B, NO_TOKEN)
        return nodes_BD, texts_BD, length_B

    def _verdict(
        self,
        draft: DraftTree,
        target_distribution: TargetDistribution,
        uniforms_BU: Tensor,
        best_B: Tensor,
        path_BD: Tensor,
        kept_BD: Tensor,
        end_B: Tensor,
    ) -> LongestVerdict:
        """Emit the path, whose last token becomes pending, or one token from the target if nothing was accepted."""
        known_B, text_BP = best_B > 0, kept_BD[:, : draft.depth]
        refused_B = (draft.children(end_B)[1] != NO_TOKEN).any(-1)  # the path ends although there were further drafts
        if self.greedy:
            assert isinstance(target_distribution, TargetDistributions)
            next_BV, own_B = target_distribution.ranking(end_B, text_BP), target_distribution.likeliest(end_B, text_BP)
            broken_B = own_B == NO_TOKEN
        else:
            next_BV = target_distribution(end_B, text_BP)
            broken_B = next_BV[:, 0].isnan()
            level_B = best_B.clamp(max=draft.depth - 1)
            draft_BV = torch.stack([draft.draft_distribution(step, end_B) for step in range(draft.depth)], dim=1)
            draft_BV = draft_BV.gather(1, level_B[:, None, None].expand(-1, 1, draft_BV.shape[-1]))[:, 0]
            left_BV = (next_BV - draft_BV).clamp(min=0)
            next_BV = torch.where((refused_B & (left_BV.sum(-1) > 0))[:, None], left_BV, next_BV)
            own_B = draw_one(next_BV, uniforms_BU[:, -1])
        fault_B = torch.where(broken_B, Fault.TARGET, Fault.NONE)
        tokens_BD = kept_BD.clone()
        tokens_BD[:, 0] = torch.where(known_B, kept_BD[:, 0], own_B)
        accepted_B = (best_B - 1).clamp(min=0)
        # Entries after the accepted ones repeat the last of them.
        places_D = torch.arange(path_BD.shape[1], device=path_BD.device)
        path_BD = path_BD.gather(1, torch.minimum(places_D, accepted_B[:, None]))
        return LongestVerdict(path_BD, accepted_B, tokens_BD, accepted_B + refused_B, fault_B, next_BV, known_B)


def _at(distribution_BV: Tensor, token_B: Tensor) -> Tensor:
    """Return each row's probability of one token."""
    return distribution_BV.gather(1, token_B.clamp(min=0)[:, None])[:, 0]
