"""All outcomes of a random program, each with its exact chance."""

from collections.abc import Callable, Hashable
from typing import Any

from polydraft.beam._sample import Chance


class _Scripted(Chance):
    """Follow a script of decisions; past its end take the first branch and note what else there was."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.position, self.chance = script, 0, 1.0
        self.open: list[int] = []
        """How many branches each decision past the script had."""

    def _branch(self, chances: list[float]) -> int:
        possible = [index for index, value in enumerate(chances) if value > 0]
        if self.position < len(self.script):
            chosen = self.script[self.position]
        else:
            chosen = 0
            self.open.append(len(possible))
        self.position += 1
        self.chance *= chances[possible[chosen]]
        return possible[chosen]

    def accepts(self, target: float, draft: float) -> bool:
        ratio = min(1.0, target / draft) if draft > 0 else float(target > 0)
        return self._branch([1 - ratio, ratio]) == 1

    def draw(self, weights_X, count, *, distinct):
        left, drawn = weights_X.copy(), []
        for _ in range(count):
            total = left.sum()
            if not total > 0:
                break
            drawn.append(self._branch(list(left / total)))
            if distinct:
                left[drawn[-1]] = 0.0
        return drawn


def enumerate_outcomes(program: Callable[[Chance], Hashable]) -> dict[Any, float]:
    """Run a program through all of its random decisions and return the distribution of what it returns."""
    distribution: dict[Any, float] = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        chance = _Scripted(script)
        outcome = program(chance)
        distribution[outcome] = distribution.get(outcome, 0.0) + chance.chance
        taken = list(script)
        for branches in chance.open:
            scripts += [[*taken, other] for other in range(1, branches)]
            taken.append(0)
    return distribution


def total_variation(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Return half the sum of differences."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
