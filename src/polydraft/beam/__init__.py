"""Speculative beam search and beam sampling: a draft grows a forest of beams, and one target pass verifies several steps."""

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
