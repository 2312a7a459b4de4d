"""What is taken for a prompt: text, or token ids; and for several of them."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from polydraft.errors import UsageError, shown

ALLOWED = "text, token ids, or a list of either"
_BYTES = (bytes, bytearray, memoryview)


def rows_of(prompts: Any) -> tuple[list[Any], bool]:
    """Return prompts as a list, and whether they were a single one.

    Parameters
    ----------
    prompts : str, token ids, or several of either
        Token ids are whole numbers in a sequence, an array or a tensor; arrays and tensors of two axes hold several prompts.
    """
    if isinstance(prompts, str):
        return [prompts], True
    found = _listed(prompts)
    if not found:
        raise UsageError("no prompt given; pass at least one")
    # What is neither text nor a sequence is taken for a token, so that a wrong one is named.
    several = isinstance(found[0], str | Sequence) or getattr(found[0], "ndim", 0) > 0
    return (found, False) if several else ([found], True)


def token_ids(prompt: Any) -> list[int]:
    """Return the token ids that a prompt consists of, refusing everything else: nothing is rounded or decoded."""
    found: list[Any] = [one.item() if getattr(one, "ndim", None) == 0 else one for one in _listed(prompt)]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"a prompt holds {shown(token)}, which is no token id; allowed: whole numbers, or text")
    return [int(token) for token in found]


def _listed(values: Any) -> list[Any]:
    """Return a sequence, an array or a tensor as a list."""
    if isinstance(values, _BYTES):
        raise UsageError(f"prompt {shown(values)} of type {type(values).__name__}; decode it first: allowed are {ALLOWED}")
    if getattr(values, "ndim", 0) > 0 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"prompt {shown(values)} of type {type(values).__name__}; allowed: {ALLOWED}")
    return list(values)
