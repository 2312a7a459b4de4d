"""Trees of a static shape, drawn level by level."""

from dataclasses import replace
from typing import ClassVar, TypedDict

import torch
from torch import Tensor

from polydraft.devices import assign, is_host
from polydraft.draft.builder import DistributionBuilder, DraftDistributions
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_plan import WIDEST_SCHEME, GroupPlan, LevelPlan, TreePlan, plan_passes
from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN, PartialVocabulary, RowParams
from polydraft.sampling.warper import RANKED_NATS
from polydraft.trees import DraftTree, Topology
from polydraft.verify import SCHEMES, Scheme

DEFAULT_SCHEME = "hybrid"
"""What ``"auto"`` means."""

_TOP = SCHEMES.get("top")()


def _automatic(topology: Topology) -> str:
    limit = SCHEMES.get(DEFAULT_SCHEME).max_children
    return DEFAULT_SCHEME if limit is None or topology.max_children <= limit else WIDEST_SCHEME


@operation
def plant_columns(columns_BX: Tensor, nodes_GK: Tensor, tokens_BN: Tensor, vocabulary: PartialVocabulary | None) -> None:
    """Write the tokens of drawn columns into `tokens_BN`; `NO_TOKEN` stays `NO_TOKEN`.

    Parameters
    ----------
    columns_BX : Tensor
        Columns of the draft's distributions, one for each of `nodes_GK`.
    nodes_GK : Tensor
        The nodes to write, in draw order; 0 for none.
    tokens_BN : Tensor
        All tokens of the tree; written in place.
    vocabulary : PartialVocabulary, optional
        What the columns stand for, if they are not all tokens.
    """
    tokens_BX = columns_BX if vocabulary is None else vocabulary.tokens(columns_BX)
    root_B1 = tokens_BN[:, :1].clone()
    tokens_BN.scatter_(1, nodes_GK.flatten().expand_as(tokens_BX), tokens_BX)
    tokens_BN[:, :1] = root_B1


@operation
def plant_largest(
    logits_BGV: Tensor,
    nodes_GK: Tensor,
    tokens_BN: Tensor,
    vocabulary: PartialVocabulary | None,
    vocab_size: int,
) -> None:
    """Write the tokens of the largest logits into `tokens_BN`; of equal ones the first, `NO_TOKEN` for tokens without weight.

    They are the tokens that `top` draws from `Warper.ranking`, except that its weights round off differences that kernels may
    keep.

    Parameters
    ----------
    logits_BGV : Tensor
        Logits at G nodes per row.
    nodes_GK, tokens_BN, vocabulary
        As for `plant_columns`.
    vocab_size : int
        The target's; columns beyond it are padding.
    """
    known_BGV = logits_BGV if vocabulary is not None else logits_BGV[..., :vocab_size]
    scores_RV = known_BGV.float().flatten(0, 1)
    weights_RV = (scores_RV - (scores_RV.amax(-1, keepdim=True) - RANKED_NATS)).clamp_(min=0)
    columns_RK = _TOP.draw(weights_RV, weights_RV.new_empty(len(weights_RV), nodes_GK.shape[1]))
    plant_columns.reference(columns_RK.view(len(tokens_BN), -1), nodes_GK, tokens_BN, vocabulary)


class DrawOptions(TypedDict, total=False):
    """Keyword arguments of `StaticBuilder`."""

    scheme: str | Scheme
    draft_temperature: float | None


