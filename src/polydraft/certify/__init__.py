"""The losslessness kit: certify a verification rule or a walk, and with `greedy_identity` a whole decoder or an endpoint."""

from polydraft.certify._certificate import Certificate, Check, CounterExample
from polydraft.certify._kit import certify
from polydraft.certify._subject import FULL, QUICK, Sizes, Subject, all_subjects, find_subject

__all__ = [
    "FULL",
    "QUICK",
    "Certificate",
    "Check",
    "CounterExample",
    "Sizes",
    "Subject",
    "all_subjects",
    "certify",
    "find_subject",
]
