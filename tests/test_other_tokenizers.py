"""Loading drafts with other tokenizers, from folders."""

from typing import Any

import pytest

import polydraft
from polydraft.models.translation import TranslatedModel
from polydraft.sampling import SamplingParams


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_under_other_numbers_is_always_right(
    tiny: str, renumbered: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="polydraft.models.loading"):
        decoder = polydraft.load(tiny, draft=renumbered, tree="chain:3", device="cpu", dtype="float32")
    assert "it shares 100 % of the target's tokens (257 of 257)" in caplog.text
    options: Any = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 40, "seed": 5}
    prompts = ["hello\nyou", "naïve", "x"]
    results = decoder.generate(prompts, **options)
    assert results[0].stats.acceptance_rate > 0.95 and results[0].stats.tokens_per_pass > 3
    if temperature == 0:
        plain = polydraft.load(tiny, draft="none", device="cpu", dtype="float32").generate(prompts, **options)
        assert [one.token_ids for one in results] == [one.token_ids for one in plain]


def test_a_few_more_tokens_change_nothing(tiny: str, other_vocabulary: str) -> None:
    decoder = polydraft.load(other_vocabulary, draft=tiny, tree="2x1", device="cpu", dtype="float32")
    assert not isinstance(decoder.drafter.model, TranslatedModel)
    plain = polydraft.load(other_vocabulary, draft="none", device="cpu", dtype="float32")
    texts = [
        one.generate("hello", sampling=SamplingParams(temperature=0), max_new_tokens=12).token_ids for one in (decoder, plain)
    ]
    assert texts[0] == texts[1]
