"""Dynamic trees: in every round the shape follows what the draft is sure of."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polydraft.decision import Decision
from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.dynamic_costs import measured_costs
from polydraft.drafters.growth import DEFAULT_SCHEME
from polydraft.drafters.head_tree import HeadTreeSession
from polydraft.drafters.model_tree import ModelTreeSession
from polydraft.drafters.path_growth import PathGrowth
from polydraft.drafters.policy import LONGEST_REST
from polydraft.errors import UsageError
from polydraft.models import FeatureHead, LanguageModel, Memory
from polydraft.sampling import RowParams
from polydraft.schemes.arrays import can_sync
from polydraft.theory import Costs
from polydraft.trees import Block, DraftTree, DynamicShape, SlicedMask, StaticBlock, Topology, causal_block
from polydraft.walks import Verdict

_NOMINAL = Costs(draft_level=0.1, tree_pass=lambda nodes: 1 + 0.005 * (nodes - 1))
"""Costs of a machine with matrix units, roughly: for trees that were asked for without a measurement."""


class Dynamic(Drafter):
    """Grow trees by the draft's path probabilities (OPT-Tree, EAGLE-2), as large as they pay.

    Parameters
    ----------
    model : LanguageModel or FeatureHead
        The draft.
    shape : DynamicShape
    costs : Costs, optional
        What levels and passes cost; measured when first needed, and kept for this machine, if not given.
    draft_temperature : float, optional
        Temperature of the laws that rank candidates. It changes speed, never the text's law.
    decision : Decision, optional
        Lets rows stop before what their policy wants.
    """

    name = "dynamic"
    scheme = "auto"

    def __init__(
        self,
        model: LanguageModel | FeatureHead,
        shape: DynamicShape,
        costs: Costs | None = None,
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.model, self.topology, self.costs = model, shape, costs
        self.draft_temperature, self.decision = draft_temperature, decision

    def start(self, params: RowParams, target: LanguageModel) -> "DynamicHeadSession | DynamicModelSession":
        """Go to work on a batch."""
        drawn = not params.all_greedy and self.draft_temperature != 0
        costs = self.costs
        if costs is None:
            scheme = DEFAULT_SCHEME if drawn else "top"
            costs = measured_costs(target, self.model, self.topology.nodes, scheme) if self.topology.adaptive else _NOMINAL
        kind: Any = DynamicHeadSession if isinstance(self.model, FeatureHead) else DynamicModelSession
        session: DynamicHeadSession | DynamicModelSession = kind(self, costs, params, target.vocab_size)
        return session

    def growth(self, costs: Costs, params: RowParams, vocab_size: int, lead: int) -> PathGrowth:
        """Return what grows the trees of a batch."""
        return PathGrowth(
            self.topology,
            costs,
            params,
            self.draft_temperature,
            len(params),
            vocab_size,
            self.model.vocabulary,
            self.model.device,
            lead,
            self.decision,
        )


class DynamicSession(DraftSession):
    """What both kinds of session have in common."""

    recordable = False
    needs_outcome = True
    _growth: PathGrowth

    def _adopt(self, growth: PathGrowth) -> None:
        """Draft by this growth."""
        self._growth = growth
        self.num_nodes, self.depth = growth.shape.nodes, growth.shape.depth

    @property
    def num_uniforms(self) -> int:
        """What the growth uses."""
        return self._growth.num_uniforms

    def obstacle(self) -> str | None:
        """Say why rounds are not recorded: their shapes differ."""
        return "dynamic trees differ from round to round"

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take note of which rows want drafts."""
        self._growth.receive([bool(report[0]) for report in reports])


