"""Whether a draft has the target's tokens, under the same numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polydraft.errors import UsageError
from polydraft.models.given import check_draft
from polydraft.models.spelling import spelled

if TYPE_CHECKING:
    from polydraft.models.loading import Loaded

LEAST_SHARE = 0.05
"""Of the target's tokens, how many a draft must share: with fewer it proposes hardly anything but single characters."""
_MOST_OTHERS = 64
"""Tokens of a tokenizer for each one that the other may lack, where numbers are the same."""


def check_same_tokens(target: "Loaded", draft: "Loaded") -> None:
    """Refuse a draft whose token ids mean other texts than the target's, as far as the target's tokenizer is known."""
    if target.tokenizer is None:
        return check_draft(draft.model, target.model)
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise UsageError(
            f"draft {draft.model.name!r} and target {target.model.name!r} have different vocabularies ({len(theirs)} and "
            f"{len(ours)} tokens, {differing} of the target's differ); use a draft with the target's tokenizer"
        )


def have_same_numbers(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Return whether what both vocabularies have has the same numbers, and that is nearly all that they have.

    The draft then speaks of the target's numbers. Those that mean something else to it are never right, and nothing more.
    """
    both = ours.keys() & theirs.keys()
    others = max(len(ours), len(theirs)) - len(both)
    return others <= len(ours) // _MOST_OTHERS and all(ours[token] == theirs[token] for token in both)


def check_vocabularies(ours: Mapping[str, int], theirs: Mapping[str, int], target: str, draft: str) -> None:
    """Refuse a draft that cannot share enough tokens, by its vocabulary alone; an empty one is not known."""
    vocabularies = [{spelled(token, "\u0120" in own and "\u2581" not in own) for token in own} for own in (ours, theirs)]
    if theirs:
        check_share(len(vocabularies[0] & vocabularies[1]), len(ours), target, draft)


def check_share(shared: int, size: int, target: str, draft: str) -> None:
    """Refuse a draft that shares so many of the target's tokens."""
    if shared < LEAST_SHARE * size:
        raise UsageError(
            f"draft {draft!r} and target {target!r} have different vocabularies and share {shared} of the target's {size} "
            f"tokens; use a draft that shares at least {LEAST_SHARE:.0%}"
        )
