"""How the children of a node are drawn and how they are verified; the two belong together."""

from polydraft.schemes.greedy import Greedy, SpecHub
from polydraft.schemes.gumbel import Gumbel
from polydraft.schemes.hybrid import Hybrid, Race, RaceBucketed, ThresholdTuner
from polydraft.schemes.kseq import KSeq
from polydraft.schemes.naive import Naive, Top
from polydraft.schemes.rejection import RejectionWithoutReplacement, RejectionWithReplacement, Speculative
from polydraft.schemes.scheme import SCHEMES, Scheme, Selection, draw_checked, verify_checked

__all__ = [
    "SCHEMES",
    "Greedy",
    "Gumbel",
    "Hybrid",
    "KSeq",
    "Naive",
    "Race",
    "RaceBucketed",
    "RejectionWithReplacement",
    "RejectionWithoutReplacement",
    "Scheme",
    "Selection",
    "SpecHub",
    "Speculative",
    "ThresholdTuner",
    "Top",
    "draw_checked",
    "verify_checked",
]
