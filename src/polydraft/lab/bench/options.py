"""What a benchmark measures, and the options of its methods. Importing this module does not import torch."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from polydraft.described import Option, options_in
from polydraft.errors import UsageError
from polydraft.options import SELF_DRAFT, CpuOptions, LoadOptions, NgramOptions, PairOptions, PlaceOptions

if TYPE_CHECKING:
    from polydraft.draft import GramTreeOptions

OF_DRAFTS = ("scheme", "walk", "draft_temperature", "decision", "stop_below")
"""Options that make no sense for n-grams alone."""
_SETTLED = ("target", "draft", "adapter", "device", "dtype", "device_map", "profile", "native", "corpus", "tree", "drafter")
"""Options set for the whole benchmark, or by a method's name and argument."""
_MOST_SECONDS = 3600


@dataclass(frozen=True, kw_only=True)
class MethodNgrams(NgramOptions):
    """N-gram options of a method."""

    ngram_chance: float | None = field(default=None, metadata={"short": "chance"})
    """Drop candidates whose estimated chance is below this, 0 to 1; Self-Draft drops none."""

    def grams_asked_for(self, drafter: str = SELF_DRAFT, lossy: str | None = None) -> "GramTreeOptions":
        """Return the options in the form that drafters take."""
        if lossy is not None and self.ngram_chance is not None:
            raise UsageError(
                f"chance={self.ngram_chance} does not work with lossy={lossy}, which drops no candidate; leave it out"
            )
        return replace(super().grams_asked_for(drafter, lossy), least_chance=self.ngram_chance)


def method_options(*, grams: bool, skip: Collection[str] = ()) -> list[Option]:
    """Return the options that a method can have; `grams` adds those of n-grams."""
    found = [*options_in(LoadOptions), *(options_in(MethodNgrams) if grams else [])]
    return [option for option in found if option.has_text and option.name not in (*_SETTLED, *skip)]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PairOptions, PlaceOptions, CpuOptions):
    """What to measure."""

    described_in: ClassVar[str] = "polydraft.sampling.params:SamplingParams"

    source: str = "builtin"
    """builtin, a file or a folder of files, or hf:NAME[:SPLIT]."""
    limit: int | None = None
    """Use this many prompts, spread over the categories  [default: all]."""
    shard: str | None = None
    """Measure only the I-th of N parts of these prompts; join the parts with: polydraft bench merge."""
    methods: tuple[str, ...]
    """Methods, separated by spaces."""
    corpus: str = "auto"
    """Corpus cache: a file, none, or auto."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    log_likelihood: bool = False
    """Also score every text with the target; not timed."""
    max_new_tokens: int = 64
    """Generate at most this many tokens per text."""
    repeat: int = 1
    """Measure everything this many times."""
    batch: int = 1
    """Decode this many texts at a time, to measure acceptance; above 1 nothing is warmed up, so speeds mean little."""
    seed: int = 0
    """Seed of the first repeat; each later one adds 1."""
    energy_seconds: float = 0.0
    """Also measure every method's energy three times, each over all prompts and at least this many seconds  [default: off]."""
    raw: bool = False
    """Use prompts as they are, without the chat template."""
    threads: int | None = None
    """Number of CPU threads  [default: torch's choice]."""

    def __post_init__(self) -> None:
        from polydraft.lab.bench import _ours, _peers  # noqa: F401  (they register the methods)
        from polydraft.lab.bench.method import check_method_names
        from polydraft.lab.bench.shards import Shard

        for name in ("repeat", "batch", "max_new_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} is out of range; allowed: whole numbers from 1")
        if not 0 <= self.energy_seconds <= _MOST_SECONDS:
            raise UsageError(f"energy_seconds={self.energy_seconds} is out of range; allowed: 0 to {_MOST_SECONDS}")
        if self.energy_seconds and self.shard is not None:
            raise UsageError(
                "--energy-seconds measures the whole machine, other shards included; leave out --energy-seconds or --shard"
            )
        if not self.methods:
            raise UsageError("no methods given; name at least one, such as ar")
        check_method_names(list(self.methods))
        if self.shard is not None:
            Shard.parse(self.shard)
