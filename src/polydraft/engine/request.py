"""What one call asks for, besides its prompts."""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from polydraft.errors import UsageError
from polydraft.sampling import SamplingParams
from polydraft.sampling.noise import row_generator, row_seed


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

    def __post_init__(self) -> None:
        if self.seed is None:  # drawn once, so that it can be reported
            object.__setattr__(self, "seed", secrets.randbits(31))
        count = self.max_new_tokens
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"max_new_tokens={count!r} is out of range; allowed: whole numbers from 1")

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
        return list(self.seed)

    def generators(self, rows: int) -> list[torch.Generator]:
        """Return one generator a row."""
        return [row_generator(seed) for seed in self.seeds(rows)]