class StaticBuilder(DistributionBuilder):
    """Draw the children of every node of a static tree from a source's distributions.

    `polydraft.draft.load_builder` uses smaller trees in some rounds, `polydraft.draft.stopping_builder` lets rows draft less.

    Parameters
    ----------
    source : DistributionSource
    topology : Topology
    params : RowParams
        The target's.
    vocab_size : int
        The target's.
    scheme : str or Scheme
        A registered scheme, ``"auto"``, or one of your own. At draft temperature 0, `top` replaces it: the limit of them all.
    draft_temperature : float, optional
        Temperature of the draft; by default the target's.
    """

    ROW_STATE: ClassVar[tuple[str, ...]] = ("_greedy_B",)
    elastic = static = movable = True
    reads_along: bool = False
    """Whether a source that keeps the text passes the root even if that is the whole tree."""
    whole: bool = True
    """Whether every row draws all children of its nodes."""

    def __init__(
        self,
        source: DistributionSource,
        topology: Topology,
        params: RowParams,
        vocab_size: int,
        *,
        scheme: str | Scheme = "auto",
        draft_temperature: float | None = None,
    ) -> None:
        self.source: DistributionSource = source
        self.topology, self.num_nodes, self.depth = topology, topology.num_nodes, topology.depth
        self._draft_temperature = draft_temperature
        named = _automatic(topology) if scheme == "auto" else scheme
        self.usual_scheme = named if isinstance(named, Scheme) else SCHEMES.get(named)()
        """The scheme while some row draws."""
        self.asked_scheme = scheme if isinstance(scheme, str) else None
        self._greedy_B = torch.zeros(len(params), dtype=torch.bool, device=source.device)
        """Rows whose candidates are the likeliest tokens."""
        self._distributions = DraftDistributions(source, self._draft_params(params), vocab_size)
        self._whole_plan = plan_passes(topology, source.device, source.lead)  # captures need it for as long as they last
        self._level_probs: list[Tensor] = []
        self._drawn = 0
        """Levels drawn so far."""

    def _draft_params(self, params: RowParams) -> RowParams:
        """Return the rows' parameters for the draft, at its own temperature if it has one."""
        temperature = self._draft_temperature
        own = params if temperature is None else params.map(lambda row: replace(row, temperature=temperature))
        assign(self._greedy_B, own.greedy)
        return own

    @property
    def scheme(self) -> Scheme:
        """The scheme that was asked for; `top` if no row draws."""
        return _TOP if self._distributions.params.decided else self.usual_scheme

    @property
    def next_tree(self) -> Topology:
        """The shape of the next round's trees."""
        return self.topology

    @property
    def plan(self) -> TreePlan:
        """The next round's passes."""
        return self._whole_plan

    @property
    def num_uniforms(self) -> int:
        """One per candidate."""
        return self.next_tree.num_nodes - 1

    @property
    def places(self) -> int:
        """One per node, after the lead."""
        return self.source.lead + self.num_nodes

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass each level through the source and draw the next one."""
        tokens_BN, levels = self.plant(tail_B2[:, 1]), self.plan.levels
        features_BWF = self.source.root(tail_B2) if levels or (self.reads_along and self.source.keeps_text) else None
        for level in levels:
            if level.first > 0:
                tokens_BW, block = tokens_BN[:, level.first : level.stop], level.block.expand(len(tokens_BN))
                features_BWF = self.source.expand(tokens_BW, level.parents_T, block)
            assert features_BWF is not None
            drawing_BGF = features_BWF[:, level.drawing]
            logits_BGV = self.source.logits(drawing_BGF)
            self.draw(level, logits_BGV, tokens_BN, uniforms_BU)
            if self.stops(drawing_BGF, logits_BGV):
                break
        return self.tree(tokens_BN)

    def stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Say whether all rows stop after the children that these nodes have just drawn."""
        return False

    def made_up(self, dtype: torch.dtype) -> DraftTree | None:
        """Return a tree without candidates; None if they are drawn, which takes no kernels of ours."""
        if not self.scheme.needs_order_only:
            return None
        tokens_BN = torch.zeros(len(self._greedy_B), self.num_nodes, dtype=torch.long, device=self.source.device)
        rows_N, vocabulary = self._whole_plan.distribution_rows_N, self._distributions.vocabulary
        return DraftTree.from_topology(self.topology, tokens_BN, (), rows_N, vocabulary)

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Return the nodes' own numbers, after the lead."""
        return path_BD + self.source.lead if self.source.lead else path_BD

    def plant(self, root_B: Tensor) -> Tensor:
        """Start a tree: return its tokens, of which only the root is there; `draw` fills in the others."""
        self._level_probs, self._drawn = [], 0
        tokens_BN = torch.full((len(root_B), self.next_tree.num_nodes), NO_TOKEN, device=root_B.device)
        tokens_BN[:, 0] = root_B
        return tokens_BN

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> Tensor | None:
        """Draw the children of one level's nodes into `tokens_BN`; return the distributions if they were needed."""
        distributions, scheme = self._distributions, self.scheme
        if distributions.params.needs_history:
            paths_BGP = tokens_BN[:, level.paths_GP]
        else:
            paths_BGP = tokens_BN[:, None, :0].expand(-1, logits_BGV.shape[1], -1)
        depth, top, width = self._drawn, type(scheme) is type(_TOP), level.nodes_GK.shape[1]
        self._drawn += 1
        if top and is_host(tokens_BN.device):
            columns_BGK = distributions.largest(logits_BGV, paths_BGP, depth, width)
            if columns_BGK is not None:
                self._plant(tokens_BN, level, columns_BGK.flatten(0, 1))
                return None
        logits_BGV = distributions.prepared(logits_BGV, paths_BGP, depth)
        if top and distributions.in_order and self.whole:
            plant_largest(logits_BGV, level.nodes_GK, tokens_BN, distributions.vocabulary, distributions.vocab_size)
            return None
        # At temperature 0 all mass is on one token, but the children are the next ones in order as well.
        weigh = distributions.ranking if scheme.needs_order_only else distributions.probs
        probs_BGV = weigh(logits_BGV, paths_BGP)
        if scheme.needs_order_only:
            # Fewer children are the first ones of more, so one draw serves all nodes of the level.
            weights_RV = probs_BGV.flatten(0, 1)
            children_RK = self._draw(weights_RV, uniforms_BU.new_empty(len(weights_RV), width))
            self._plant(tokens_BN, level, children_RK)
        else:
            for group in level.groups:
                distribution_RV = probs_BGV[:, group.rows].flatten(0, 1)
                uniforms_RK = uniforms_BU[:, group.uniforms].reshape(len(distribution_RV), group.width)
                self._plant(tokens_BN, group, self._draw(distribution_RV, uniforms_RK))
        if not scheme.follows_target:
            self._level_probs.append(probs_BGV)
        return None if scheme.needs_order_only else probs_BGV

    def _draw(self, distribution_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        children_RK = self.scheme.draw(distribution_RV, uniforms_RK)
        if not self._distributions.params.mixed:
            return children_RK
        greedy_R1 = self._greedy_B.repeat_interleave(len(distribution_RV) // len(self._greedy_B))[:, None]
        return torch.where(greedy_R1, _TOP.draw(distribution_RV, uniforms_RK), children_RK)

    def _plant(self, tokens_BN: Tensor, plan: GroupPlan | LevelPlan, columns_RK: Tensor) -> None:
        """Write drawn columns into their nodes, as tokens."""
        plant_columns(columns_RK.view(len(tokens_BN), -1), plan.nodes_GK, tokens_BN, self._distributions.vocabulary)

    def tree(self, tokens_BN: Tensor) -> DraftTree:
        """Return the grown tree."""
        tree, distributions = self.next_tree, tuple(self._level_probs)
        if tree.depth == 0:
            return self._bare(tokens_BN[:, 0])
        rows_N, vocabulary = self.plan.distribution_rows_N, self._distributions.vocabulary
        # As deep as the largest tree, so that outcomes have the same width.
        distributions += tuple(last_BGV[:, :1] for last_BGV in distributions[-1:]) * (self.depth - tree.depth)
        grown = DraftTree.from_topology(tree, tokens_BN, distributions, rows_N, vocabulary)
        return grown if tree.depth == self.depth else replace(grown, depth=self.depth, reach=tree.depth)
