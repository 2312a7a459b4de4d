"""Whether to go on drafting: small models that look at a draft between its levels."""

from polydraft.decision.decision import DEFAULT_THRESHOLD, Decision, DecisionKind, DecisionModel, check_threshold
from polydraft.decision.fingerprint import draft_fingerprint
from polydraft.decision.folder import load_decision, save_decision

__all__ = [
    "DEFAULT_THRESHOLD",
    "Decision",
    "DecisionKind",
    "DecisionModel",
    "check_threshold",
    "draft_fingerprint",
    "load_decision",
    "save_decision",
]
