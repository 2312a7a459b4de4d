"""Rounds of draft, target pass, walk and commit, until the text is done."""

from polydraft.engine.decoder import Decoder
from polydraft.engine.loop import Engine
from polydraft.engine.sequence import Generation, StopReason, TokenEvent, TokenSequence
from polydraft.engine.stats import Stats
from polydraft.engine.stream import Stream

__all__ = ["Decoder", "Engine", "Generation", "Stats", "StopReason", "Stream", "TokenEvent", "TokenSequence"]
