"""What tuning can be told, described and checked once. Nothing here imports torch before something is checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from polydraft.errors import UsageError
from polydraft.options import CpuOptions, PairOptions, PlaceOptions


@dataclass(frozen=True, kw_only=True)
class TuneOptions(PairOptions, PlaceOptions, CpuOptions):
    """Options."""

    source: str = "builtin"
    """builtin, a file, or hf:NAME[:SPLIT]."""
    limit: int = 8
    """Use this many prompts, spread over the categories."""
    raw: bool = False
    """Use prompts as they are, without the chat template."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures to tune for."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Batch sizes (texts at a time) to tune for."""
    max_new_tokens: int = 64
    """Generate at most this many tokens per text."""
    check: int = 3
    """Run this many of the best choices and pick the fastest; 0 trusts the prediction."""
    check_batch: int | None = None
    """Batch size of these runs  [default: the smallest of --batches]."""
    seed: int = 0
    """The same seed gives the same texts."""
    predict: str | None = None
    """Predict for another GPU: h100, h100x8 (8 that share every layer), or GB/s:TERAFLOPS."""
    size: str | None = None
    """With --predict: treat the target as a Llama of this size (1b, 7b, 13b, 70b) with a one-layer head."""

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("max_new_tokens", 8), ("check", 0), ("check_batch", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {value} is out of range; allowed: whole numbers from {least}")
        if not self.batches or not all(1 <= batch <= 1024 for batch in self.batches):
            raise UsageError(f"--batches {_listed(self.batches)} is out of range; allowed: whole numbers from 1 to 1024")
        if not self.temperatures or not all(0 <= one < 100 for one in self.temperatures):
            raise UsageError(f"--temperature {_listed(self.temperatures)} is out of range; allowed: from 0, such as 0,1")
        from polydraft.tune.hardware import parse_gpu, size_named

        if self.predict is not None:
            parse_gpu(self.predict)
        elif self.size is not None:
            raise UsageError(f"--size {self.size} works only with --predict; add --predict GPU, or leave it out")
        if self.size is not None:
            size_named(self.size, 1)

    @property
    def checked_batch(self) -> int:
        """Batch size that choices are run at."""
        return min(self.batches) if self.check_batch is None else self.check_batch


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{one:g}" for one in values) or "(nothing)"
