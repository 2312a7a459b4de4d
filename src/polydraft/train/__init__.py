"""Training of drafts, decision models and corpus caches from the target's own text.

Only settings are imported here, so that the command line's help does not wait for torch; `polydraft.train.training` trains.
"""

from polydraft.train.settings import CorpusCacheSettings, DecisionSettings, DraftSize, HeadSize, TrainSettings

__all__ = ["CorpusCacheSettings", "DecisionSettings", "DraftSize", "HeadSize", "TrainSettings"]
