"""Beams whose width changes, and beams with one cache: every step draws from the beam distribution, given all that came before.

The distribution of their whole texts is no known one: widths depend on the drafts, and one cache goes on with one beam. But
what a step draws must depend on the beams it continues and on its width alone, and on nothing else that has happened.
"""

from collections import defaultdict

import pytest

from polydraft.beam import _sample as sample
from polydraft.beam._sample import Chance, SampleRun

from .enumeration import enumerate_outcomes, total_variation
from .reference import drawn_texts
from .test_runs import PROMPT, finish, pair, parts

Texts = tuple[tuple[int, ...], ...]
Step = tuple[Texts, Texts]
"""The beams that a step continues, and what it draws, in order."""


class Noted(SampleRun):
    """Note every step."""

    def __init__(self, request, chance) -> None:
        self.steps: list[Step] = []
        self.kept: list[tuple[Texts, Texts]] = []
        """With one cache: beams at the end of each round, before and after all but one are left."""
        super().__init__(request, chance)

    def _close(self, drawn) -> None:
        self.steps.append((texts_of(self.beams), texts_of(drawn)))
        super()._close(drawn)

    def _keep_one_cache(self) -> None:
        before = texts_of(self.beams)
        super()._keep_one_cache()
        self.kept.append((before, texts_of(self.beams)))


def texts_of(beams) -> Texts:
    return tuple(tuple(beam.node.tokens()) for beam in beams)


CASES = {
    "iid": dict(steps=2, draws="iid", beams=1, draft_width=2, draft_depth=1, width_threshold=0.5),
    "iid, no narrower than two": dict(
        steps=2, draws="iid", beams=1, draft_width=2, draft_depth=1, width_threshold=1.0, min_width=2
    ),
    "distinct": dict(steps=2, draws="distinct", beams=1, draft_width=2, draft_depth=1, width_threshold=0.6),
    "distinct, wide": dict(steps=2, draws="distinct", beams=2, draft_width=3, draft_depth=1, width_threshold=0.9),
    "one cache": dict(steps=3, draws="distinct", beams=2, draft_width=3, draft_depth=1, one_cache=True),
    # Second layers have orphans, and so widths that depend on what became of the first.
    "two layers": dict(steps=3, draws="distinct", beams=1, draft_width=2, draft_depth=2, width_threshold=0.6),
    "one cache, iid": dict(steps=2, draws="iid", beams=2, draft_width=3, draft_depth=1, one_cache=True),
}
LONG = ("two layers", "one cache, iid")


def step_errors(case: str, vocabulary: int = 2, share: float = 0.5) -> tuple[float, set[int]]:
    """Return how far any step is from the beam distribution (total variation, given its past and width), and the widths."""
    target, draft = pair(vocabulary, share=share)
    options = dict(CASES[case])
    kept = parts(target, draft, options.pop("steps"), verification="layers", **options)

    def program(chance: Chance):
        run = Noted(kept, chance)
        finish(run)
        for before, after in run.kept:
            if kept.options.one_cache and before:
                assert len(after) == 1 and log_prob(target, after[0]) >= max(log_prob(target, text) for text in before) - 1e-6
        return tuple(run.steps)

    distribution = enumerate_outcomes(program)
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-9)
    # Of all runs with the same past, the same beams and the same width: what the next step drew.
    drawn: dict[tuple[tuple[Step, ...], Texts, int], dict[Texts, float]] = defaultdict(lambda: defaultdict(float))
    for steps, chance in distribution.items():
        for number, (beams, got) in enumerate(steps):
            drawn[steps[:number], beams, len(got)][got] += chance
    worst = 0.0
    for (_, beams, width), got in drawn.items():
        total = sum(got.values())
        expected = beam_distribution(target, beams, width, kept.options.draws == "iid")
        worst = max(worst, total * total_variation({texts: chance / total for texts, chance in got.items()}, expected))
    return worst, {width for _, _, width in drawn}


def log_prob(target, text: tuple[int, ...]) -> float:
    return sum(float(target.logits_after([*PROMPT, *text[:place]]).log_softmax(-1)[token]) for place, token in enumerate(text))


def beam_distribution(target, beams: Texts, width: int, independent: bool) -> dict[Texts, float]:
    """Return the distribution of `width` draws from all continuations of some beams, in order."""
    options = [
        ((*text, token), log_prob(target, text) + float(score))
        for text in beams
        for token, score in enumerate(target.logits_after([*PROMPT, *text]).log_softmax(-1))
    ]
    distribution: dict[Texts, float] = defaultdict(float)
    for drawn, share in drawn_texts(options, width, independent):
        distribution[tuple(text for text, _ in drawn)] += share
    return distribution


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in LONG else []) for case in CASES])
def test_every_step_draws_from_the_beam_distribution(case: str) -> None:
    worst, widths = step_errors(case)
    assert worst < 1e-6  # the engine's log-softmax is in single precision
    assert len(widths) > 1 or "one cache" in case, "widths must change to prove anything"


@pytest.mark.parametrize("case", ["iid", "distinct"])
def test_a_width_that_looks_at_the_drafts_shows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on wider where the draft drew some token prefers that token."""
    right = sample.verify_layer

    def wrong(target_probs_U, draft_probs_U, drafts, width, chance, *, distinct):
        return right(target_probs_U, draft_probs_U, drafts, 1 + (drafts[0] % 2), chance, distinct=distinct)

    monkeypatch.setattr(sample, "verify_layer", wrong)
    worst, _ = step_errors(case)
    assert worst > 1e-2
