"""Options of beams, for Python and the command line, and their defaults."""

from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal

import torch

from polydraft.devices import is_host
from polydraft.errors import UsageError, member, shown

EarlyStopping = bool | Literal["never"]

_MOST_BEAMS = 1024
"""More beams would run out of memory."""
_MOST_PENALTY = 50
"""Lengths raised to this power stay finite."""


class BeamMode(StrEnum):
    """How beams are chosen."""

    SEARCH = "search"
    """The best continuations of all beams, deterministically."""
    SAMPLE = "sample"
    """Continuations drawn by their likelihood."""


class Draws(StrEnum):
    """How beams are drawn from the beam distribution."""

    DISTINCT = "distinct"
    """W different ones, without replacement."""
    INDEPENDENT = "iid"
    """W independent ones, some of which may be equal, as in the paper."""
    HUGGING_FACE = "hf"
    """2 W or more different ones: the W best of those that continue are kept, and those that end among the first W finish."""


class Verification(StrEnum):
    """How drafted beams are verified against the target's distribution; every way is exact."""

    AUTO = "auto"
    """Coupled where possible, otherwise layers."""
    LAYERS = "layers"
    """Accept or reject beam by beam, layer by layer, as in the paper; for every way to draw and every width."""
    COUPLED = "coupled"
    """Draw target and draft with the same noise; for distinct beams of fixed width."""


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Beams.

    With a fixed width, the draft and the size of its forests change the speed, never the distribution of the texts.
    """

    beams: int = 4
    """Decode with this many beams: beam search at temperature 0, beam sampling above.

    The width W_L."""
    mode: BeamMode | str = BeamMode.SEARCH
    """search or sample: the best continuations of all beams, or continuations drawn by their likelihood."""
    draws: Draws | str = Draws.DISTINCT
    """When sampling: distinct beams, iid (independent) beams, or hf (draw twice as many, keep the best)."""
    verification: Verification | str = Verification.AUTO
    """When sampling: layers (the paper's method), coupled (shared noise) or auto."""
    draft_width: int | None = None
    """Number of draft beams  [default: 4 times the beams on a GPU, 1.5 times on a CPU; twice with a width threshold].

    The width W_S of the draft's own beams; see `on` for the default."""
    draft_depth: int | None = None
    """Let draft beams run at most this many steps ahead  [default: 4 on a GPU, 2 on a CPU; 3 with a width threshold].

    The depth γ; fewer steps if recent rounds accepted few layers. See `on` for the default."""
    twins: bool = False
    """Draft beams from what the target predicted after texts with the same ending; needs no draft model.

    A draft is ignored."""
    model_only: bool = False
    """Draft beams from the draft model alone and always to the full depth, as the paper does.

    Otherwise what the target has predicted already, after the same text or one with the same ending, replaces or corrects the
    draft's guess, and forests are only one layer deeper than recent rounds have accepted."""
    width_threshold: float | None = None
    """When sampling: keep as many beams per layer as the drafts yield with this probability  [default: a fixed width]."""
    min_width: int | None = None
    """With a width threshold: keep at least this many beams per layer  [default: 1]."""
    one_cache: bool = False
    """When sampling: continue with only the likeliest beam after each round (a heuristic; the text is no longer an exact
    sample)."""
    num_return_sequences: int = 1
    """Return this many texts with their log-probabilities: the best beams, or independent samples."""
    length_penalty: float = 1.0
    """Divide beam scores by the length raised to this power  [default: 1]."""
    early_stopping: EarlyStopping = False
    """When beam search stops, as in Hugging Face: true, false or never  [default: false]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", member(BeamMode, "beam mode", self.mode))
        object.__setattr__(self, "draws", member(Draws, "way to draw beams", self.draws))
        object.__setattr__(self, "verification", member(Verification, "verification", self.verification))
        self._check_counts()
        if self.width_threshold is not None:
            _number("width_threshold", self.width_threshold)
            if not 0 <= self.width_threshold <= 1:
                raise UsageError(f"width_threshold={self.width_threshold!r} is out of range; allowed: 0 to 1")
            if self.draws == Draws.HUGGING_FACE:
                raise UsageError("width_threshold does not work with draws 'hf', whose width is fixed; use 'distinct' or 'iid'")
        elif self.min_width is not None:
            raise UsageError("min_width needs a width threshold; pass width_threshold too, such as 0.7")
        if self.verification == Verification.COUPLED and not self._can_be_coupled:
            raise UsageError("verification 'coupled' is for distinct beams of fixed width; leave it out, or use 'layers'")
        _number("length_penalty", self.length_penalty)
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            allowed = f"{-_MOST_PENALTY} to {_MOST_PENALTY}"
            raise UsageError(f"length_penalty={shown(self.length_penalty)} is out of range; allowed: {allowed}")
        for name in ("twins", "model_only", "one_cache"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}; allowed: True, False")
        if self.twins and self.model_only:
            raise UsageError("twins draft without a model and model_only without twins; leave one of them out")
        early: Any = self.early_stopping
        if early not in (True, False, "never"):
            raise UsageError(f"early_stopping={early!r}; allowed: True, False, 'never'")
        if self.mode == BeamMode.SEARCH:
            for name in ("width_threshold", "one_cache", "draws", "verification"):
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise UsageError(f"{name} is for beam sampling; beam search draws nothing; use mode 'sample'")

    def _check_counts(self) -> None:
        for name in ("beams", "draft_depth", "num_return_sequences", "draft_width", "min_width"):
            value = getattr(self, name)
            if value is None and name in ("draft_width", "draft_depth", "min_width"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise UsageError(f"{name}={value!r} is out of range; allowed: whole numbers from 1")
        for name, most in (("beams", _MOST_BEAMS), ("draft_width", 2 * _MOST_BEAMS)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise UsageError(f"{name}={value} is out of range; allowed: whole numbers from 1 to {most}")
        if self.num_return_sequences > self.beams:
            raise UsageError(
                f"num_return_sequences={self.num_return_sequences} is more than the {self.beams} beams; use more beams, or "
                "return fewer texts"
            )
        if self.draft_width is not None and self.draft_width <= self.beams:
            raise UsageError(
                f"draft_width={self.draft_width} must be above beams={self.beams}, because some drafts are rejected; use "
                f"{2 * self.beams}, or fewer beams"
            )
        if self.min_width is not None and self.min_width > self.width_of_drafts:
            raise UsageError(
                f"min_width={self.min_width} is above draft_width={self.width_of_drafts}: no layer could be accepted; use a "
                "smaller one"
            )

    @property
    def width_of_drafts(self) -> int:
        """W_S, or its default if it does not depend on the device."""
        return self.draft_width if self.draft_width is not None else 2 * self.beams

    @property
    def depth_of_drafts(self) -> int:
        """γ, or its default if it does not depend on the device."""
        return self.draft_depth if self.draft_depth is not None else 3

    def on(self, device: torch.device) -> "BeamOptions":
        """Return these options with a size of forests that pays on a device, unless it was given.

        More nodes are nearly free on a GPU, and expensive on a CPU. With dynamic widths or one cache, the text depends on the
        forest, so there the size is the same on every device.
        """
        if self.width_threshold is not None or self.one_cache:
            return self
        wide = not is_host(device)
        width, depth = self.draft_width, self.draft_depth
        if width is None and self.draws != Draws.HUGGING_FACE:
            width = min(4 * self.beams, 2 * _MOST_BEAMS) if wide else max(self.beams + 1, 3 * self.beams // 2)
        return replace(self, draft_width=width, draft_depth=(4 if wide else 2) if depth is None else depth)

    @property
    def _can_be_coupled(self) -> bool:
        return self.draws != Draws.INDEPENDENT and self.width_threshold is None and not self.one_cache

    @property
    def is_coupled(self) -> bool:
        """Whether the draft shares the target's noise."""
        return self._can_be_coupled and self.verification != Verification.LAYERS


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name}={value!r} is not a number; use a number such as 0.7")
