"""Stop strings with every way to draft: texts end before them, nothing of them streams, the distribution is the target's."""

from collections import defaultdict

import pytest

from covering import some_slow
from polydraft.engine import StopReason
from polydraft.engine.stream import Stream
from polydraft.sampling import SamplingParams

from .checks import FALSE_ALARM
from .small_texts import NEW_TOKENS, PROMPT, Words, distribution_p_value, small_decoder, text_distribution

WORDS = Words("a", "ba", "c")
STRINGS = ["ab", "cc"]
"""The first begins and ends inside of tokens, and both span two."""
DRAFTERS = ["none", "model", "dynamic", "lookup", "corpus", "self-draft", "lookup+model"]
KINDS = {"plain": SamplingParams(), "penalised": SamplingParams(top_k=2, repetition_penalty=1.6)}


def found(tokens: tuple[int, ...]) -> bool:
    return any(string in WORDS.decode(tokens) for string in STRINGS)


def kept(text: str) -> str:
    return text[: min((text.index(string) for string in STRINGS if string in text), default=None)]


def stream(drafter: str, params: SamplingParams, samples: int) -> Stream:
    options = {"sampling": params, "max_new_tokens": NEW_TOKENS, "seed": 5, "stop": STRINGS}
    return small_decoder(drafter, WORDS).stream([PROMPT] * samples, **options)


CASES = [(drafter, "plain") for drafter in DRAFTERS] + [("model", "penalised"), ("lookup+model", "penalised")]


SLOW = [("self-draft", "plain"), ("lookup+model", "plain"), ("model", "penalised"), ("corpus", "plain")]
"""Of n-grams, of unions and of what is penalised, one is tried by default."""


@pytest.mark.parametrize(("drafter", "kind"), some_slow(CASES, SLOW))
def test_texts_end_before_the_string_and_follow_the_target_distribution(drafter: str, kind: str) -> None:
    events, streamed, reasons = stream(drafter, KINDS[kind], 500), defaultdict(list), []
    for event in events:
        streamed[event.row].append(event)
    results, inside = events.results(), 0
    for row, result in enumerate(results):
        whole = WORDS.decode(result.token_ids)
        assert result.text == kept(whole) and not found(tuple(result.token_ids[:-1])), "nothing comes after the string"
        assert result.stop_reason == (StopReason.STOP if found(tuple(result.token_ids)) else StopReason.LENGTH)
        assert [event.token_id for event in streamed[row]] == result.token_ids
        pieces = [event.text for event in streamed[row]]
        for count in range(len(pieces) + 1):
            assert result.text.startswith("".join(pieces[:count])), "a part of the string was streamed"
        assert "".join(pieces) == result.text
        reasons.append(result.stop_reason)
        inside += result.stop_reason == StopReason.STOP and result.sources[-1] != "target"
    assert distribution_p_value(results, text_distribution(KINDS[kind], found)) > FALSE_ALARM / len(CASES)
    assert set(reasons) == {StopReason.STOP, StopReason.LENGTH}
    assert (inside > 20) == (drafter != "none"), "strings must end inside of blocks, too"


def test_a_text_that_goes_on_after_the_string_shows() -> None:
    """Texts that end only where they would without stop strings are refused."""
    results = small_decoder("model").generate([PROMPT] * 300, max_new_tokens=NEW_TOKENS, seed=5)
    assert distribution_p_value(results, text_distribution(KINDS["plain"], found)) == 0
    assert distribution_p_value(results, text_distribution(KINDS["plain"])) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_many_texts_with_stop_strings_follow_the_target_distribution(drafter: str) -> None:
    events = stream(drafter, KINDS["penalised"], 4000)
    list(events)
    assert distribution_p_value(events.results(), text_distribution(KINDS["penalised"], found)) > FALSE_ALARM / len(DRAFTERS)
