"""The tests bite: every wrong rule of a walk is caught by enumeration."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify import (
    BlockWalk,
    NodeWalk,
    RejectionWithoutReplacement,
    RejectionWithReplacement,
    Scheme,
    Verdict,
    Walk,
    block,
    node,
)
from polydraft.verify.block import Path, PathFinder
from polydraft.verify.weights import normalised

from .cases import TREES, batch_of
from .doubles import AnyPicked, HighestPicked, by_distribution
from .enumeration import TOLERANCE, enumerate_walk

FOLLOWED, FOLLOW_TOKENS, VERIFY_EVERYWHERE = node.followed, node.follow_tokens, node.verify_everywhere
"""As they are before anybody breaks them."""
SPARSE = "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"


def worst_error(walk: Walk, scheme: Scheme, at_once: bool = False) -> float:
    """Enumerate as the real tests do; not a number counts as the largest error."""
    errors = []
    for tree in ("2x2", SPARSE):
        try:
            outcomes = enumerate_walk(walk, scheme, batch_of(tree, TREES[tree]), at_once)
        except AssertionError:  # the parts of the verdict do not fit together
            return torch.inf
        errors += [(outcomes.totals() - 1).abs().max().item(), outcomes.text_error()]
    return max(errors)


# Below: wrong parts of the block walk.


def smallest_not_taken(weight_B: Tensor, ratio_B: Tensor) -> Tensor:
    return weight_B * ratio_B


def weight_not_carried_on(weight_B: Tensor, ratio_B: Tensor) -> Tensor:
    return ratio_B.clamp(max=1.0)


def everything_believed(weight_B: Tensor, ratio_B: Tensor) -> Tensor:
    return 1 + 0 * weight_B


def excess_of_the_whole_target(path: Path, weight_BD: Tensor, going_BL: Tensor) -> Tensor:
    return (normalised(path.target_BLX) - path.distribution_BLX * going_BL[..., None]).clamp(min=0)


def excess_not_taken(path: Path, weight_BD: Tensor, going_BL: Tensor) -> Tensor:
    return normalised(path.target_BLX) * weight_BD[:, :-1, None]


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

    def picked_distribution(self, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        return normalised(draft_probs_RV) * (children_RK != NO_TOKEN).any(-1, keepdim=True)


# Below: wrong ways to ask all nodes at once.


def excess_of_the_root(original: Callable, path: Path, accepted_B1: Tensor, weight_BD: Tensor, excess_BLX: Tensor) -> Tensor:
    return original(path, accepted_B1 * 0, weight_BD, excess_BLX)


def target_instead_of_excess(original: Callable, path: Path, accepted_B1: Tensor, *_: Tensor) -> Tensor:
    return path.target_after(accepted_B1)


def ratio_of_the_root(original: Callable, *arguments: Any) -> Path:
    path = original(*arguments)
    return dataclasses.replace(path, ratio_BL=path.ratio_BL[:, :1].expand_as(path.ratio_BL))


def distribution_of_another_node(original: Callable, draft: DraftTree) -> Tensor:
    return original(draft).roll(1, dims=1)


def children_of_another_node(original: Callable, draft: DraftTree) -> Tensor:
    return original(draft).roll(1, dims=1)


def one_step_too_few(next_BN: Tensor, depth: int) -> Tensor:
    nodes_BD = FOLLOWED(next_BN, depth - 1)
    return torch.cat([nodes_BD, nodes_BD[:, -1:]], dim=1)


def same_numbers_on_all_levels(scheme: Scheme, draft: DraftTree, distributions: Any, uniforms_BU: Tensor) -> Verdict:
    return VERIFY_EVERYWHERE(scheme, draft, distributions, uniforms_BU[:, :1].expand_as(uniforms_BU))


def no_token_of_its_own_at_the_end(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    # As if the bonus were what a node without children emits: a draw at the root's place.
    verdict = FOLLOW_TOKENS(draft, tokens_BN)
    return dataclasses.replace(verdict, path_BD=verdict.path_BD * 0)


def any_child_followed(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    first_BN = draft.all_children()[..., 0]
    return FOLLOW_TOKENS(draft, first_BN.where(first_BN != NO_TOKEN, tokens_BN))


WITHOUT, WITH = RejectionWithoutReplacement, RejectionWithReplacement

MUTANTS: list[tuple[type[Walk], type[Scheme], Any, str, Callable | None]] = [
    (BlockWalk, HighestPicked, block, "_next_weight", smallest_not_taken),
    (BlockWalk, HighestPicked, block, "_next_weight", weight_not_carried_on),
    (BlockWalk, HighestPicked, block, "_next_weight", everything_believed),
    (BlockWalk, HighestPicked, block, "_excess", excess_of_the_whole_target),
    (BlockWalk, HighestPicked, block, "_excess", excess_not_taken),
    (BlockWalk, HighestPicked, block, "_stop_distribution", tried_from_the_root),
    (BlockWalk, HighestPicked, block, "_stop_distribution", stopped_by_weight_alone),
    (BlockWalk, TestedAgainstDraft, block, "", None),
]


AT_ONCE: list[tuple[type[Walk], type[Scheme], Any, str, Callable]] = [
    (BlockWalk, HighestPicked, block, "_next_weight", weight_not_carried_on),
    (BlockWalk, HighestPicked, block, "_excess", excess_not_taken),
    (BlockWalk, HighestPicked, Path, "weights_after", excess_of_the_root),
    (BlockWalk, HighestPicked, Path, "weights_after", target_instead_of_excess),
    (BlockWalk, HighestPicked, PathFinder, "_at_once", ratio_of_the_root),
    (BlockWalk, HighestPicked, DraftTree, "all_distributions", distribution_of_another_node),
    (BlockWalk, HighestPicked, DraftTree, "all_children", children_of_another_node),
    (BlockWalk, HighestPicked, block, "followed", one_step_too_few),
    (NodeWalk, WITH, DraftTree, "all_distributions", distribution_of_another_node),
    (NodeWalk, WITH, DraftTree, "all_children", children_of_another_node),
    (NodeWalk, WITH, node, "verify_everywhere", same_numbers_on_all_levels),
    (NodeWalk, WITH, node, "follow_tokens", no_token_of_its_own_at_the_end),
    (NodeWalk, WITH, node, "follow_tokens", any_child_followed),
    (NodeWalk, WITH, node, "followed", one_step_too_few),
]
"""The same where the host may not look."""


def test_the_rules_behind_the_mutants_are_correct() -> None:
    assert worst_error(BlockWalk(), HighestPicked()) < TOLERANCE


@pytest.mark.parametrize(
    ("walk", "scheme"), [(BlockWalk, HighestPicked), (BlockWalk, AnyPicked), (NodeWalk, WITH), (NodeWalk, WITHOUT)]
)
def test_asking_all_nodes_at_once_is_correct(walk: type[Walk], scheme: type[Scheme]) -> None:
    assert worst_error(walk(), by_distribution(scheme) if walk is NodeWalk else scheme(), at_once=True) < TOLERANCE


@pytest.mark.parametrize(
    ("walk", "scheme", "owner", "part", "wrong"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_enumeration_catches_every_wrong_rule(
    monkeypatch: pytest.MonkeyPatch, walk: type[Walk], scheme: type[Scheme], owner: Any, part: str, wrong: Callable | None
) -> None:
    if wrong is not None:
        break_part(monkeypatch, owner, part, wrong)
    # Far above the tolerance: no rule escapes by a change of the cases.
    assert worst_error(walk(), scheme()) > 1e5 * TOLERANCE


@pytest.mark.parametrize(
    ("walk", "scheme", "owner", "part", "wrong"), AT_ONCE, ids=lambda value: getattr(value, "__name__", "")
)
def test_enumeration_catches_every_wrong_way_to_ask_all_nodes(
    monkeypatch: pytest.MonkeyPatch, walk: type[Walk], scheme: type[Scheme], owner: Any, part: str, wrong: Callable
) -> None:
    instance = by_distribution(scheme) if walk is NodeWalk else scheme()
    break_part(monkeypatch, owner, part, wrong)
    assert worst_error(walk(), instance, at_once=True) > 1e5 * TOLERANCE


def break_part(patch: pytest.MonkeyPatch, owner: Any, part: str, wrong: Callable) -> None:
    """Put a wrong part in place: wrong methods bend the right one, wrong functions are whole."""
    original = getattr(owner, part)
    patch.setattr(owner, part, (lambda *arguments: wrong(original, *arguments)) if isinstance(owner, type) else wrong)
