"""How much of what could be accepted is accepted, on the probabilities of two real models along the target's own text."""

from polydraft.lab.analyze._settings import AnalyzeSettings
from polydraft.lab.analyze.analysis import Analysis, DistributionStore
from polydraft.lab.analyze.comparison import Row

__all__ = ["Analysis", "AnalyzeSettings", "DistributionStore", "Row"]
