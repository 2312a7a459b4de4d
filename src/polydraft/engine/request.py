"""What one call asks for: prompts in all their forms, and options."""

import dataclasses
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from polydraft.errors import UsageError, shown, unknown_name
from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.categorical import row_seed

ALLOWED = "text, token ids, or a list of either"
_MOST_TOKENS = 10**9
_BYTES = (bytes, bytearray, memoryview)


def rows_of(prompts: Any) -> tuple[list[Any], bool]:
    """Return prompts as a list, and whether there was just one.

    Parameters
    ----------
    prompts : str, token ids, or several of either
        Token ids are whole numbers in a sequence, an array or a tensor; arrays and tensors with two axes hold several prompts.
    """
    if isinstance(prompts, str):
        return [prompts], True
    found = _listed(prompts)
    if not found:
        raise UsageError("no prompt given; pass at least one")
    # Anything that is neither text nor a sequence counts as a token, so that the error names a wrong one.
    several = isinstance(found[0], str | Sequence) or getattr(found[0], "ndim", 0) > 0
    return (found, False) if several else ([found], True)


def token_ids(prompt: Any) -> list[int]:
    """Return a prompt's token ids; anything but whole numbers is refused, not rounded or decoded."""
    found: list[Any] = [one.item() if getattr(one, "ndim", None) == 0 else one for one in _listed(prompt)]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise UsageError(f"a prompt holds {shown(token)}, which is not a token id; allowed: whole numbers, or text")
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


class Options(TypedDict, total=False):
    """Keyword arguments of `Decoder.generate` and `Decoder.stream`, documented there."""

    sampling: SamplingParams | Sequence[SamplingParams] | None
    max_new_tokens: int | Sequence[int]
    seed: int | Sequence[int] | None
    stop: str | Sequence[str] | Sequence[Sequence[str]]
    chat: bool
    cancel: threading.Event | None
    keep: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a call, checked, with defaults filled in."""

    sampling: SamplingParams | Sequence[SamplingParams] | None = None
    max_new_tokens: int | Sequence[int] = 128
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | Sequence[Sequence[str]] = ()
    chat: bool = False
    cancel: threading.Event | None = None
    keep: bool = False

    @classmethod
    def from_options(cls, options: Options) -> "Request":
        """Check the names as well: most wrong ones are sampling parameters, which belong in `SamplingParams`."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in SamplingParams.__dataclass_fields__:
                raise UsageError(f"{name} is a sampling parameter; pass sampling=SamplingParams({name}=...)")
            if name not in known:
                raise unknown_name("option", name, known)
        return cls(**options)

    def __post_init__(self) -> None:
        if self.seed is None:  # drawn once, so that it can be reported
            object.__setattr__(self, "seed", secrets.randbits(31))
        limits = _given(self.max_new_tokens)
        if not all(_is_whole(limit) and 1 <= int(limit) <= _MOST_TOKENS for limit in limits):
            allowed = f"whole numbers from 1 to {_MOST_TOKENS}"
            raise UsageError(f"max_new_tokens={shown(self.max_new_tokens)} is out of range; allowed: {allowed}")
        whole = _is_whole(self.max_new_tokens)
        object.__setattr__(self, "max_new_tokens", int(limits[0]) if whole else [int(limit) for limit in limits])
        seeds = _given(self.seed)
        if not all(_is_whole(seed) or isinstance(seed, bool) for seed in seeds):
            raise UsageError(f"seed={shown(self.seed)} is not a whole number; allowed: one, or one for each prompt")
        object.__setattr__(self, "seed", int(seeds[0]) if isinstance(self.seed, Integral) else [int(seed) for seed in seeds])
        for sampling in () if self.sampling is None else _given(self.sampling):
            if not isinstance(sampling, SamplingParams):
                allowed = "SamplingParams(...), such as SamplingParams(temperature=0.7), or one for each prompt"
                raise UsageError(f"sampling={shown(self.sampling)} of type {type(sampling).__name__}; allowed: {allowed}")
        if self.cancel is not None and not callable(getattr(self.cancel, "is_set", None)):
            raise UsageError(f"cancel={shown(self.cancel)}; allowed: a threading.Event, which you set to stop")
        for name in ("chat", "keep"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={shown(getattr(self, name))}; allowed: True, False")
        if not all(_is_text(stop) for stop in _given(self.stop)):
            raise UsageError(
                f"stop={shown(self.stop)} is not text; allowed: a string, a list of strings, or such a list for each prompt"
            )

    def row_params(self, rows: int) -> RowParams:
        """Return each row's sampling parameters; the defaults if none were given."""
        return RowParams(tuple(_spread("sampling", SamplingParams() if self.sampling is None else self.sampling, rows)))

    def row_limits(self, rows: int) -> list[int]:
        """Return each row's limit of new tokens."""
        return _spread("max_new_tokens", self.max_new_tokens, rows)

    def row_stops(self, rows: int) -> list[list[str]]:
        """Return each row's stop strings, without empty ones."""
        stop: Any = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if any(not isinstance(strings, str) for strings in stop):
            stop = [[strings] if isinstance(strings, str) else strings for strings in _spread("stop", stop, rows)]
        else:
            stop = [stop] * rows
        return [[string for string in strings if string] for strings in stop]

    def seeds(self, rows: int) -> list[int]:
        """Return each row's seed; rows that share one get different seeds made from it."""
        assert self.seed is not None
        if isinstance(self.seed, int):
            return [row_seed(self.seed, row) for row in range(rows)]
        return _spread("seed", self.seed, rows)


def _given(value: Any) -> list[Any]:
    """Return one value for all prompts, or one for each, as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]


def _spread(name: str, value: Any, rows: int) -> list[Any]:
    """Return a value for each row: its own, or the one for all."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * rows
    if len(value) != rows:
        what = {"seed": "seeds", "sampling": "sampling parameters", "stop": "lists of stop strings"}.get(
            name, f"values of {name}"
        )
        raise UsageError(f"{len(value)} {what} for {rows} prompts; give one for all, or one for each prompt")
    return list(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """Whether this is a stop string, or a list of them."""
    return isinstance(value, str) or (isinstance(value, Sequence) and all(isinstance(string, str) for string in value))
