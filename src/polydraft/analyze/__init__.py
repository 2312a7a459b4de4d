"""How much of what could be accepted is accepted, on the probabilities of two real models along the target's own text."""

from polydraft.analyze._settings import AnalyzeSettings
from polydraft.analyze.analysis import Analysis, LawStore
from polydraft.analyze.comparison import Row

__all__ = ["Analysis", "AnalyzeSettings", "LawStore", "Row"]
