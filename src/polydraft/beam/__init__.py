"""Beam search and beam sampling, speculatively: forests of draft beams, one target pass, exact layers."""

from polydraft.beam.decoder import BeamDecoder
from polydraft.beam.options import BeamMode, BeamOptions, Draws
from polydraft.beam.stream import BeamGeneration, BeamStream, ScoredText, scored, text_log_probs

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
