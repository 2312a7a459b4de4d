"""What one call asks for, besides its prompts."""

import dataclasses
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

import torch

from polydraft.errors import UsageError, shown, unknown_name
from polydraft.sampling import SamplingParams
from polydraft.sampling.noise import row_generator, row_seed

_MOST_TOKENS = 10**9


class Options(TypedDict, total=False):
    """Keyword arguments of `Decoder.generate` and `Decoder.stream`, which describe them."""

    sampling: SamplingParams | None
    max_new_tokens: int
    seed: int | Sequence[int] | None
    stop: str | Sequence[str]
    chat: bool
    cancel: threading.Event | None
    keep: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """The same, checked and with defaults."""

    sampling: SamplingParams | None = None
    max_new_tokens: int = 128
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    chat: bool = False
    cancel: threading.Event | None = None
    keep: bool = False

    @classmethod
    def from_options(cls, options: Options) -> "Request":
        """Check the names too: most wrong ones are sampling parameters, which have a place of their own."""
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
        count: Any = self.max_new_tokens
        if isinstance(count, bool) or not isinstance(count, Integral) or not 1 <= int(count) <= _MOST_TOKENS:
            allowed = f"whole numbers from 1 to {_MOST_TOKENS}"
            raise UsageError(f"max_new_tokens={shown(count)} is out of range; allowed: {allowed}")
        object.__setattr__(self, "max_new_tokens", int(count))
        seeds: Any = self.seed
        seeds = seeds.tolist() if hasattr(seeds, "tolist") else seeds  # of numpy and torch
        whole = isinstance(seeds, Integral)
        if not whole and not (
            isinstance(seeds, Sequence) and not isinstance(seeds, bytes) and all(isinstance(seed, Integral) for seed in seeds)
        ):
            raise UsageError(f"seed={shown(self.seed)} is not a whole number; allowed: one, or one for each prompt")
        object.__setattr__(self, "seed", int(seeds) if whole else [int(seed) for seed in seeds])
        sampling: Any = self.sampling
        if sampling is not None and not isinstance(sampling, SamplingParams):
            allowed = "SamplingParams(...), such as SamplingParams(temperature=0.7)"
            raise UsageError(f"sampling={shown(sampling)} of type {type(sampling).__name__}; allowed: {allowed}")
        if self.cancel is not None and not callable(getattr(self.cancel, "is_set", None)):
            raise UsageError(f"cancel={shown(self.cancel)}; allowed: a threading.Event, which you set to stop")
        for name in ("chat", "keep"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={shown(getattr(self, name))}; allowed: True, False")
        stop: Any = self.stop
        if not isinstance(stop, str | Sequence) or not all(isinstance(string, str) for string in stop):
            raise UsageError(f"stop={shown(self.stop)} is not text; allowed: a string, or a list of strings")

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters, the default ones if none were given."""
        return self.sampling or SamplingParams()

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings as a list, empty ones left out."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        return [string for string in strings if string]

    def seeds(self, rows: int) -> list[int]:
        """Return the seed of each row; rows that share a given one get seeds of their own."""
        assert self.seed is not None
        if isinstance(self.seed, int):
            return [row_seed(self.seed, row) for row in range(rows)]
        if len(self.seed) != rows:
            raise UsageError(f"{len(self.seed)} seeds for {rows} prompts; give one seed, or one for each prompt")
        return [int(seed) for seed in self.seed]

    def generators(self, rows: int) -> list[torch.Generator]:
        """Return one generator a row."""
        return [row_generator(seed) for seed in self.seeds(rows)]
