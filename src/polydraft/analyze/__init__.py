"""How much of what could be accepted is accepted, on the laws of two real models along the target's own text."""

from polydraft.analyze.analysis import Analysis
from polydraft.analyze.row import Row
from polydraft.analyze.settings import AnalyzeSettings

__all__ = ["Analysis", "AnalyzeSettings", "Row"]
