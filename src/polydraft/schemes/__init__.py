"""How the children of a node are drawn and how they are verified; the two belong together."""

from polydraft.schemes.naive import Naive, Top
from polydraft.schemes.rejection import RejectionWithoutReplacement, RejectionWithReplacement, Speculative
from polydraft.schemes.scheme import SCHEMES, Scheme, Selection

__all__ = [
    "SCHEMES",
    "Naive",
    "RejectionWithReplacement",
    "RejectionWithoutReplacement",
    "Scheme",
    "Selection",
    "Speculative",
    "Top",
]
