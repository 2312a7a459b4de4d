"""Trees of one static shape, drawn level by level."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run
from polydraft.draft.builder import Builder, DraftDistributions
from polydraft.draft.decision import Decision
from polydraft.draft.planting import plant_columns, plant_largest, takes_largest
from polydraft.draft.policy import Plan as RowPlan
from polydraft.draft.policy import RowPolicy
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_plan import WIDEST_SCHEME, GroupPlan, LevelPlan, plan_passes
from polydraft.draft.tree_choice import TreeChoice
from polydraft.row_storage import RowStorage
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.transfers import assign
from polydraft.trees import DraftTree, SlicedMask, Topology
from polydraft.verify import SCHEMES, Scheme, Verdict
from polydraft.verify.arrays import as_array, as_tensor

DEFAULT_SCHEME = "hybrid"
"""What ``"auto"`` means."""
DECISION_OBSTACLE = "the decision model is looked at between levels"

_TOP = SCHEMES.get("top")()


def _automatic(topology: Topology) -> str:
    limit = SCHEMES.get(DEFAULT_SCHEME).max_children
    return DEFAULT_SCHEME if limit is None or topology.max_children <= limit else WIDEST_SCHEME


class StaticBuilder(Builder):
    """Draw the children of every node of a static tree from a source's distributions.

    Parameters
    ----------
    source : DistributionSource
    topology : Topology
    params : RowParams
        The target's.
    vocab_size : int
        The target's.
    scheme : str or Scheme
        A registered scheme, ``"auto"``, or one of your own; where the draft temperature is 0 it is `top`, the limit of all.
    draft_temperature : float, optional
        Temperature of the draft, the target's otherwise.
    decision : Decision, optional
        Lets rows stop before the last level.
    choice : TreeChoice, optional
        Chooses among smaller trees, and `topology`, from round to round.
    policy : RowPolicy, optional
        Lets rows rest while drafting does not pay; on a CPU.
    """

    elastic = static = movable = True

    def __init__(
        self,
        source: DistributionSource,
        topology: Topology,
        params: RowParams,
        vocab_size: int,
        *,
        scheme: str | Scheme = "auto",
        draft_temperature: float | None = None,
        decision: Decision | None = None,
        choice: TreeChoice | None = None,
        policy: RowPolicy | None = None,
    ) -> None:
        self.source: DistributionSource = source
        self.topology, self.num_nodes, self.depth = topology, topology.num_nodes, topology.depth
        self._draft_temperature = draft_temperature
        named = _automatic(topology) if scheme == "auto" else scheme
        self._usual = named if isinstance(named, Scheme) else SCHEMES.get(named)()
        self.asked_scheme = scheme if isinstance(scheme, str) else None
        self._storage, self._limits = RowStorage(), False
        """`_limits`: whether rehearsed rounds are such as have limited rows."""
        self._greedy_B = torch.zeros(len(params), dtype=torch.bool, device=source.device)
        """Rows whose candidates are the likeliest tokens."""
        self._limited_B = torch.zeros_like(self._greedy_B)
        """Rows whose trees are the steady one, where others' are larger."""
        self._steady: list[bool] = [False] * len(params)
        """The same, whatever the tree."""
        self._distributions = DraftDistributions(source, self._draft_params(params), vocab_size)
        assert choice is None or decision is None
        self._choice, self._vocab_size = choice, vocab_size
        self._trees = (topology,) if choice is None else choice.trees
        self._plans = [plan_passes(tree, source.device, source.lead) for tree in self._trees]
        self._level_probs: list[Tensor] = []
        self._drawn = 0
        """Levels that have drawn their children."""
        self.decision, self._mask = decision, SlicedMask.of(topology, source.device)
        self.obstacle = None if decision is None else DECISION_OBSTACLE
        self._going_B: Tensor | None = None
        """Rows that draft and have not stopped; None where all do."""
        self.policy, self._resting = policy, False
        self._plan: RowPlan | None = None
        if policy is not None:
            self.obstacle, self.learns = "the host looks whether drafting pays", True

    def _draft_params(self, params: RowParams) -> RowParams:
        """Return the rows' parameters for the draft, at its own temperature if it has one."""
        temperature = self._draft_temperature
        own = params if temperature is None else params.map(lambda row: replace(row, temperature=temperature))
        assign(self._greedy_B, own.greedy)
        return own

    @property
    def scheme(self) -> Scheme:
        """The scheme that was asked for; `top` where no row draws."""
        return _TOP if self._distributions.params.all_greedy else self._usual

    @property
    def _place(self) -> int:
        """Which of the trees the next round has."""
        return 0 if self._choice is None else self._choice.place

    @property
    def _spine(self) -> tuple[int, ...]:
        """The next tree's nodes that limited rows have, root first; none where no row is limited."""
        choice = self._choice
        if choice is None or choice.place == choice.steady_place:
            return ()
        mixed = self._limits if choice.rehearsed is not None else choice.steady and choice.mixed
        return choice.spine(choice.place) if mixed else ()

    @property
    def limited(self) -> Mapping[int, Sequence[int]]:
        """Rows that must have the steady tree, in rounds of a larger one."""
        used = [node - 1 for node in self._spine[1:]]
        return {row: used for row, steady in enumerate(self._steady) if steady} if used else {}

    @property
    def levels(self) -> tuple[LevelPlan, ...]:
        """The next round's passes."""
        return self._plans[self._place].levels

    @property
    def kind(self) -> Hashable:
        """The tree, where there are several, and whether some rows are limited."""
        return (self._place, "limited") if self._spine else None if self._choice is None else self._place

    @property
    def num_kinds(self) -> int:
        """One for each tree that rounds of so many rows may have, and one more where some may be limited to the steady one."""
        return 1 if self._choice is None else len(self._kinds(self._choice))

    def _kinds(self, choice: TreeChoice) -> list[tuple[int, bool]]:
        rows = len(self._greedy_B)
        return [*((place, False) for place in choice.kinds(rows)), *((place, True) for place in choice.mixed_kinds(rows))]

    def rehearse(self, number: int | None) -> None:
        """Let all rounds have one tree, the largest first."""
        if self._choice is not None:
            kinds = self._kinds(self._choice)
            self._choice.rehearsed, self._limits = (None, False) if number is None else kinds[min(number, len(kinds) - 1)]

    def share(self, loads: Sequence[int], steady: Sequence[bool | None]) -> None:
        """Keep to one tree for texts that depend on nothing but themselves, and to the largest for a row alone."""
        if self._choice is not None:
            # Whether fewer children than there is room for verify alike is tested of registered schemes.
            known = self._usual.name in SCHEMES and type(self._usual) is SCHEMES.get(self._usual.name)
            self._choice.alone, self._choice.steady = len(loads) == 1, True in steady
            self._choice.mixed = known and False in steady
            wanted = [bool(one) for one in steady]
            if self._steady != wanted:
                self._steady = wanted
                assign(self._limited_B, wanted)
        if self.policy is not None:
            self.policy.share(loads)

    @property
    def resting(self) -> bool:
        """Whether every row rests."""
        return self._resting

    @property
    def num_uniforms(self) -> int:
        """One per candidate."""
        return self._trees[self._place].num_nodes - 1

    @property
    def places(self) -> int:
        """One per node, behind the lead."""
        return self.source.lead + self.num_nodes

    def resize(self, params: RowParams) -> None:
        """Have as many rows as there are parameters."""
        self._greedy_B = self._storage.resized("greedy", self._greedy_B, len(params))
        self._limited_B, self._steady = self._storage.resized("limited", self._limited_B, len(params)), []
        self._distributions.resize(self._draft_params(params))
        if self._choice is not None:
            self._choice.fit(len(params), self.scheme.name)
        if self.policy is not None:
            self.policy.resize(len(params))

    def swap_rows(self, first: int, second: int) -> None:
        """Swap two rows."""
        self._distributions.swap_rows(first, second)
        if self.policy is not None:
            self.policy.swap_rows(first, second)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Take note of the certain texts of new rows, and of all rows' parameters."""
        self._distributions.begin(texts, rows, self._draft_params(params))
        if self._choice is not None:
            self._choice.pause()
        if self.policy is not None:
            self.policy.begin(as_array(torch.tensor([row in rows for row in range(len(params))])))
            # Where all others rest, and new texts begin with a rest, there is no need for a pass of the draft.
            self._resting = self._resting and not self.policy.drafting_B[list(rows)].any() and self.source.can_wait

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain texts."""
        self._distributions.advance(emitted)
        if self._choice is not None:
            limited = self.limited
            accepted = [len(tokens) - 1 for row, tokens in enumerate(emitted) if tokens and row not in limited]
            self._choice.settle(len(emitted), accepted, self.scheme.name)

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass each level through the source and draw the next one."""
        tokens_BN = self.plant(tail_B2[:, 1])
        if self.resting:
            return self._bare(tokens_BN)
        # Where trees change, the source reads along even for one that is its root alone: its memory keeps its form.
        features_BWF = self.source.root(tail_B2) if self.levels or self._choice is not None else None
        if self.policy is not None and self._going_B is not None and not self._going_B.any():
            return self._bare(tokens_BN)
        for level in self.levels:
            if level.first > 0:
                tokens_BW, block = tokens_BN[:, level.first : level.stop], level.block.expand(len(tokens_BN))
                features_BWF = self.source.expand(tokens_BW, level.parents_T, block)
            assert features_BWF is not None
            drawing_BGF = features_BWF[:, level.drawing]
            logits_BGV = self.source.logits(drawing_BGF)
            self.draw(level, logits_BGV, tokens_BN, uniforms_BU)
            if self._stops(drawing_BGF, logits_BGV):
                break
        return self.tree(tokens_BN)

    def made_up(self, dtype: torch.dtype) -> DraftTree | None:
        """Draw from even distributions, where children are drawn."""
        scheme, vocabulary, rows = self.scheme, self._distributions.vocabulary, len(self._greedy_B)
        topology, plan, device = self._trees[-1], self._plans[-1], self.source.device
        columns = self._distributions.num_columns
        distributions = [torch.full((rows, len(level.nodes_GK), columns), 1 / columns, device=device) for level in plan.levels]
        for level, distribution_BGV in zip(plan.levels, distributions, strict=True):
            for group in () if scheme.needs_order_only else level.groups:
                distribution_RV = distribution_BGV[:, group.rows].flatten(0, 1)
                self._draw(distribution_RV, distribution_RV.new_zeros(len(distribution_RV), group.width, dtype=torch.float64))
        tokens_BN = torch.zeros(rows, topology.num_nodes, dtype=torch.long, device=device)
        kept = () if scheme.follows_target else tuple(distributions)
        return DraftTree.from_topology(topology, tokens_BN, kept, plan.distribution_rows_N, vocabulary)

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Node n has place n behind the lead."""
        return path_BD + self.source.lead if self.source.lead else path_BD

    def plant(self, root_B: Tensor) -> Tensor:
        """Return the tokens of a new tree, all but the root still missing; `draw` fills them in."""
        self._level_probs, self._drawn = [], 0
        self._going_B = None if self.decision is None else torch.ones_like(root_B, dtype=torch.bool)
        if self.policy is not None:
            self._going_B = as_tensor(self.policy.drafting_B)
            whole_B = as_array(self._going_B) * 1
            self._plan = RowPlan(1.0 * whole_B, (self.num_nodes - 1) * whole_B, self.depth * whole_B)
        tokens_BN = torch.full((len(root_B), self._trees[self._place].num_nodes), NO_TOKEN, device=root_B.device)
        tokens_BN[:, 0] = root_B
        return tokens_BN

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> None:
        """Draw the children of one level's nodes into `tokens_BN`."""
        distributions, scheme = self._distributions, self.scheme
        self._drawn += 1
        if self._going_B is None and distributions.keeps_order and takes_largest(scheme, logits_BGV, level.widest):
            plant_largest(logits_BGV, level.nodes_GK, tokens_BN, distributions.vocabulary, self._vocab_size)
            return self._limit(level, None, tokens_BN, uniforms_BU)
        # At temperature 0 the distribution is one token; the children are the next ones in order as well.
        weigh = distributions.ranking if scheme.needs_order_only else distributions.probs
        paths_GP = level.paths_GP if distributions.params.needs_history else level.paths_GP[:, :0]
        probs_BGV = weigh(logits_BGV, tokens_BN[:, paths_GP])
        if scheme.needs_order_only:
            # Fewer children are the first of more: one look serves all nodes of the level.
            children_RK = self._draw(probs_BGV.flatten(0, 1), uniforms_BU.new_empty(probs_BGV.shape[:2].numel(), level.widest))
            self._plant(tokens_BN, level, children_RK)
        else:
            for group in level.groups:
                distribution_RV = probs_BGV[:, group.rows].flatten(0, 1)
                uniforms_RK = uniforms_BU[:, group.uniforms].reshape(len(distribution_RV), group.width)
                self._plant(tokens_BN, group, self._draw(distribution_RV, uniforms_RK))
        if not scheme.follows_target:
            self._level_probs.append(probs_BGV)
        self._limit(level, None if scheme.needs_order_only else probs_BGV, tokens_BN, uniforms_BU)

    def _limit(self, level: LevelPlan, probs_BGV: Tensor | None, tokens_BN: Tensor, uniforms_BU: Tensor) -> None:
        """Leave limited rows one child of one node, as the steady tree has: drawn anew, unless it is the likeliest anyway."""
        if not (spine := self._spine):
            return
        limited_B1, first = self._limited_B[:, None], None
        if self._drawn < len(spine):
            child = spine[self._drawn]
            first = tokens_BN[:, child : child + 1].clone()
            if probs_BGV is not None:
                first = self._distributions.tokens(self._draw(probs_BGV[:, 0], uniforms_BU[:, child - 1 : child]))
        nodes = level.children
        tokens_BN[:, nodes] = tokens_BN[:, nodes].masked_fill(limited_B1, NO_TOKEN)
        if first is not None:
            tokens_BN[:, child : child + 1] = torch.where(limited_B1, first, tokens_BN[:, child : child + 1])

    def _draw(self, distribution_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        children_RK = self.scheme.draw(distribution_RV, uniforms_RK)
        if not self._distributions.params.mixed:
            return children_RK
        greedy_R1 = self._greedy_B.repeat_interleave(len(distribution_RV) // len(self._greedy_B))[:, None]
        return torch.where(greedy_R1, _TOP.draw(distribution_RV, uniforms_RK), children_RK)

    def _plant(self, tokens_BN: Tensor, plan: GroupPlan | LevelPlan, columns_RK: Tensor) -> None:
        """Put drawn columns of the draft's distributions into their nodes, as tokens."""
        columns_BX = columns_RK.view(len(tokens_BN), -1)
        if self._going_B is None and kernels_run(tokens_BN):
            return plant_columns(columns_BX, plan.nodes_GK, tokens_BN, self._distributions.vocabulary)
        children_BX = self._distributions.tokens(columns_BX[:, plan.picks])
        if self._going_B is not None:
            children_BX = torch.where(self._going_B[:, None], children_BX, NO_TOKEN)
        tokens_BN[:, plan.children] = children_BX

    def _stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Let the decision model look at the nodes that drew last; say whether all rows stop there.

        It sees distributions and tokens down to this level only, so that whatever is drawn below follows the distribution that
        verification assumes.
        """
        if self.decision is None or self._going_B is None:
            return False
        self._going_B = self._going_B & self.decision.goes_on(features_BGF, logits_BGV)
        return not bool(self._going_B.any())  # the one look between levels; rows that stopped alone draw nothing

    def learn(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Let the policy judge the round, where there is one."""
        if self.policy is not None and self._plan is not None:
            active_B = as_array(keep_B) > 0
            self.policy.learn(self._plan, as_array(verdict.accepted_B), active_B)
            self._resting = not (self.policy.drafting_B & active_B).any() and self.source.can_wait

    def _bare(self, tokens_BN: Tensor) -> DraftTree:
        """Return a tree of the root alone, which verifies as the whole one does."""
        vocabulary, first_1 = self._distributions.vocabulary, torch.zeros_like(tokens_BN[0, :1])
        return self._as_deep(DraftTree.from_topology(Topology(), tokens_BN[:, :1], (), first_1, vocabulary))

    def tree(self, tokens_BN: Tensor) -> DraftTree:
        """Return the grown tree."""
        distributions, depth, vocabulary = tuple(self._level_probs), self._drawn, self._distributions.vocabulary
        topology, distribution_rows_N = self._trees[self._place], self._plans[self._place].distribution_rows_N
        if depth == topology.depth:
            whole = DraftTree.from_topology(topology, tokens_BN, distributions, distribution_rows_N, vocabulary)
            return whole if depth == self.depth else self._as_deep(whole)
        # An early stop is a slice. The tree says to be as deep as ever, so that a round's outcome keeps its form.
        tables, size = self._mask.stopped(depth), len(tokens_BN)
        nodes = len(tables.depths_N)
        return DraftTree(
            tokens_BN[:, :nodes],
            tables.depths_N.expand(size, -1),
            tables.ancestors_NN.expand(size, -1, -1),
            tables.child_table_NK.expand(size, -1, -1),
            self.topology.depth,
            distributions + distributions[-1:] * (self.topology.depth - depth),
            distribution_rows_N[:nodes].expand(size, -1),
            vocabulary,
        )

    def _as_deep(self, tree: DraftTree) -> DraftTree:
        """Let a smaller tree have the outcome of the largest one."""
        distributions, missing = tree.distributions, self.depth - tree.depth
        if distributions:
            distributions += (distributions[-1][:, :1],) * missing
        elif not self.scheme.follows_target:  # of a root alone: no child was drawn, so any distribution will do
            columns = self._distributions.num_columns
            distribution_111 = torch.full((1, 1, 1), 1 / columns, device=self.source.device)
            distributions = (distribution_111.expand(len(tree.tokens_BN), 1, columns),) * missing
        return replace(tree, depth=self.depth, distributions=distributions, reach=tree.depth)
