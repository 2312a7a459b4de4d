"""What to analyse: the settings, and the two models they name."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from polydraft.defaults import default_draft
from polydraft.errors import UsageError
from polydraft.lab.theory.without_replacement import MAX_COUNT
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.fingerprint import model_fingerprint
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.sampling import check_draft_temperature
from polydraft.verify import SCHEMES


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings:
    """A pair of models, the text to compare them on, and the verifiers to compare."""

    target: str = "smollm2"
    draft: str = "auto"
    source: str = "builtin"
    """Prompts, as `polydraft.prompts.load_prompts` takes them."""
    limit: int | None = 32
    categories: tuple[str, ...] = ()
    """Of the prompts; all where empty."""
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
    """Most positions per temperature; more are thinned out at random."""
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
        check_draft_temperature(own)
        if own == 0:
            raise UsageError(
                "--draft-temperature 0 is out of range; allowed: above 0; at 0 every scheme takes the draft's likeliest "
                "tokens, which --schemes top shows"
            )
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise UsageError(f"--temperature {temperature:g} is out of range; allowed: above 0, such as 0.6,1.0")
            if temperature == 0 and own is None:
                raise UsageError(
                    "--temperature 0 leaves nothing to compare: distributions are single tokens and all schemes take the "
                    "draft's likeliest ones; allowed: above 0, such as 0.1, or 0 with a --draft-temperature above 0; for "
                    "greedy decoding use: polydraft bench"
                )

    @property
    def scheme_names(self) -> tuple[str, ...]:
        """The schemes asked for, each once."""
        return tuple(dict.fromkeys(self.schemes or SCHEMES.names()))


class Pair:
    """A target and its draft by name, loaded only when something has to be computed with them.

    Parameters
    ----------
    target, draft, device, dtype : str
        As `polydraft.load` takes them.
    """

    def __init__(self, target: str, draft: str, device: str, dtype: str) -> None:
        self.target_name = target
        self.draft_name = default_draft(target) if draft == "auto" else draft
        if self.draft_name == "none":
            raise UsageError(f"target {target!r} has no draft to compare with; pass --draft NAME, a folder, or early-exit:k")
        self.device: torch.device = resolve_device(device)
        self.dtype: torch.dtype = resolve_dtype(dtype, self.device)

    @cached_property
    def target(self) -> Loaded:
        """The target, loaded."""
        return load_model(self.target_name, self.device, self.dtype)

    @cached_property
    def draft(self) -> LanguageModel | FeatureHead:
        """The draft, loaded."""
        draft = load_draft(self.draft_name, self.target)
        assert draft is not None, "'none' was refused"
        return draft

    def fingerprint(self) -> list[str] | None:
        """Return marks of both models' files and of how they compute, or None while that cannot be told."""
        marks = [model_fingerprint(name) for name in (self.target_name, self.draft_name)]
        found = [mark for mark in marks if mark is not None]
        return [*found, str(self.dtype), self.device.type] if len(found) == len(marks) else None
