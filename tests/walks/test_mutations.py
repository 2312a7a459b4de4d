"""The tests bite: every wrong rule of a walk is caught by enumeration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes import RejectionWithoutReplacement, RejectionWithReplacement, Scheme, Selection
from polydraft.schemes.arithmetic import normalised, ratio
from polydraft.walks import BlockWalk, TraversalWalk, Walk, block, traversal

from .cases import TREES, batch_of
from .doubles import HighestPicked
from .enumeration import TOLERANCE, enumerate_walk

SPARSE = "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"


def worst_error(walk: Walk, scheme: Scheme) -> float:
    """Enumerate as the real tests do; not a number counts as the largest error."""
    errors = []
    for tree in ("2x2", SPARSE):
        try:
            outcomes = enumerate_walk(walk, scheme, batch_of(tree, TREES[tree]))
        except AssertionError:  # the parts of the verdict do not fit together
            return torch.inf
        errors += [(outcomes.totals() - 1).abs().max().item(), outcomes.text_error()]
    return max(errors)


# Below: wrong parts of the block walk.


def _ratio(picked: Selection, target_BV: Tensor) -> Tensor:
    token_B1 = picked.token_R[:, None].clamp(min=0)
    return ratio(target_BV.gather(1, token_B1), picked.law_RV.gather(1, token_B1))


def smallest_not_taken(share_B1: Tensor, target_probs_BV: Tensor, picked: Selection) -> Tensor:
    return _ratio(picked, share_B1 * target_probs_BV)


def weight_not_carried_on(share_B1: Tensor, target_probs_BV: Tensor, picked: Selection) -> Tensor:
    return _ratio(picked, normalised(target_probs_BV)).clamp(max=1.0)


def everything_believed(share_B1: Tensor, target_probs_BV: Tensor, picked: Selection) -> Tensor:
    return torch.ones_like(share_B1)


def excess_of_the_whole_target(share_B1: Tensor, target_probs_BV: Tensor, picked_BV: Tensor) -> Tensor:
    return (normalised(target_probs_BV) - picked_BV).clamp(min=0)


def excess_not_taken(share_B1: Tensor, target_probs_BV: Tensor, picked_BV: Tensor) -> Tensor:
    return target_probs_BV * share_B1


def tried_from_the_root(weight_BD: Tensor, mass_BD: Tensor) -> Tensor:
    rest_BD = mass_BD + (1 - weight_BD)
    chance_BD = torch.where(rest_BD == 0, 0.0, mass_BD / rest_BD)
    passed_BD = (1 - chance_BD).cumprod(1)
    return chance_BD * torch.nn.functional.pad(passed_BD[:, :-1], (1, 0), value=1.0)


def stopped_by_weight_alone(weight_BD: Tensor, mass_BD: Tensor) -> Tensor:
    passed_BD = (1 - weight_BD).flip(1).cumprod(1).flip(1)
    return weight_BD * torch.nn.functional.pad(passed_BD[:, 1:], (0, 1), value=1.0)


class TestedAgainstDraft(HighestPicked):
    """Picks the highest child and takes it for any child: p/q instead of p/r."""

    def picked_law(self, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        return normalised(draft_probs_RV) * (children_RK != NO_TOKEN).any(-1, keepdim=True)


# Below: wrong parts of the traversal walk.


class DistinctTestedAsIndependent(RejectionWithoutReplacement):
    replacement = True


class IndependentTestedAsDistinct(RejectionWithReplacement):
    replacement = False


def weight_not_updated(scale_B1: Tensor, weight_B1: Tensor, left_B1: Tensor) -> tuple[Tensor, Tensor]:
    return ratio(scale_B1, 1 - weight_B1 + left_B1), weight_B1


def rest_not_scaled(scale_B1: Tensor, weight_B1: Tensor, left_B1: Tensor) -> tuple[Tensor, Tensor]:
    return scale_B1, left_B1


def rest_made_whole(scale_B1: Tensor, weight_B1: Tensor, left_B1: Tensor) -> tuple[Tensor, Tensor]:
    return ratio(scale_B1, left_B1), torch.ones_like(weight_B1)


def parent_believed_whole(original: Callable, descent: Any, token_B1: Tensor) -> Tensor:
    level_B1 = descent.level_B1
    weight_B1, scale_BD = descent.weight_BD.gather(1, level_B1), descent.scale_BD
    descent.scale_BD = scale_BD.scatter(1, level_B1, ratio(scale_BD.gather(1, level_B1), weight_B1))
    child_weight_B1 = original(descent, token_B1)
    descent.scale_BD = scale_BD
    return child_weight_B1


def share_not_taken(original: Callable, descent: Any, mask_B1: Tensor, level_B1: Tensor, child_B1: Tensor) -> None:
    kept = [table.clone() for table in (descent.rest_BDV, descent.scale_BD, descent.weight_BD)]
    original(descent, mask_B1, level_B1, child_B1)
    descent.rest_BDV, descent.scale_BD, descent.weight_BD = kept


WITHOUT, WITH = RejectionWithoutReplacement, RejectionWithReplacement

MUTANTS: list[tuple[type[Walk], type[Scheme], Any, str, Callable | None]] = [
    (BlockWalk, HighestPicked, block, "_next_weight", smallest_not_taken),
    (BlockWalk, HighestPicked, block, "_next_weight", weight_not_carried_on),
    (BlockWalk, HighestPicked, block, "_next_weight", everything_believed),
    (BlockWalk, HighestPicked, block, "_excess", excess_of_the_whole_target),
    (BlockWalk, HighestPicked, block, "_excess", excess_not_taken),
    (BlockWalk, HighestPicked, block, "_stop_law", tried_from_the_root),
    (BlockWalk, HighestPicked, block, "_stop_law", stopped_by_weight_alone),
    (BlockWalk, TestedAgainstDraft, block, "", None),
    (TraversalWalk, DistinctTestedAsIndependent, traversal, "", None),
    (TraversalWalk, IndependentTestedAsDistinct, traversal, "", None),
    (TraversalWalk, WITHOUT, traversal, "_after_failure", weight_not_updated),
    (TraversalWalk, WITH, traversal, "_after_failure", weight_not_updated),
    (TraversalWalk, WITH, traversal, "_after_failure", rest_not_scaled),
    (TraversalWalk, WITH, traversal, "_after_failure", rest_made_whole),
    (TraversalWalk, WITH, traversal._Descent, "_child_weight", parent_believed_whole),
    (TraversalWalk, WITH, traversal._Descent, "_reject", share_not_taken),
]


@pytest.mark.parametrize(("walk", "scheme"), [(BlockWalk, HighestPicked), (TraversalWalk, WITHOUT), (TraversalWalk, WITH)])
def test_the_rules_behind_the_mutants_are_correct(walk: type[Walk], scheme: type[Scheme]) -> None:
    assert worst_error(walk(), scheme()) < TOLERANCE


@pytest.mark.parametrize(
    ("walk", "scheme", "owner", "part", "wrong"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_enumeration_catches_every_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, walk: type[Walk], scheme: type[Scheme], owner: Any, part: str, wrong: Callable | None
) -> None:
    if wrong is not None:
        original = getattr(owner, part)
        # Wrong methods bend the right one, wrong functions are whole.
        replaced = (lambda *arguments: wrong(original, *arguments)) if isinstance(owner, type) else wrong
        monkeypatch.setattr(owner, part, replaced)
    # Far above the tolerance: no rule escapes by a change of the cases.
    assert worst_error(walk(), scheme()) > 1e5 * TOLERANCE
