"""The settings of `analyze`, described and checked once. Importing this module does not import torch."""

import math
from dataclasses import dataclass

from polydraft.errors import UsageError
from polydraft.options import PairOptions


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings(PairOptions):
    """A pair of models, the text to compare them on, and the verifiers to compare."""

    draft_temperature: float | None = None
    """Temperature of the draft  [default: the target's]."""
    source: str = "builtin"
    """builtin, a file or a folder of files, or hf:NAME[:SPLIT]."""
    limit: int = 32
    """Use this many prompts, spread over the categories."""
    categories: tuple[str, ...] = ()
    """Use only prompts of these categories; all if empty."""
    raw: bool = False
    """Use prompts as they are, without the chat template."""
    temperatures: tuple[float, ...] = (0.6, 1.0)
    """Temperatures to analyze  [default: 0.6,1.0]."""
    drafts: tuple[int, ...] = (2, 4, 8)
    """Numbers of drafts to analyze  [default: 2,4,8]."""
    schemes: tuple[str, ...] = ()
    """Schemes to analyze; 'polydraft info' lists them  [default: all]."""
    max_new_tokens: int = 64
    """Generate at most this many tokens per answer."""
    positions: int = 256
    """Number of random positions in the answers to examine, per temperature."""
    batch_size: int = 16
    """Prompts to answer at a time."""
    seed: int = 0
    """The same seed gives the same answers and positions."""
    paper_bound: bool = False
    """Also show the value that the paper prints for α*."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """Number format: auto, float32, bfloat16, float16, or int8 (weights only, on a CPU)."""
    threads: int | None = None
    """Number of CPU threads  [default: torch's choice]."""

    def __post_init__(self) -> None:
        from polydraft.lab.theory.without_replacement import MAX_COUNT
        from polydraft.verify import SCHEMES

        super().__post_init__()
        for name in ("max_new_tokens", "positions", "batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is out of range; allowed: whole numbers from 1")
        for count in self.drafts:
            if not 1 <= count <= MAX_COUNT:
                raise UsageError(f"--drafts {count} is out of range; allowed: whole numbers from 1 to {MAX_COUNT}")
        for scheme in self.schemes:
            SCHEMES.get(scheme)
        self._check_temperatures()

    def _check_temperatures(self) -> None:
        from polydraft.sampling import check_draft_temperature

        own = self.draft_temperature
        check_draft_temperature(own)
        if own == 0:
            raise UsageError(
                "--draft-temperature 0 is out of range; allowed: above 0; at 0 every scheme drafts the likeliest tokens, as "
                "--schemes top does"
            )
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise UsageError(f"--temperature {temperature:g} is out of range; allowed: above 0, such as 0.6,1.0")
            if temperature == 0 and own is None:
                raise UsageError(
                    "--temperature 0 leaves nothing to compare: distributions are single tokens, and all schemes draft the "
                    "likeliest ones; allowed: above 0, such as 0.1, or 0 with a --draft-temperature above 0; for greedy "
                    "decoding use: polydraft bench"
                )

    @property
    def scheme_names(self) -> tuple[str, ...]:
        """Names of the schemes, each once."""
        from polydraft.verify import SCHEMES

        return tuple(dict.fromkeys(self.schemes or SCHEMES))
