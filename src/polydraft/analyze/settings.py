"""What to analyse."""

import math
from dataclasses import dataclass

from polydraft.errors import UsageError
from polydraft.schemes import SCHEMES
from polydraft.theory.without_replacement import MAX_COUNT


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings:
    """A pair of models, the text to compare them on, and the verifiers to compare."""

    target: str = "smollm2"
    draft: str = "auto"
    source: str = "builtin"
    """Prompts, as `polydraft.prompts.load_prompts` takes them."""
    limit: int | None = 32
    raw: bool = False
    """Prompts as they are, without the chat template."""
    temperatures: tuple[float, ...] = (0.6, 1.0)
    draft_temperature: float | None = None
    """The target's temperature if not given."""
    drafts: tuple[int, ...] = (2, 4, 8)
    schemes: tuple[str, ...] = ()
    """Registered names; all of them where empty."""
    max_new_tokens: int = 64
    positions: int = 256
    """Most positions a temperature; more are thinned out at random."""
    batch_size: int = 16
    seed: int = 0
    paper_bound: bool = False
    """Add what the paper prints as the optimum of drawing without replacement."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
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
        own = self.draft_temperature
        if own is not None and not 0 < own < math.inf:
            raise UsageError(
                f"--draft-temperature {own:g} is out of range; allowed: above 0; at 0 every scheme takes the draft's likeliest "
                "tokens, which --schemes top shows"
            )
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise UsageError(f"--temperature {temperature:g} is out of range; allowed: above 0, such as 0.6,1.0")
            if temperature == 0 and own is None:
                raise UsageError(
                    "--temperature 0 leaves nothing to compare: laws are single tokens and all schemes take the draft's "
                    "likeliest ones; allowed: above 0, such as 0.1, or 0 with a --draft-temperature above 0; for greedy "
                    "decoding use: polydraft bench"
                )

    @property
    def scheme_names(self) -> tuple[str, ...]:
        """The schemes asked for, each once."""
        return tuple(dict.fromkeys(self.schemes or SCHEMES.names()))
