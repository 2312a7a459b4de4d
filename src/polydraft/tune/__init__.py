"""`polydraft tune`: time several trees on the user's prompts, and keep the fastest.

Only its options are here, so that the command line's help does not wait for torch; `polydraft.tune.tuning` does the work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polydraft.errors import UsageError, check_ranges
from polydraft.options import CpuOptions, PairOptions, PlaceOptions


@dataclass(frozen=True, kw_only=True)
class TuneOptions(PairOptions, PlaceOptions, CpuOptions):
    """Options."""

    source: str = "builtin"
    """Prompts to decode: builtin, a file or a folder of files, or hf:NAME[:SPLIT]. Use prompts like those you will send."""
    raw: bool = False
    """Use prompts as they are, without the chat template."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures to tune for."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Batch sizes (texts at a time) to tune for."""
    max_new_tokens: int = 64
    """Generate at most this many tokens per text."""
    minutes: float = 5.0
    """Time the candidates for at most about this many minutes; preparing them takes some more."""

    def __post_init__(self) -> None:
        PairOptions.__post_init__(self)
        check_ranges(self, [("max_new_tokens", 8, math.inf)])
        if not 0 < self.minutes < 1e5:
            raise UsageError(f"--minutes {self.minutes:g} is out of range; allowed: above 0, such as 5")
        if not self.batch_sizes or not all(1 <= size <= 1024 for size in self.batch_sizes):
            raise UsageError(f"--batch-size {_listed(self.batch_sizes)} is out of range; allowed: whole numbers from 1 to 1024")
        if not self.temperatures or not all(0 <= one < 100 for one in self.temperatures):
            raise UsageError(f"--temperature {_listed(self.temperatures)} is out of range; allowed: from 0, such as 0,1")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{one:g}" for one in values) or "(nothing)"
