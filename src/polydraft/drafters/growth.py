"""Drawing a tree of static shape level by level, whatever computes the laws."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.compilation import compiled
from polydraft.decision import Decision
from polydraft.drafters.columns import Columns
from polydraft.drafters.plan import LevelPlan, plan_passes
from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN, PartialVocabulary, RowParams, Warper
from polydraft.schemes import SCHEMES, Scheme
from polydraft.trees import DraftTree, SlicedMask, Topology

DEFAULT_SCHEME, WIDEST_SCHEME = "hybrid", "rrs-wor"
"""What ``"auto"`` means, and what it means for nodes of more children than that takes."""

_TOP = SCHEMES.get("top")()


def check_tree(topology: Topology, scheme: str | Scheme, vocab_size: int) -> None:
    """Refuse a tree that a scheme or a vocabulary cannot fill."""
    if scheme != "auto":
        taken = SCHEMES.get(scheme) if isinstance(scheme, str) else scheme
        limit = taken.max_children
        if limit is not None and topology.max_children > limit:
            raise UsageError(
                f"scheme {taken.name!r} takes at most {limit} candidate a node but tree {topology} has up to "
                f"{topology.max_children}; use a chain such as 1x1x1 or scheme {WIDEST_SCHEME}"
            )
    if topology.max_children > vocab_size:
        raise UsageError(
            f"tree {topology} wants {topology.max_children} candidates a node but the vocabulary has only "
            f"{vocab_size} tokens; use smaller widths"
        )


def _automatic(topology: Topology) -> str:
    limit = SCHEMES.get(DEFAULT_SCHEME).max_children
    return DEFAULT_SCHEME if limit is None or topology.max_children <= limit else WIDEST_SCHEME


class Growth:
    """Draw the children of every node of a static tree from laws that come level by level.

    Parameters
    ----------
    topology : Topology
    scheme : str or Scheme
        A registered scheme, ``"auto"``, or a scheme of your own; at draft temperature 0 it is `top`, the limit of all.
    params : RowParams
        The target's.
    draft_temperature : float, optional
        Temperature of the draft's laws, the target's otherwise.
    vocab_size : int
        The target's.
    vocabulary : PartialVocabulary, optional
        What the columns of the draft's logits mean, where they are not all tokens.
    device : torch.device
    lead : int
        Places before the root in the drafter's passes.
    decision : Decision, optional
        Lets rows stop before the last level.
    """

    def __init__(
        self,
        topology: Topology,
        scheme: str | Scheme,
        params: RowParams,
        draft_temperature: float | None,
        vocab_size: int,
        vocabulary: PartialVocabulary | None,
        device: torch.device,
        lead: int,
        decision: Decision | None = None,
    ) -> None:
        own = (
            params
            if draft_temperature is None
            else params.map(lambda row: dataclasses.replace(row, temperature=draft_temperature))
        )
        taken = "top" if own.all_greedy else _automatic(topology) if scheme == "auto" else scheme
        self.scheme = SCHEMES.get(taken)() if isinstance(taken, str) else taken
        self._compiled = False
        self.topology = topology
        self._params = own
        self._greedy_B = torch.tensor(own.greedy, device=device) if own.mixed else None
        """Rows whose candidates are the likeliest tokens, where others' are drawn."""
        self._vocab_size, self._device = vocab_size, device
        self._columns = Columns(vocabulary, vocab_size)
        self._vocabulary = self._columns.vocabulary
        self._plan = plan_passes(topology, device, lead)
        self.levels = self._plan.levels
        self._warper: Warper | None = None
        self._laws: list[Tensor] = []
        self._drawn = 0
        """Levels that have drawn their children."""
        self.decision, self._mask = decision, SlicedMask.of(topology, device)
        self._going_B: Tensor | None = None
        """Rows that have not stopped; None where no decision model looks."""

    def compile(self) -> None:
        """Draw in a few kernels, compiled when first used, where it takes dozens otherwise."""
        self._compiled = True

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Take note of the certain texts, as penalties need them."""
        if self._warper is None:
            self._warper = Warper(
                self._params, self._vocab_size, texts, self._device, of_draft=True, vocabulary=self._vocabulary
            )
        else:
            self._warper.restart(texts)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain texts."""
        assert self._warper is not None, "begin() comes first"
        self._warper.advance(emitted)

    def plant(self, root_B: Tensor) -> Tensor:
        """Return the tokens of a new tree, all but the root still missing; `draw` fills them in."""
        self._laws, self._drawn = [], 0
        self._going_B = None if self.decision is None else torch.ones_like(root_B, dtype=torch.bool)
        tokens_BN = torch.full((len(root_B), self.topology.num_nodes), NO_TOKEN, device=root_B.device)
        tokens_BN[:, 0] = root_B
        return tokens_BN

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> None:
        """Draw the children of one level's nodes into `tokens_BN`."""
        assert self._warper is not None, "begin() comes first"
        # At temperature 0 the law is one token; the children are the next ones in order as well.
        weigh = self._warper.ranking if self.scheme.needs_order_only else self._warper.probs
        paths_GP = level.paths_GP if self._params.needs_history else level.paths_GP[:, :0]
        probs_BGV = weigh(self._columns.aligned(logits_BGV), tokens_BN[:, paths_GP])
        if self.scheme.needs_order_only:
            # Fewer children are the first of more: one look serves all nodes of the level.
            children_RK = self._draw(probs_BGV.flatten(0, 1), uniforms_BU.new_empty(probs_BGV.shape[:2].numel(), level.widest))
            self._plant(tokens_BN, level.children, children_RK.view(len(tokens_BN), -1)[:, level.picks])
        else:
            for group in level.groups:
                law_RV = probs_BGV[:, group.rows].flatten(0, 1)
                uniforms_RK = uniforms_BU[:, group.uniforms].reshape(len(law_RV), group.width)
                self._plant(tokens_BN, group.children, self._draw(law_RV, uniforms_RK).view(len(tokens_BN), -1))
        self._drawn += 1
        if not self.scheme.follows_target:
            self._laws.append(probs_BGV)

    def _draw(self, law_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        if not self._compiled or self.scheme.needs_order_only:
            children_RK = self.scheme.draw(law_RV, uniforms_RK)
        else:
            children_RK = compiled(type(self.scheme).draw)(self.scheme, law_RV, uniforms_RK)
        if self._greedy_B is None:
            return children_RK
        greedy_R1 = self._greedy_B.repeat_interleave(len(law_RV) // len(self._greedy_B))[:, None]
        return torch.where(greedy_R1, _TOP.draw(law_RV, uniforms_RK), children_RK)

    def _plant(self, tokens_BN: Tensor, nodes: Tensor | slice, columns_BX: Tensor) -> None:
        """Put drawn columns of the draft's laws into their nodes, as tokens."""
        children_BX = columns_BX if self._vocabulary is None else self._vocabulary.tokens(columns_BX)
        if self._going_B is not None:
            children_BX = torch.where(self._going_B[:, None], children_BX, NO_TOKEN)
        tokens_BN[:, nodes] = children_BX

    def stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Let the decision model look at the nodes that drew last; say whether all rows stop there.

        It sees laws and tokens down to this level only, so that whatever is drawn below has the law verification assumes.
        """
        if self.decision is None or self._going_B is None:
            return False
        self._going_B = self._going_B & self.decision.goes_on(features_BGF, logits_BGV)
        return not bool(self._going_B.any())  # the one look between levels; rows that stopped alone draw nothing

    def tree(self, tokens_BN: Tensor) -> DraftTree:
        """Return the grown tree."""
        laws, depth = tuple(self._laws), self._drawn
        if depth == self.topology.depth:
            return DraftTree.from_topology(self.topology, tokens_BN, laws, self._plan.law_rows_N, self._vocabulary)
        # An early stop is a slice. The tree says to be as deep as ever, so that a round's outcome keeps its form.
        tables, size = self._mask.stopped(depth), len(tokens_BN)
        nodes = len(tables.depths_N)
        return DraftTree(
            tokens_BN[:, :nodes],
            tables.depths_N.expand(size, -1),
            tables.ancestors_NN.expand(size, -1, -1),
            tables.child_table_NK.expand(size, -1, -1),
            self.topology.depth,
            laws + laws[-1:] * (self.topology.depth - depth),
            self._plan.law_rows_N[:nodes].expand(size, -1),
            self._vocabulary,
        )
