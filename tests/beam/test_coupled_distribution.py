"""Distinct beams by shared noise, as whole runs: drawn often enough, finished texts come as beam sampling's definition says."""

from dataclasses import replace

import pytest
import torch

from covering import keeping
from polydraft.beam._search import CoupledRun, SharedNoise
from polydraft.certify.chi_square import detectable_distance

from .reference import beam_sampling_distribution, table_rows
from .test_runs import FALSE_ALARM, PROMPT, pair, parts, sampled_p_value
from .test_stops import Words

WORDS, STRINGS = ("a", "ba", "c"), ("ab", "c")


def stops(text: tuple[int, ...]) -> bool:
    return any(string in "".join(WORDS[token] for token in text) for string in STRINGS)


CASES = {
    "distinct": dict(draws="distinct", ends=()),
    "an end of text": dict(draws="distinct", ends=(2,)),
    "as Hugging Face": dict(draws="hf", ends=()),
    "stop strings": dict(draws="distinct", ends=(), stops=stops),
}


def p_value(case: str, samples: int, with_draft: bool = True) -> tuple[float, int]:
    """Draw runs of three tokens and two steps; return the p-value of their texts, and how many outcomes there are."""
    options = dict(CASES[case])
    target, draft = pair(3, seed=5)
    found = options.pop("stops", lambda text: False)
    ends, draws = options["ends"], options["draws"]
    distribution = beam_sampling_distribution(table_rows(target, PROMPT), width=2, steps=2, draws=draws, ends=ends, stops=found)
    kept = parts(target, draft if with_draft else None, 2, ends, draws=draws, beams=2, draft_width=4, draft_depth=1)

    def make_run(generator: torch.Generator) -> CoupledRun:
        words = {"stops": Words(*WORDS).stops(*STRINGS)} if found is stops else {}
        return CoupledRun(replace(kept, **words), generator)

    return sampled_p_value(make_run, distribution, samples), len(distribution)


# That stop strings end texts as a token does, and change nothing else, is in test_stops.
@pytest.mark.parametrize("case", keeping(["distinct", "stop strings"], "distinct"))
def test_finished_texts_follow_the_distribution_of_beam_sampling(case: str) -> None:
    value, outcomes = p_value(case, 300)
    assert value > FALSE_ALARM / len(CASES) and outcomes > 5


def test_noise_that_is_too_small_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams as of a temperature of 0.5: so few runs suffice to see it."""
    right = SharedNoise.perturbed

    def colder(noise: SharedNoise, continuations, beams):
        totals_X = continuations.totals(beams)
        return totals_X + 0.5 * (right(noise, continuations, beams) - totals_X)

    monkeypatch.setattr(SharedNoise, "perturbed", colder)
    assert p_value("distinct", 300, with_draft=False)[0] < FALSE_ALARM / len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_runs_follow_the_distribution_of_beam_sampling(case: str) -> None:
    samples = 7000
    value, outcomes = p_value(case, samples)
    assert value > FALSE_ALARM / len(CASES)
    assert detectable_distance(samples, outcomes - 1, FALSE_ALARM / len(CASES)) < 0.06
