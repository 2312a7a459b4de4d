"""Settings of training runs: sizes, texts and schedules. The command line's options are derived from them."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from polydraft.errors import UsageError, check_ranges

LOSSES = ("kl", "tv", "kl+tv", "lk")
LENGTHS = (1, 2)
"""Factors of the texts' length: texts with a long prompt are twice as long."""


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    """Sizes of a draft that is a small language model."""

    layers: int | None = None
    """Number of layers  [default: 3]."""
    width: int | None = None
    """Hidden size, a multiple of 32  [default: 256]."""

    @property
    def given(self) -> list[str]:
        """Flags of the sizes that were given."""
        return [flag for flag, size in (("--layers", self.layers), ("--width", self.width)) if size is not None]

    def __post_init__(self) -> None:
        check_ranges(self, [("layers", 1, math.inf)])
        if self.width is not None and (self.width < 32 or self.width % 32):
            raise UsageError(f"--width {self.width} is out of range; allowed: multiples of 32")


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """Sizes of a feature head, and how it is trained."""

    mlp_size: int = 0
    """Width of the head's MLP; 0 takes the target's."""
    taps: tuple[int, ...] | None = None
    """Layers of the target that it reads besides the last; None for the second, the third from last, and three in between."""
    rollouts: int = 5
    """Number of depths to train; all but the first see the head's own outputs."""
    tree: str = "4x2x2x1x1"
    """Tree (candidates per node at each depth) that the last part of training optimizes for; only with the losses tv and lk."""

    @property
    def given(self) -> list[str]:
        """Flags of the sizes that were given."""
        return [flag for flag, is_given in (("--mlp", self.mlp_size > 0), ("--taps", self.taps is not None)) if is_given]

    def __post_init__(self) -> None:
        check_ranges(self, [("rollouts", 1, math.inf)])
        if not all(part.isdigit() and 1 <= int(part) <= 64 for part in self.tree.split("x")):
            raise UsageError(
                f"--tree {self.tree!r} is not a list of candidates per depth; allowed: numbers from 1 to 64, such as 4x2x2x1x1"
            )
        if self.mlp_size < 0:
            raise UsageError(f"--mlp {self.mlp_size} is out of range; allowed: 0 (the target's) or more")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Data, schedule and form of a draft."""

    size: DraftSize | HeadSize
    target: str = "smollm2"
    """Model to draft for: smollm2 (bundled), a folder, a GGUF file, or a hub name."""
    start: str | None = None
    """Fine-tune this draft instead of training a new one: a folder, a GGUF file or a hub name, of the same kind."""
    vocabulary: int = 24_576
    """Draft only this many of the most frequent tokens, which is faster; 0 for all."""
    prompts: str | None = None
    """Prompts for the target to answer: a file (.jsonl, .jsonl.gz, text) or builtin  [default: it makes up conversations]."""
    prompt_limit: int | None = None
    """Use at most this many prompts."""
    made_up: float = 0.25
    """With --prompts: share of the tokens from conversations that the target makes up."""
    texts: tuple[str, ...] = ()
    """Plain text file to train on instead; may be given several times."""
    tokens: int = 20_000_000
    """Number of tokens to train on."""
    length: int = 512
    """Tokens per text; twice as many where a text starts with a long prompt."""
    steps: int = 2_400
    """Training steps."""
    batch_size: int = 64
    """Texts per step."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """adamw, or muon (for matrices, adamw for the rest)."""
    loss: str = "lk"
    """kl, tv (probability of rejection), kl+tv, or lk (moves from kl to tv), on the target's full distribution."""
    seed: int = 0
    """The same seed gives the same draft (on the same machine)."""
    save_every: int = 200
    """Steps between checkpoints."""
    evaluate_every: int = 100
    """Steps between measurements of acceptance."""
    sampling_rows: int = 0
    """Texts for the target to write at a time; 0 for as many as fit in memory."""

    def __post_init__(self) -> None:
        counts = ("tokens", "steps", "batch_size", "save_every", "evaluate_every")
        check_ranges(self, [(name, 1, math.inf) for name in counts])
        check_ranges(
            self, [("sampling_rows", 0, math.inf), ("vocabulary", 0, math.inf), ("length", 16, math.inf), ("made_up", 0, 1)]
        )
        _check_rate(self.learning_rate)
        if self.loss not in LOSSES:
            raise UsageError(f"unknown loss {self.loss!r}; allowed: {', '.join(LOSSES)}")
        if self.start is not None:
            from polydraft.train.start import check_start  # late: it loads torch

            check_start(self.start, self)
        if self.prompts and self.texts:
            raise UsageError("--prompts and --text cannot be combined; choose one")
        for name in (*self.texts, *([self.prompts] if self.prompts else [])):
            if name != "builtin" and not Path(name).is_file():
                raise UsageError(f"cannot read {name!r}: there is no such file; check the path")
        for name in self.texts:
            _check_text(name)

    @property
    def kind(self) -> str:
        """``"draft"`` or ``"head"``."""
        return "draft" if isinstance(self.size, DraftSize) else "head"

    @property
    def longest(self) -> int:
        """Tokens of the longest texts."""
        return self.length * (LENGTHS[-1] if self.prompts else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for the training folder and the card; most of them must not change in a resumed run."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """Settings for training a decision model."""

    kind: Literal["hidden", "distribution"] = "distribution"
    """Input of the model: the draft's hidden states (hidden), or its probabilities (distribution)."""
    prompts: str = "builtin"
    """Prompts to collect traces from: builtin, or a file."""
    limit: int | None = None
    """Use at most this many prompts."""
    traces: int = 100_000
    """Number of drafted tokens to learn from."""
    depth: int = 5
    """Tokens to draft per round."""
    rows: int = 32
    """Texts to decode at a time."""
    max_new_tokens: int = 64
    """Generate at most this many tokens per text."""
    width: int = 64
    """Size of the hidden layers."""
    steps: int = 2000
    """Training steps."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    seed: int = 0
    """The same seed gives the same model (on the same machine)."""

    def __post_init__(self) -> None:
        counts = ("traces", "depth", "rows", "max_new_tokens", "width", "steps")
        check_ranges(self, [(name, 1, math.inf) for name in counts])
        _check_rate(self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class CorpusCacheSettings:
    """Text and size of a corpus cache."""

    tokenizer: str = "smollm2"
    """Tokenizer of the target: smollm2 (bundled), a folder, a GGUF file, or a hub name."""
    texts: tuple[Path, ...] = ()
    """UTF-8 text file, plain or gzipped, of any size; may be given several times or followed by more files."""
    generate: int = 0
    """Let the model named by --tokenizer write this many tokens of text."""
    max_bytes: int = 32_000_000
    """Keep the most frequent n-grams that fit in this many bytes."""
    gram: int = 4
    """Tokens per continuation."""
    max_prefix: int = 3
    """Match at most this many tokens at the end of the text."""
    min_count: int = 2
    """Drop n-grams that occur less often than this."""
    length: int = 512
    """With --generate: tokens per text."""
    sampling_rows: int = 0
    """With --generate: texts to write at a time; 0 for as many as fit in memory."""
    seed: int = 0
    """With --generate: the same seed gives the same text (on the same machine)."""

    def __post_init__(self) -> None:
        from polydraft.ngrams.cache import check_order

        check_order(self.max_prefix, self.gram)
        check_ranges(self, [("max_bytes", 1, math.inf), ("min_count", 1, math.inf), ("generate", 0, math.inf)])
        if not self.texts and not self.generate:
            raise UsageError(
                "there is no text to count; give files with --text, or let the model write some with --generate TOKENS"
            )
        for file in self.texts:
            check_text_file(file)
        if self.generate:
            self.written()  # checks the other settings

    def written(self) -> TrainSettings:
        """Return training settings that make the target write this text."""
        return TrainSettings(
            size=HeadSize(),
            target=self.tokenizer,
            tokens=self.generate,
            length=self.length,
            sampling_rows=self.sampling_rows,
            seed=self.seed,
        )


def check_text_file(file: Path) -> None:
    """Refuse a missing file before hours are spent on the others."""
    if not file.is_file():
        raise UsageError(f"cannot read {str(file)!r}: there is no such file; allowed: UTF-8 text, plain or gzipped (.gz)")


def _check_text(name: str) -> None:
    """Refuse a file that is not UTF-8 before a model is loaded."""
    try:
        with open(name, encoding="utf-8") as file:
            while file.read(1 << 20):
                pass
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name!r} as UTF-8 text ({error}); convert it with iconv") from None


def _check_rate(learning_rate: float) -> None:
    if not learning_rate > 0:
        raise UsageError(f"--learning-rate {learning_rate} is out of range; allowed: above 0")
