"""Rounds of draft, target pass, walk and commit, until the text is done."""

from polydraft.engine.decoder import Decoder
from polydraft.engine.result import Generation, StopReason, TokenEvent
from polydraft.engine.run import Run
from polydraft.engine.stats import Stats
from polydraft.engine.stream import Stream

__all__ = ["Decoder", "Generation", "Run", "Stats", "StopReason", "Stream", "TokenEvent"]