class DynamicHeadSession(DynamicSession, HeadTreeSession):  # type: ignore[misc]  # `_growth` is of another kind
    """A feature head's memory of one batch, as for static trees; entries of rounds without drafts wait to be read."""

    def __init__(self, drafter: Dynamic, costs: Costs, params: RowParams, vocab_size: int) -> None:
        batch_size = len(params)
        head = drafter.model
        assert isinstance(head, FeatureHead)
        self._adopt(drafter.growth(costs, params, vocab_size, lead=0))
        self._head = head
        self._places = self._growth.places + self.depth + 1 + LONGEST_REST
        self._context = head.start(batch_size, self._places)
        self._texts: list[Sequence[int]] = [()] * batch_size
        self._tokens_BW = torch.zeros(batch_size, 1, dtype=torch.long, device=head.device)
        self._features_BWF: Tensor | None = None
        self._fresh_B = torch.zeros_like(self._tokens_BW[:, 0])
        self._lone_B: Tensor | None = None
        self._seen, self._drafted = False, False
        self._begun: Sequence[int] = range(batch_size)

    def expect(self, depth: int) -> None:
        """Make room for as many fresh entries in every round, those that wait during rests included."""
        self._places = self._growth.places + (max(depth, self.depth) + 1) * (1 + LONGEST_REST)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Make the fresh entries certain, then pass the likeliest paths through the head, level by level."""
        self._drafted = not self._growth.resting
        if not self._drafted:
            return self._growth.bare(tail_B2[:, 1])
        batch_size, device = len(tail_B2), tail_B2.device
        block = causal_block(batch_size, self._tokens_BW.shape[1], device)
        outputs_BWH = self._context.read(self._tokens_BW, self._fused_fresh(), block)
        before_root_B = (self._fresh_B - 1).clamp(min=0)
        self._context.advance(before_root_B)
        self._context.settle([max(len(text) - 2, 0) for text in self._texts])
        outputs = outputs_BWH[torch.arange(batch_size, device=device), before_root_B][:, None]

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> tuple[Tensor, Tensor]:
            nonlocal outputs
            if outputs.shape[1] == 1:
                fused_BWH = outputs.expand(-1, parents_BW.shape[1], -1)
            elif batch_size == 1:
                fused_BWH = outputs.index_select(1, parents_BW[0])
            else:
                fused_BWH = outputs.gather(1, parents_BW[..., None].expand(-1, -1, outputs.shape[-1]))
            outputs = self._context.read(tokens_BW, fused_BWH, block)
            return outputs, self._head.head(outputs)

        visible_B1 = torch.ones(batch_size, 1, dtype=torch.bool, device=device)
        logits_B1V, root_depth_B = self._head.head(outputs), torch.zeros_like(before_root_B)
        return self._growth.grow(tail_B2[:, 1], outputs, logits_B1V, visible_B1, root_depth_B, expand, uniforms_BU)

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor:  # type: ignore[override]
        """Keep the root's entry; what follows it is read again, with the target's features, in the next round that drafts."""
        size, tokens_BW, path_BW = features_BNF.shape[-1], verdict.tokens_BD, verdict.path_BD
        if can_sync(keep_B):  # entries that nobody keeps need not be read
            fresh = max(int(keep_B.max()), 1)
            tokens_BW, path_BW = tokens_BW[:, :fresh], path_BW[:, :fresh]
        features_BWF = features_BNF.gather(1, path_BW[..., None].expand(-1, -1, size))
        if self._drafted:
            root_B = (keep_B > 0).long()
            self._context.advance(root_B if self._lone_B is None else root_B * ~self._lone_B)
            self._tokens_BW, self._features_BWF, self._fresh_B = tokens_BW, features_BWF, keep_B
        else:
            self._wait(tokens_BW, features_BWF, keep_B)
        self._lone_B = None
        return self._growth.learn(verdict.accepted_B, keep_B > 0)

    def _wait(self, tokens_BX: Tensor, features_BXF: Tensor, keep_B: Tensor) -> None:
        """Put a round's entries, `keep_B` of the X, behind those that wait already: several where n-grams were accepted."""
        assert self._features_BWF is not None, "a first round always drafts"
        added, pad = tokens_BX.shape[1], torch.nn.functional.pad
        place_BX = self._fresh_B[:, None] + torch.arange(added, device=keep_B.device)
        # Entries beyond `keep_B` are written too, where the next ones will be.
        self._tokens_BW = pad(self._tokens_BW, (0, added)).scatter_(1, place_BX, tokens_BX)
        place_BXF = place_BX[..., None].expand_as(features_BXF)
        self._features_BWF = pad(self._features_BWF, (0, 0, 0, added)).scatter_(1, place_BXF, features_BXF)
        self._fresh_B = self._fresh_B + keep_B
        if can_sync(keep_B):
            most = max(int(self._fresh_B.max()), 1)
            self._tokens_BW, self._features_BWF = self._tokens_BW[:, :most], self._features_BWF[:, :most]

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note of the new texts."""
        if self._drafted:
            super().settle(texts, emitted)
            return
        self._texts = list(texts)
        self._growth.advance(emitted)


class DynamicModelSession(DynamicSession, ModelTreeSession):  # type: ignore[misc]  # as above
    """A draft model's memory of one batch, as for static trees; after rounds without drafts it catches up."""

    def __init__(self, drafter: Dynamic, costs: Costs, params: RowParams, vocab_size: int) -> None:
        batch_size = len(params)
        model = drafter.model
        assert isinstance(model, LanguageModel)
        self._adopt(drafter.growth(costs, params, vocab_size, lead=1))
        self._model = model
        self._memory = Memory(model, batch_size, behind=2, places=self._growth.places)
        self._lone_B1: Tensor | None = None
        self._drafted, self._behind = False, False
        self._longest, self._texts = 0, [list[int]()] * batch_size

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Read the texts."""
        super().begin(texts, longest, rows, params)
        self._behind = False
        self._texts = [list(text) for text in texts]

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass the likeliest paths through the draft, level by level."""
        self._drafted = not self._growth.resting
        if not self._drafted:
            return self._growth.bare(tail_B2[:, 1])
        if self._behind:
            self._memory.align(self._texts, self._longest)
            self._behind = False
        batch_size, device = len(tail_B2), tail_B2.device
        root_block = self._block(_pair(device), batch_size)
        features_B2F = self._memory.context.extend(tail_B2, root_block)

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> tuple[Tensor, Tensor]:
            features_BWF = self._memory.context.extend(tokens_BW, block)
            return features_BWF, self._model.head(features_BWF)

        return self._growth.grow(
            tail_B2[:, 1],
            features_B2F[:, 1:],
            self._model.head(features_B2F[:, 1:]),
            root_block.visible_BTU[:, 1],
            root_block.depths_BT[:, 1],
            expand,
            uniforms_BU,
        )

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor:  # type: ignore[override]
        """Keep the token before the root, the root, and the accepted path but its last token."""
        if self._drafted:
            # A static tree's node n has place n + 1; here it is where its level put it.
            path_BD = self._growth.places_BN.gather(1, verdict.path_BD) - 1
            super().commit(dataclasses.replace(verdict, path_BD=path_BD), keep_B, features_BNF)
        return self._growth.learn(verdict.accepted_B, keep_B > 0)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note of the new texts; what a round without drafts added is read later."""
        self._texts = [list(text) for text in texts]
        if self._drafted:
            super().settle(texts, emitted)
            return
        self._behind = True
        self._growth.advance(emitted)

    def catch_up(self, texts: Sequence[Sequence[int]], added: Sequence[Sequence[int]]) -> None:
        """Read what others proposed, after a rest only when drafts are wanted again."""
        self._texts = [list(text) for text in texts]
        if self._behind:
            self._growth.advance(added)
        else:
            super().catch_up(texts, added)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts; a memory that is behind will find that itself."""
        self._texts = [list(text) for text in texts]
        if not self._behind:
            super().rewind(texts)


@lru_cache(maxsize=4)
def _pair(device: torch.device) -> StaticBlock:
    """Return the pass over the last two tokens."""
    return SlicedMask.of(Topology(), device, lead=1).level(0, 1)


def _shape(parts: Parts) -> DynamicShape:
    return parts.dynamic or DynamicShape.like(parts.topology)


def _costs(parts: Parts) -> Costs | None:
    """Measure only for trees that were asked for by name: small models of tests have no costs worth measuring."""
    return None if parts.dynamic is not None else _NOMINAL


@DRAFTERS.register("dynamic")
def _build(parts: Parts) -> Dynamic:
    if not isinstance(parts.draft, LanguageModel):
        raise UsageError("drafter 'dynamic' needs a draft model; pass draft=NAME, a folder, or early-exit:k")
    return Dynamic(parts.draft, _shape(parts), _costs(parts), parts.draft_temperature, parts.decision)


@DRAFTERS.register("dynamic-head")
def _build_head(parts: Parts) -> Dynamic:
    if not isinstance(parts.draft, FeatureHead):
        raise UsageError("drafter 'dynamic-head' needs a feature head; make one with: polydraft train head")
    return Dynamic(parts.draft, _shape(parts), _costs(parts), parts.draft_temperature, parts.decision)
