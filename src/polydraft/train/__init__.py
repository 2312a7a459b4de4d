"""Drafts made to measure: distilled models and feature heads, from the target's own text."""

from polydraft.train.settings import DraftSize, HeadSize, TrainSettings
from polydraft.train.training import Report, train

__all__ = ["DraftSize", "HeadSize", "Report", "TrainSettings", "train"]
