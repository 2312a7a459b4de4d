"""From logits to probabilities to tokens: the only place for temperature, top-k, penalties and random numbers."""

from polydraft.sampling.categorical import NO_TOKEN, Noise, draw_distinct, draw_independent, draw_one
from polydraft.sampling.grammar import Grammar
from polydraft.sampling.params import IDLE, RowParams, SamplingParams, check_draft_temperature, check_params, was_asked
from polydraft.sampling.vocabulary import PartialVocabulary
from polydraft.sampling.warper import Warper

__all__ = [
    "IDLE",
    "NO_TOKEN",
    "Grammar",
    "Noise",
    "PartialVocabulary",
    "RowParams",
    "SamplingParams",
    "Warper",
    "check_draft_temperature",
    "check_params",
    "draw_distinct",
    "draw_independent",
    "draw_one",
    "was_asked",
]
