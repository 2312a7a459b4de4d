"""What a training run is asked for."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polydraft.errors import UsageError

LOSSES = ("kl", "tv", "kl+tv")


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    """Sizes of a small language model."""

    layers: int = 3
    width: int = 256

    def check(self) -> None:
        """Refuse sizes that make no model."""
        _positive("--layers", self.layers)
        if self.width < 32 or self.width % 32:
            raise UsageError(f"--width {self.width} is out of range; allowed: multiples of 32, from 32")


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """Sizes of a feature head and how it is trained."""

    mlp_size: int = 0
    """Width of its MLP; 0 for the target's own."""
    taps: tuple[int, ...] | None = None
    """Layers of the target that it reads besides the last; None for a quarter, a half and three quarters of the way."""
    rollouts: int = 4
    """Depths it is trained at: all but the first on its own outputs."""

    def check(self) -> None:
        """Refuse sizes that make no head."""
        _positive("--rollouts", self.rollouts)
        if self.mlp_size < 0:
            raise UsageError(f"--mlp {self.mlp_size} is out of range; allowed: 0 (the target's) or more")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Data, schedule and form of a draft."""

    size: DraftSize | HeadSize
    target: str
    vocabulary: int = 0
    """Draft only the most frequent tokens; 0 for all."""
    prompts: str | None = None
    """File of prompts that the target answers; None to let it make up its own."""
    prompt_limit: int | None = None
    texts: tuple[str, ...] = ()
    """Files of plain text to train on instead."""
    tokens: int = 2_000_000
    length: int = 384
    steps: int = 2_000
    batch_size: int = 32
    learning_rate: float = 1e-3
    loss: str = "kl"
    seed: int = 0
    save_every: int = 200
    evaluate_every: int = 100
    sampling_rows: int = 256
    """Texts that the target samples side by side."""

    def check(self) -> None:
        """Refuse what cannot be trained."""
        self.size.check()
        for name in ("tokens", "steps", "batch_size", "save_every", "evaluate_every", "sampling_rows"):
            _positive("--" + name.replace("_", "-"), getattr(self, name))
        if self.length < 16:
            raise UsageError(f"--length {self.length} is out of range; allowed: 16 or more")
        if not self.learning_rate > 0:
            raise UsageError(f"--learning-rate {self.learning_rate} is out of range; allowed: above 0")
        if self.loss not in LOSSES:
            raise UsageError(f"unknown loss {self.loss!r}; allowed: {', '.join(LOSSES)}")
        if self.vocabulary < 0:
            raise UsageError(f"--vocabulary {self.vocabulary} is out of range; allowed: 0 (all tokens) or more")
        if self.prompts and self.texts:
            raise UsageError("--prompts and --text do not go together; choose one")
        for name in (*self.texts, *([self.prompts] if self.prompts else [])):
            if name != "builtin" and not Path(name).is_file():
                raise UsageError(f"cannot read {name!r}: there is no such file")

    @property
    def kind(self) -> str:
        """``"draft"`` or ``"head"``."""
        return "draft" if isinstance(self.size, DraftSize) else "head"

    def as_dict(self) -> dict[str, Any]:
        """Return what must stay the same when a run is resumed, for the training folder and the card."""
        return {"kind": self.kind, **asdict(self)}


def _positive(option: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{option} {value} is out of range; allowed: whole numbers from 1")
