"""Finished texts of a beam run, and when it may end; Hugging Face's rules."""

from dataclasses import dataclass
from typing import Literal

from polydraft.beam.node import Node
from polydraft.engine import StopReason

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text."""

    node: Node
    total: float
    """Sum of its tokens' scores."""
    score: float
    """That, over its length to the power of the length penalty."""
    reason: StopReason


class Pool:
    """The best finished texts so far.

    Parameters
    ----------
    capacity : int
        Texts kept; the run wants so many.
    length_penalty : float
        Scores are divided by the length to this power: above 0 favours long texts, because scores are negative.
    early_stopping : bool or "never"
        True ends as soon as the pool is full; False once no running beam, at its present length, would get in; "never" once
        none could at any length.
    longest : int
        Most new tokens.
    """

    def __init__(self, capacity: int, length_penalty: float, early_stopping: EarlyStopping, longest: int) -> None:
        self._capacity, self._penalty, self._early = capacity, length_penalty, early_stopping
        self._longest = longest
        self.best: list[Hypothesis] = []
        """Best first."""

    def add(self, node: Node, total: float, reason: StopReason) -> None:
        """Take in a finished text, if it is among the best."""
        score = total / node.depth**self._penalty
        self.best.append(Hypothesis(node, total, score, reason))
        self.best.sort(key=lambda one: -one.score)  # stable: of equals the earlier stays
        del self.best[self._capacity :]

    def is_done(self, best_running: float, length: int) -> bool:
        """Say whether running beams, the best of which has the score `best_running`, need not go on."""
        if len(self.best) < self._capacity:
            return False
        if self._early is True:
            return True
        reach = self._longest if self._early == "never" and self._penalty > 0 else length
        return not best_running / reach**self._penalty > self.best[-1].score
