"""Trees whose shape follows the draft's path probabilities, anew in every round.

References
----------
.. [1] Wang et al. 2024, OPT-Tree, arXiv:2406.17276.
.. [2] Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run
from polydraft.draft.assembly import Assembled, Passes, assemble
from polydraft.draft.builder import Builder, DraftDistributions
from polydraft.draft.candidates import (
    Front,
    Level,
    Widths,
    best_children,
    drawn_children,
    even_children,
    even_levels,
    fixed_shares,
    gains,
    room_of_levels,
)
from polydraft.draft.decision import Decision
from polydraft.draft.fused_growth import FusedGrowth
from polydraft.draft.fused_learning import allow_sizes, learn_round
from polydraft.draft.policy import Allotment, Plan, RowPolicy
from polydraft.draft.sizes import Size, SizeChoice, sizes_of
from polydraft.draft.source import DistributionSource
from polydraft.draft.speedup import Costs
from polydraft.draft.static_builder import DECISION_OBSTACLE, DEFAULT_SCHEME
from polydraft.sampling import NO_TOKEN, RowParams, SamplingParams
from polydraft.transfers import assign
from polydraft.trees import Block, DraftTree, DynamicShape, Topology
from polydraft.verify import SCHEMES, Scheme, Verdict
from polydraft.verify.arrays import Array, arange, as_array, as_tensor, at_least, can_sync, largest, put, top, total, xp

_CAPTURED = ("cuda",)
"""Devices whose rounds are captured, and have one of a few sizes for it."""
_TOP = SCHEMES.get("top")()
_GREEDY_DRAFT_TEMPERATURE = 1.0
"""Of the distributions that rank candidates where the target is greedy: there they estimate which token is the likeliest."""


class DynamicBuilder(Builder):
    """Grow trees whose shape follows the draft's confidence.

    Where the target is greedy, each level takes the `beam` likeliest paths further, and of all candidates of all levels the
    likeliest make the tree [1, 2]. Children are then chosen by rank, not drawn: verification by naive sampling is exact, and
    accepts as much as any exact verifier could. Above temperature 0 drawn children are accepted more often: how many a node
    draws, few where the draft is sure and many where it is not, and which of them draw further is decided by the draft's
    distributions and the tokens so far, which leaves the distribution of whatever is drawn as verification assumes it; no child
    that was drawn is left out again.

    On a GPU rounds are captured: all trees of a round have one of a few sizes, which `SizeChoice` chooses ahead of time.

    Parameters
    ----------
    source : DistributionSource
    shape : DynamicShape
    params : RowParams
        The target's.
    vocab_size : int
        The target's.
    costs : Costs
    draft_temperature : float, optional
        Temperature of the distributions that rank candidates; the target's otherwise, 1 where that is 0.
    decision : Decision, optional
        Lets rows stop before what their policy wants.
    """

    asked_scheme = "auto"

    def __init__(
        self,
        source: DistributionSource,
        shape: DynamicShape,
        params: RowParams,
        vocab_size: int,
        *,
        costs: Costs,
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.source: DistributionSource = source
        self.shape, self.num_nodes, self.depth = shape, shape.nodes, shape.depth
        self._draft_temperature = draft_temperature
        self._likeliest_B = torch.zeros(len(params), dtype=torch.bool, device=source.device)
        """Rows whose candidates are the likeliest tokens, even where others' are drawn."""
        self._usual = SCHEMES.get(DEFAULT_SCHEME)()
        self._distributions = DraftDistributions(source, self._ranking_params(params), vocab_size)
        limits = [limit for limit in (self._usual.max_children, self._distributions.num_columns) if limit is not None]
        self._sized = decision is None and source.device.type in _CAPTURED
        self._room = even_levels(shape, min(limits)) if self._sized else room_of_levels(shape, min(limits))
        self._shares = fixed_shares(shape, self._room)
        self._vocab_size, self._device = vocab_size, source.device
        self.policy: RowPolicy = RowPolicy(costs, len(params), shape.nodes, source.device, shape.adaptive)
        self._decision = decision
        self._choice: SizeChoice | None = None
        """Where rounds may be captured: which size they have."""
        if decision is not None:
            self.obstacle = DECISION_OBSTACLE
        elif self._sized:
            self._choice = SizeChoice(sizes_of(shape), costs, len(params), shape.depth, source.device)
        else:
            self.obstacle = "dynamic trees differ from round to round where the host looks at them"
        self.learns = self.elastic = self.movable = self._choice is None
        self._resting = False
        self._plan: Plan | None = None
        self._level_probs: list[Tensor] = []
        self._any_distribution_1 = torch.full((1,), 1 / vocab_size, device=source.device)
        """Of rounds in which all rows rest: no child was drawn, so any distribution will do."""
        self._grown: Assembled | None = None
        self._fused = FusedGrowth(shape, Passes(source.lead, self.places), source.vocabulary, vocab_size, source.device)

    def _ranking_params(self, params: RowParams) -> RowParams:
        """Take the rows' parameters; return those of the distributions that rank candidates."""
        self._drawn = not params.all_greedy and self._draft_temperature != 0
        self._mixed = self._drawn and params.mixed
        assign(self._likeliest_B, params.greedy)
        return params.map(partial(_ranking_params, self._draft_temperature))

    @property
    def resting(self) -> bool:
        """Whether every row rests, as the host knows it; of a captured round the source reads along even then."""
        return self._resting and self._choice is None

    @property
    def kind(self) -> Hashable:
        """The size of the next round's trees."""
        return None if self._choice is None else self._choice.current

    @property
    def num_kinds(self) -> int:
        """One per size."""
        return 1 if self._choice is None else len(self._choice.sizes)

    def rehearse(self, number: int | None) -> None:
        """Let all rounds have one size, the largest first."""
        if self._choice is not None:
            self._choice.rehearsed = None if number is None else self.num_kinds - 1 - number

    @property
    def _size(self) -> Size:
        """What the next trees may have at most, as the host knows it."""
        return Size(self.shape.depth, self.shape.nodes) if self._choice is None else self._choice.sizes[self._choice.current]

    @property
    def scheme(self) -> Scheme:
        """The default scheme; `top` where no row draws."""
        return self._usual if self._drawn else _TOP

    @property
    def _widths(self) -> tuple[Widths, ...]:
        return self._room if self._drawn else ()

    @property
    def num_uniforms(self) -> int:
        """One per candidate that the levels have room for, where they are drawn."""
        return sum(level.total for level in self._widths)

    @property
    def places(self) -> int:
        """A full front on every level, behind the lead."""
        width = max([self.shape.beam, *(level.nodes for level in self._room)])
        return self.source.lead + 1 + width * (self.shape.depth - 1)

    def share(self, loads: Sequence[int], steady: Sequence[bool | None]) -> None:
        """Let the policy and the choice of sizes reckon with it."""
        self.policy.share(loads)
        if self._choice is not None:
            self._choice.share(loads)

    def resize(self, params: RowParams) -> None:
        """Have as many rows as there are parameters."""
        self._likeliest_B = self._likeliest_B.new_zeros(len(params))
        self._distributions.resize(self._ranking_params(params))
        self.policy.resize(len(params))

    def swap_rows(self, first: int, second: int) -> None:
        """Swap two rows, with what was learnt of them."""
        self._distributions.swap_rows(first, second)
        self.policy.swap_rows(first, second)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Take note of the certain texts of new rows, and of all rows' parameters."""
        self._distributions.begin(texts, rows, self._ranking_params(params))
        new_B = as_array(torch.tensor([row in rows for row in range(len(params))], device=self._device))
        self.policy.begin(new_B)
        if self._choice is not None:
            self._choice.begin(rows, new_B)
        # Where all others rest, and new texts begin with a rest, there is no need for a pass of the draft.
        if self._resting and self._device.type == "cpu":
            self._resting = not self.policy.drafting_B[list(rows)].any() and self.source.can_wait
        else:
            self._resting = False

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain texts."""
        self._distributions.advance(emitted)

    def _bare(self, root_B: Tensor, plan: Plan | None = None) -> DraftTree:
        """Return a tree of the root alone, where all rows rest or nothing was found to pay; it verifies as deep trees do."""
        self._plan, self._grown = plan, None
        distributions = (
            (self._any_distribution_1.expand(len(root_B), 1, self._vocab_size),) * self.shape.depth if self._drawn else ()
        )
        tree = DraftTree.from_topology(Topology(), root_B[:, None], distributions, torch.zeros_like(root_B[:1]))
        return dataclasses.replace(tree, depth=self.shape.depth, reach=0)

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Grow the trees of a round: pass the likeliest paths through the source, level by level."""
        if self.resting:
            return self._bare(tail_B2[:, 1])
        lead, features = self.source.lead, self.source.root(tail_B2)
        if not self._size.levels:
            return self._bare(tail_B2[:, 1])
        logits = self.source.logits(features)
        temperature_B = None if self._drawn or self._choice is None else self._distributions.temperature_B
        if temperature_B is not None and self._fused.fits(logits):
            return self._by_kernels(tail_B2[:, 1], temperature_B, logits)
        going_B, root_B = self.policy.drafting_B, as_array(tail_B2[:, 1])
        levels_B, fronts, self._level_probs = going_B * 1, list[Front](), []
        nodes_B, scores_B1 = 0 * levels_B, 0.0 * levels_B[:, None]
        paths_BWP = root_B[:, None, None][..., :0]
        visible_BWU = arange(lead + 1, root_B)[None, None] + 0 * root_B[:, None, None] >= 0
        level, _ = self._children(0, scores_B1, logits, paths_BWP, nodes_B, uniforms_BU)
        levels = [level.masked(going_B)]
        while len(levels) < self._depth:
            front = Front.of(levels[-1], self._widths[len(levels)].nodes if self._drawn else self.shape.beam)
            mass_B = front.mass_B
            if self._choice is None:
                nodes_B = nodes_B + (levels[-1].tokens_BX != NO_TOKEN).sum(-1)
                going_B = going_B & self.policy.wants_level(mass_B) & self._goes_on(features, logits, going_B)
                if self._drawn:
                    going_B = going_B & (nodes_B < self.shape.nodes - 1)
            else:
                going_B = going_B & (self._choice.levels_B > len(levels))
            if can_sync(logits) and not going_B.any():
                break
            if self._distributions.params.needs_history:
                own_BW1 = front.tokens_BW[..., None]
                paths_BWP = xp(own_BW1).concatenate([front.inherit(paths_BWP), own_BW1], -1)
            visible_BWU = front.see(visible_BWU)
            depths_BW = lead + len(levels) + 0 * front.parents_BW
            width, places = visible_BWU.shape[1:]
            block = Block(places - width, as_tensor(depths_BW), as_tensor(visible_BWU), levels=(width,))
            features = self.source.expand(as_tensor(front.tokens_BW), as_tensor(front.parents_BW), block)
            logits = self.source.logits(features)
            level, allotment = self._children(len(levels), front.scores_BW, logits, paths_BWP, nodes_B, uniforms_BU)
            levels.append(level.masked(going_B))
            fronts.append(front)
            if self._choice is None:
                self._report(mass_B, levels, allotment, going_B)
            levels_B = levels_B + going_B
        return self._tree(root_B, levels, fronts, levels_B)

    def _by_kernels(self, root_B: Tensor, temperature_B: Tensor, logits_BWV: Tensor) -> DraftTree:
        """Do the same in a few kernels, where candidates are the likeliest and sizes are chosen ahead of time."""
        assert self._choice is not None
        allowed_B, wanted_B = allow_sizes(self.policy, self._choice)
        growing = self._fused.begin(temperature_B, allowed_B, self._depth)
        growing.grow(logits_BWV)
        for _ in range(1, self._depth):
            front = growing.front()
            growing.grow(self.source.logits(self.source.expand(front.tokens_BW, front.parents_BW, front.block)))
        self._grown, self._plan = growing.tree(root_B, wanted_B, self._size.nodes)
        return self._grown.draft

    def made_up(self, dtype: torch.dtype) -> DraftTree | None:
        """Grow a tree of even logits, where kernels do."""
        return None if self._drawn or self._choice is None else self._fused.made_up(len(self._likeliest_B), dtype)

    def _report(self, mass_B: Array, levels: list[Level], allotment: Allotment | None, going_B: Array) -> None:
        """Tell the policy what the last level brought."""
        if allotment is not None:
            self.policy.saw_allotment(mass_B, allotment, going_B)
        elif self.policy.adaptive:
            gained_B = self._promise(levels) - self._promise(levels[:-1])
            self.policy.saw_level(mass_B, at_least(gained_B, 0.0) / self.policy.worth_B, going_B)

    def _promise(self, levels: list[Level]) -> Array:
        """Return what the best tree of all candidates of some levels promises, once its nodes are paid for."""
        scores_BC = xp(levels[0].scores_BX).concatenate([level.scores_BX for level in levels], 1)
        best_BM = top(scores_BC, min(self.shape.nodes - 1, scores_BC.shape[1]))[0]
        return self.policy.net(xp(best_BM).exp(best_BM))

    @property
    def _depth(self) -> int:
        return min(len(self._widths) if self._drawn else self.shape.depth, self._size.levels)

    def _goes_on(self, features_BWF: Tensor, logits_BWV: Tensor, going_B: Array) -> Array:
        return going_B if self._decision is None else as_array(self._decision.goes_on(features_BWF, logits_BWV))

    def _tree(self, root_B: Array, levels: list[Level], fronts: list[Front], levels_B: Array) -> DraftTree:
        """Keep all children that were drawn, or of the likeliest as many as pay."""
        concatenate, where, exp = xp(root_B).concatenate, xp(root_B).where, xp(root_B).exp
        scores_BC = concatenate([level.scores_BX for level in levels], 1)
        if self._drawn:
            keep_BC = concatenate([level.tokens_BX for level in levels], 1) != NO_TOKEN
            counts_B = keep_BC.sum(-1)
        else:
            best_BM, index_BM = top(scores_BC, min(self._size.nodes - 1, scores_BC.shape[1]))
            wanted_B = self.policy.counts(exp(best_BM)) if self._choice is None else self._choice.nodes_B - 1
            counts_B = xp(root_B).minimum(wanted_B, (best_BM > -torch.inf).sum(-1))
            keep_BC = scores_BC > torch.inf
            put(keep_BC, index_BM, arange(best_BM.shape[1], best_BM) < counts_B[:, None])
        room = self.shape.nodes if self._drawn else self._size.nodes
        most = max(int(counts_B.max()), 1) if isinstance(counts_B, np.ndarray) else min(room - 1, keep_BC.shape[1])
        # The number of levels is the batch's: more of them must not change a row's sum, which its policy learns from.
        chances_BC = where(keep_BC, exp(scores_BC), 0.0)
        found_BD = None
        if self._choice is not None:
            found = [total(part_BX) for part_BX in chances_BC.split([level.scores_BX.shape[1] for level in levels], 1)]
            found_BD = torch.stack(found + [0.0 * found[0]] * (self.shape.depth - len(found)), 1)
        self._plan = plan = Plan(total(chances_BC), counts_B, levels_B, found_BD)
        if self._choice is None and isinstance(counts_B, np.ndarray) and not counts_B.any():
            return self._bare(as_tensor(root_B), plan)
        branch = max([level.children for level in self._widths], default=self.shape.branch)
        passes = Passes(self.source.lead, self.places)
        self._grown = grown = assemble(root_B, levels, fronts, keep_BC, most, branch, self.shape.depth, passes)
        draft = grown.draft if self._choice is None else dataclasses.replace(grown.draft, reach=len(levels))
        if not self._drawn:
            return draft
        distributions = tuple(self._level_probs)
        return dataclasses.replace(
            draft,
            distributions=distributions + distributions[-1:] * (self.shape.depth - len(distributions)),
            distribution_rows_BN=as_tensor(grown.slots_BN),
            vocabulary=self._distributions.vocabulary,
        )

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Nodes are where their levels put them; any place for nodes without children."""
        return path_BD + self.source.lead if self._grown is None else self._grown.places_BN.gather(1, path_BD)

    def learn(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor:
        """Let the policy compare the round with its plan; report which rows want drafts next."""
        plan = self._plan
        if self._choice is not None and plan is not None and kernels_run(keep_B):
            return learn_round(self.policy, self._choice, plan, verdict.accepted_B, keep_B)
        active_B = as_array(keep_B) > 0
        if plan is None:
            self.policy.rested(active_B)
        else:
            self.policy.learn(plan, as_array(verdict.accepted_B), active_B)
        if self._choice is None:
            return as_tensor((self.policy.drafting_B & active_B)[:, None] * 1)
        if plan is None:
            self._choice.rested()
        else:
            self._choice.learn(self.policy.worth_B[:, None] * plan.found_BD, plan.levels_B * active_B, self.policy.rate_B)
        return as_tensor(self._choice.report(self.policy.rest_B, active_B))

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take note of which rows want drafts, and how many."""
        if self._choice is not None:
            return self._choice.receive(reports)
        self._resting = not any(report[0] for report in reports) and self.source.can_wait

    def _children(
        self, depth: int, scores_BW: Array, logits_BWV: Tensor, paths_BWP: Array, nodes_B: Array, uniforms_BU: Tensor
    ) -> tuple[Level, Allotment | None]:
        """Return the candidates below some nodes, drawn or chosen, and how many were allotted where they are drawn."""
        probs_BWV = self._distributions.probs(logits_BWV, as_tensor(paths_BWP))
        allotment = None
        if self._drawn:
            most, used = self._widths[depth].children, sum(level.total for level in self._widths[:depth])
            own_BU = uniforms_BU[:, used : used + scores_BW.shape[1] * most]
            likeliest_B = as_array(self._likeliest_B) if self._mixed else None
            if self._choice is None:
                # How many children pay and which of them are certain both follow from the likeliest tokens: found once.
                ranked = largest(probs_BWV.flatten(0, 1), most)
                gain_BWK = gains(ranked[0], xp(scores_BW).exp(scores_BW))
                allotment = self.policy.allot(gain_BWK, nodes_B, self._shares[depth], least=int(depth == 0))
                level = drawn_children(self.scheme, scores_BW, probs_BWV, ranked, allotment.counts_BW, own_BU, likeliest_B)
            else:
                level = even_children(self.scheme, scores_BW, probs_BWV, own_BU, likeliest_B)
            self._level_probs.append(probs_BWV)
        else:
            level = best_children(scores_BW, probs_BWV, self.shape.branch, self.shape.nodes - 1)
        if self._distributions.vocabulary is None:
            return level, allotment
        tokens_BX = as_array(self._distributions.tokens(as_tensor(level.tokens_BX)))
        return dataclasses.replace(level, tokens_BX=tokens_BX), allotment


def _ranking_params(draft_temperature: float | None, params: SamplingParams) -> SamplingParams:
    """Return a row's parameters for ranking candidates."""
    temperature = draft_temperature or params.temperature or _GREEDY_DRAFT_TEMPERATURE
    truncation: Any = {} if params.temperature > 0 else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return dataclasses.replace(params, temperature=temperature, **truncation)
