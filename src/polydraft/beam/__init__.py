"""Beam search and beam sampling, speculatively: forests of draft beams, one target pass, exact layers.

Names load on first use: the command line describes beams by `BeamOptions` without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.beam.decoder import BeamDecoder
    from polydraft.beam.options import BeamMode, BeamOptions, Draws
    from polydraft.beam.stream import BeamGeneration, BeamStream, ScoredText, scored, text_log_probs

_HOMES = {
    "decoder": ("BeamDecoder",),
    "options": ("BeamMode", "BeamOptions", "Draws"),
    "stream": ("BeamGeneration", "BeamStream", "ScoredText", "scored", "text_log_probs"),
}

__all__ = [
    "BeamDecoder",
    "BeamGeneration",
    "BeamMode",
    "BeamOptions",
    "BeamStream",
    "Draws",
    "ScoredText",
    "scored",
    "text_log_probs",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"polydraft.beam.{module}"), name)
    raise AttributeError(f"module 'polydraft.beam' has no attribute {name!r}")
