"""From logits to probabilities to tokens: the only place that knows temperature, top-k, penalties and random numbers."""

from polydraft.sampling.categorical import NO_TOKEN, draw_distinct, draw_independent, draw_one
from polydraft.sampling.noise import Noise
from polydraft.sampling.params import SamplingParams, check_draft_temperature
from polydraft.sampling.rows import IDLE, RowParams
from polydraft.sampling.vocabulary import PartialVocabulary
from polydraft.sampling.warper import Warper

__all__ = [
    "IDLE",
    "NO_TOKEN",
    "Noise",
    "PartialVocabulary",
    "RowParams",
    "SamplingParams",
    "Warper",
    "check_draft_temperature",
    "draw_distinct",
    "draw_independent",
    "draw_one",
]
