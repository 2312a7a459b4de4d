"""Beam sampling as it is defined, by exhaustion, with none of the machinery under test."""

from collections.abc import Callable, Sequence

import numpy as np

Rows = Callable[[tuple[int, ...]], np.ndarray]
"""Scores of the next token after some new tokens; minus infinity where it cannot come."""


def beam_sampling_distribution(
    rows: Rows,
    *,
    width: int,
    steps: int,
    draws: str,
    ends: Sequence[int] = (),
    stops: Callable[[tuple[int, ...]], bool] = lambda text: False,
    penalty: float = 1.0,
) -> dict[tuple[tuple[int, ...], ...], float]:
    """Return the distribution of the finished texts, best first, of beam sampling that never stops early."""
    count = max(2, 1 + len(ends)) * width if draws == "hf" else width
    states = {((((), 0.0),), ()): 1.0}
    """Running beams and finished texts, each with its score, to their chance."""
    for length in range(1, steps + 1):
        following: dict = {}
        for (beams, finished), chance in states.items():
            options = [((*text, token), total + score) for text, total in beams for token, score in enumerate(rows(text))]
            for drawn, share in drawn_texts(options, count, draws == "iid"):
                over = [text[-1] in ends or length == steps or stops(text) for text, _ in drawn]
                running = [beam for beam, ended in zip(drawn, over, strict=True) if not ended]
                may_end = drawn[:width] if draws == "hf" else drawn
                new = [(text, total / length**penalty) for (text, total), ended in zip(may_end, over, strict=False) if ended]
                if draws == "hf":
                    running = sorted(running, key=lambda one: -one[1])[:width]
                kept = sorted([*finished, *new], key=lambda one: -one[1])[:width]
                state = (tuple(running), tuple(kept))
                following[state] = following.get(state, 0.0) + chance * share
        states = following
    distribution: dict[tuple[tuple[int, ...], ...], float] = {}
    for (_, finished), chance in states.items():
        texts = tuple(text for text, _ in finished)
        distribution[texts] = distribution.get(texts, 0.0) + chance
    return distribution


def drawings(weights, count, independent):
    """Yield all ways to draw up to `count` entries by weight, in order, with their chances."""

    def draw(drawn, left, chance):
        total = left.sum()
        if len(drawn) == count or not total > 1e-300:
            yield drawn, chance
            return
        for entry in np.flatnonzero(left):
            rest = left
            if not independent:
                rest = left.copy()
                rest[entry] = 0.0
            yield from draw((*drawn, int(entry)), rest, chance * left[entry] / total)

    yield from draw((), np.asarray(weights, dtype=float), 1.0)


def drawn_texts(options, count, independent):
    """Yield all ways to draw texts, given with their scores, in order, with their chances."""
    totals = np.array([total for _, total in options])
    probs = np.exp(totals - totals.max(initial=-np.inf))
    for drawn, chance in drawings(probs / probs.sum() if len(probs) else probs, count, independent):
        yield [options[entry] for entry in drawn], chance


def table_rows(model, prompt: Sequence[int]) -> Rows:
    """Return a tabular model's log-probabilities."""

    def rows(text):
        return model.logits_after([*prompt, *text]).log_softmax(-1).numpy()

    return rows
