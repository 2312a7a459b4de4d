"""What a corpus proposes changes nothing: every text of four tokens comes as often as the target alone would write it."""

import pytest

from covering import some_slow
from polydraft.sampling import SamplingParams

from .checks import FALSE_ALARM
from .small_texts import NEW_TOKENS, PROMPT, distribution_p_value, small_decoder, text_distribution

KINDS = {
    "plain": SamplingParams(),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.6, frequency_penalty=0.4),
    "truncated": SamplingParams(top_k=2, temperature=1.4),
}


def generated(drafter: str, params: SamplingParams, samples: int):
    options = {"sampling": params, "max_new_tokens": NEW_TOKENS, "seed": 11}
    return small_decoder(drafter).generate([PROMPT] * samples, **options)


# The distribution without anything added is that of `test_end_to_end`; a penalty looks at the whole text.
@pytest.mark.parametrize("kind", some_slow(KINDS, ["plain", "truncated"]))
def test_texts_from_a_corpus_follow_the_target_distribution(kind: str) -> None:
    results = generated("corpus", KINDS[kind], 800)
    assert distribution_p_value(results, text_distribution(KINDS[kind])) > FALSE_ALARM / len(KINDS)
    # Where nothing or everything is accepted, the test would prove nothing.
    stats = results[0].stats
    assert 0.15 < stats.acceptance_rate < 0.95 and stats.tokens_by_source["corpus"] > 0.2 * stats.new_tokens


def test_a_distribution_that_is_another_shows() -> None:
    """Texts without the penalty, and texts a little too warm, are refused: as few as these suffice to see it."""
    results, warm = (generated("corpus", params, 800) for params in (KINDS["plain"], SamplingParams(temperature=1.3)))
    assert distribution_p_value(results, text_distribution(KINDS["penalised"])) < 1e-12
    assert distribution_p_value(warm, text_distribution(KINDS["plain"])) < FALSE_ALARM / len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["corpus", "corpus+suffix", "corpus+model"])
def test_many_texts_from_n_grams_follow_the_target_distribution(drafter: str, kind: str) -> None:
    results = generated(drafter, KINDS[kind], 4000)
    assert distribution_p_value(results, text_distribution(KINDS[kind])) > FALSE_ALARM / 9
