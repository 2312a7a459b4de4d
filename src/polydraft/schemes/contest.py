"""One node's race: its children in their cells, the plan of the race, and certain children who take over from winners.

Some children may be certain (the draft's top tokens T, see `hybrid`): they do not race. The race is then planned for the
target's mass outside T, and a winner i hands over to t ∈ T, in proportion to p_t, so often that t is selected with chance
p_t: r'_i = r_i − (r_i − p_i)₊ P(T) / Σ(r − p)₊, taken where there was more than p anyway. Without certain children r' = r.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes.arithmetic import ratio
from polydraft.schemes.arrays import (
    Array,
    add_to,
    as_tensor,
    at_most,
    library,
    no_less,
    no_more,
    put,
    quietly,
    quotient,
    ranks,
    small,
    sums_by,
    take,
)
from polydraft.schemes.cells import bucketed_cells, ranked_cells
from polydraft.schemes.plan import Plan, make_plan, places, winning_chances

CertainChildren = Callable[[Array, Array, Array, Array], Array]
"""`(child_RK, draft_RK, total_R1, count_R1) -> certain_R1`: how many of the first children are not drawn, from the children,
their draft weights, the draft's total and the number of children."""


@dataclass(frozen=True, eq=False)
class Contest:
    """The race of each row's children."""

    plan: Plan
    token_RK: Array
    """The children; where one is missing, the first again."""
    cell_RK: Array
    """Their cells."""
    racing_RK: Array
    """Children that race: there, and not certain."""
    law_RV: Tensor
    """r': law of the selected child over drawing and race; a zero row where there are no children."""
    certain_RK: Array | None = None
    """Target law p_t of the certain children, 0 at the others; None where no row has any."""
    keep_RK: Array | None = None
    """Chance r'/r that a winner does not hand over."""

    @classmethod
    @quietly
    def of(
        cls,
        target_probs_RV: Tensor,
        draft_probs_RV: Tensor,
        children_RK: Tensor,
        certain: CertainChildren | None = None,
        buckets: int | None = None,
    ) -> "Contest":
        """Plan the race.

        Parameters
        ----------
        target_probs_RV, draft_probs_RV : Tensor
            Weights in any scale.
        certain : function, optional
            Tells how many of the first children are certain; the others are independent draws from the rest of the draft law.
        buckets : int, optional
            How many cells; without it the vocabulary is sorted.
        """
        child_RK = small(children_RK)
        where, width = library(child_RK).where, child_RK.shape[1]
        exists_RK = child_RK != NO_TOKEN
        token_RK = no_less(where(exists_RK, child_RK, child_RK[:, :1]), 0)
        target_RV, draft_RV = small(target_probs_RV.double()), small(draft_probs_RV.double())
        racing_RK, apart_RK, scale_R1 = exists_RK, None, None
        if certain is not None:
            total_R1 = draft_RV.sum(-1, keepdims=True)
            draft_RK = take(draft_RV, token_RK)
            apart_RK = ranks(width, exists_RK) < certain(child_RK, draft_RK, total_R1, exists_RK.sum(-1, keepdims=True))
            racing_RK = exists_RK & ~apart_RK
            rest_R1 = total_R1 - (draft_RK * apart_RK).sum(-1, keepdims=True)
            scale_R1 = quotient(total_R1, rest_R1)
        if buckets is None:
            cell_RV, cells = ranked_cells(target_probs_RV, draft_probs_RV)
        else:
            cell_RV, cells = bucketed_cells(target_probs_RV, draft_probs_RV, scale_R1, buckets)
        cell_RK = take(cell_RV, token_RK)
        if apart_RK is not None:
            # Certain ones go into cell 0, whose mass is forgotten. A missing child repeats the first, so does as that does.
            cell_RK = cell_RK * (racing_RK | ~apart_RK[:, :1])
            put(cell_RV, token_RK, cell_RK)
        target_RC, weight_RC = sums_by(cell_RV, target_RV, cells), sums_by(cell_RV, draft_RV, cells)
        target_mass_R1 = target_RC.sum(-1, keepdims=True)
        if apart_RK is not None:
            target_RC[:, 0] = 0.0
            weight_RC[:, 0] = 0.0
        target_RC = quotient(target_RC, target_mass_R1)
        # Not by `rest_R1`, a difference, of which something may be left where nothing is.
        draft_RC = quotient(weight_RC, weight_RC.sum(-1, keepdims=True))
        plan = make_plan(target_RC, draft_RC, racing_RK.sum(-1, keepdims=True))
        left_RC, certain_RK, keep_RK = plan.selected_RC, None, None
        if apart_RK is not None:
            certain_RK = quotient(take(target_RV, token_RK), target_mass_R1) * apart_RK
            left_RC = _handed_over(plan.selected_RC, target_RC, certain_RK.sum(-1, keepdims=True))
            keep_RK = quotient(take(left_RC, cell_RK), take(plan.selected_RC, cell_RK))
        law_RV = take(quotient(left_RC, weight_RC), cell_RV)
        law_RV *= draft_RV
        if certain_RK is not None:
            add_to(law_RV, token_RK, certain_RK)
        return cls(plan, token_RK, cell_RK, racing_RK, as_tensor(law_RV), certain_RK, keep_RK)

    @quietly
    def select(self, uniforms_RU: Tensor) -> Tensor:
        """Run the race and return one child of each row, by one number and two more a child."""
        where, width = library(self.token_RK).where, self.token_RK.shape[1]
        number_RU = small(uniforms_RU.double())
        # Pairs side by side: which numbers are a child's must not depend on how many columns the batch has.
        partner_RK, place_RK = number_RU[:, 1 : 1 + 2 * width : 2], number_RU[:, 2 : 2 + 2 * width : 2]
        place_RK = where(self.racing_RK, places(self.plan, self.cell_RK, partner_RK, place_RK), -1.0)
        index_R1 = place_RK.argmax(-1, keepdims=True)
        if self.certain_RK is not None:
            keep_R1, number_R1 = take(self.keep_RK, index_R1), number_RU[:, :1]
            # A number above `keep` is uniform there, so it also tells who takes over.
            running_RK = self.certain_RK.cumsum(-1)
            mark_R1 = quotient(number_R1 - keep_R1, 1 - keep_R1) * running_RK[:, -1:]
            heir_R1 = at_most(running_RK, mark_R1)
            # Rounding may put a mark at the very end; the winner then keeps its place, with a chance of 1e-16.
            index_R1 = where((number_R1 < keep_R1) | (heir_R1 == width), index_R1, no_more(heir_R1, width - 1))
        token_R1 = where(self.racing_RK.any(-1, keepdims=True), take(self.token_RK, index_R1), NO_TOKEN)
        return as_tensor(token_R1)[:, 0]

    def chances(self) -> Tensor:
        """Return each child's chance to be selected, given all children; exact and slow, for tests."""
        win_RK = winning_chances(self.plan, as_tensor(self.cell_RK), as_tensor(self.racing_RK))
        if self.certain_RK is None:
            return win_RK
        certain_RK = as_tensor(self.certain_RK)
        kept_RK = win_RK * as_tensor(self.keep_RK)
        handed_R1 = (win_RK - kept_RK).sum(-1, keepdim=True)
        return kept_RK + handed_R1 * ratio(certain_RK, certain_RK.sum(-1, keepdim=True))


def _handed_over(selected_RC: Array, target_RC: Array, certain_R1: Array) -> Array:
    """Return r', what winners keep when a mass of `certain_R1` goes from where r exceeds p to certain children."""
    beyond_RC = no_less(selected_RC - target_RC, 0)
    return selected_RC - beyond_RC * no_more(quotient(certain_R1, beyond_RC.sum(-1, keepdims=True)), 1)
