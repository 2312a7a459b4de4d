"""How much of what could be accepted is accepted, on the probabilities of two real models along the target's own text."""

from polydraft.analyze.analysis import Analysis, LawStore
from polydraft.analyze.comparison import Row
from polydraft.analyze.settings import AnalyzeSettings

__all__ = ["Analysis", "AnalyzeSettings", "LawStore", "Row"]
