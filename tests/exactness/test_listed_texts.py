"""Processors that look texts up in a list, as `prefix_allowed_tokens_fn` does: they are asked about beginnings of its texts
alone, never about what follows an end, and texts have the distribution that they have without drafts."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from covering import keeping
from polydraft.certify.reference import next_distributions
from polydraft.engine import StopReason
from polydraft.errors import FailureError
from polydraft.sampling import SamplingParams

from .checks import FALSE_ALARM
from .configurations import SCHEMES_AND_WALKS
from .setups import tree_for
from .small_texts import NEW_TOKENS, PROMPT, TARGET, Listed, Words, distribution_p_value, small_decoder

DRAFTERS = ["none", "model", "dynamic", "lookup", "corpus", "self-draft", "lookup+model"]


@dataclass(frozen=True)
class Ending:
    """A list of texts, and what ends them."""

    listed: Listed
    reasons: frozenset[StopReason]
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def ending(*texts: str, reasons: set[StopReason], **options: tuple) -> Ending:
    return Ending(Listed(tuple(tuple(map(int, text)) for text in texts)), frozenset(reasons), **options)


ENDINGS = {
    "end token": ending("2", "02", "012", "0112", "0012", "1102", "102", reasons={StopReason.EOS}, eos_token_ids=(2,)),
    "two end tokens": ending("1", "02", "001", "0002", "0001", reasons={StopReason.EOS}, eos_token_ids=(1, 2)),
    "limit": ending("0120", "0121", "0221", "1010", "1020", "2212", "2000", reasons={StopReason.LENGTH}),
    "stop string": ending("01", "21", "121", "1101", "0021", "201", reasons={StopReason.STOP}, stop=("ab", "cb")),
    "some of each": ending(
        "2", "001", "0001", "0000", "112", "1101", "1110", eos_token_ids=(2,), stop=("aab",),
        reasons={StopReason.EOS, StopReason.LENGTH, StopReason.STOP},
    ),
}  # fmt: skip


def generated(name: str, count: int, sampling: SamplingParams | list[SamplingParams], **options: str) -> list:
    case = ENDINGS[name]
    decoder = small_decoder(options.pop("drafter", "model"), Words(*"abc"), case.eos_token_ids, **options)
    asked = {"max_new_tokens": NEW_TOKENS, "stop": case.stop, "seed": 3}
    return decoder.generate([PROMPT] * count, sampling=sampling, **asked)


CASES = [(drafter, name) for drafter in DRAFTERS for name in ENDINGS]
QUICK = [("model", name) for name in ENDINGS] + [("dynamic", "some of each"), ("lookup", "end token")]
WITH_EACH_WALK = [("rrs-wor", "node"), ("naive", "node"), ("speculative", "block"), ("hybrid", "block")]
TESTS = len(CASES) + len(SCHEMES_AND_WALKS)


def check(results: list, case: Ending, drafter: str = "model") -> None:
    assert distribution_p_value(results, case.listed.distribution()) > FALSE_ALARM / TESTS
    assert {result.stop_reason for result in results} == case.reasons
    inside = sum(result.sources[-1] != "target" for result in results)
    assert (inside > 10) == (drafter != "none"), "ends must fall inside of blocks, too"


@pytest.mark.parametrize(("drafter", "name"), keeping(CASES, *QUICK))
def test_texts_end_where_the_list_does_and_follow_the_target_distribution(drafter: str, name: str) -> None:
    case = ENDINGS[name]
    check(generated(name, 200, SamplingParams(processors=(case.listed,)), drafter=drafter), case, drafter)


# Ends are the walk's to know, not the scheme's: two schemes for each walk are enough by default.
@pytest.mark.parametrize(("scheme", "walk"), keeping(SCHEMES_AND_WALKS, *WITH_EACH_WALK))
def test_every_walk_knows_ends(scheme: str, walk: str) -> None:
    assert {name for _, name in WITH_EACH_WALK} == {name for _, name in SCHEMES_AND_WALKS}
    # Deeper than any text is long: most of the tree lies behind ends.
    case, tree = ENDINGS["some of each"], tree_for(scheme, "2x1x1x1x1x1")
    sampling = SamplingParams(processors=(case.listed,))
    check(generated("some of each", 200, sampling, scheme=scheme, walk=walk, tree=tree), case)


@pytest.mark.parametrize("name", ENDINGS)
def test_at_temperature_0_the_likeliest_of_the_list_comes_out(name: str) -> None:
    case = ENDINGS[name]
    greedy, drawn = (SamplingParams(temperature=temperature, processors=(case.listed,)) for temperature in (0.0, 1.0))
    expected: tuple[int, ...] = ()
    while expected not in case.listed.texts:
        distribution_V = next_distributions(TARGET, PROMPT, np.array(expected, dtype=int)[None], SamplingParams())[0]
        expected += (max(case.listed.allowed(expected), key=lambda token: distribution_V[token]),)
    for sampling in ([greedy], [greedy, drawn, drawn, drawn]):
        assert tuple(generated(name, len(sampling), sampling)[0].token_ids) == expected


@pytest.mark.parametrize("drafter", ["model", "lookup", "lookup+model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_host_may_not_look_processors_are_asked_no_more(hide_values, drafter: str, temperature: float) -> None:
    # There the distributions of all nodes are computed at once, of those as well that the processor itself has ruled out.
    hide_values()
    case = ENDINGS["some of each"]
    sampling = SamplingParams(temperature=temperature, processors=(case.listed,))
    results = generated("some of each", 200 if temperature else 3, sampling, drafter=drafter)
    assert {tuple(result.token_ids) for result in results} <= {*case.listed.texts}
    if temperature:
        check(results, case, drafter)


def test_what_a_processor_raises_about_a_text_that_came_out_is_raised() -> None:
    def short(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPT) + 2:
            raise LookupError("too long")
        return scores

    for drafter in ("none", "model"):
        for temperature in (0.0, 1.0):
            with pytest.raises(LookupError, match="too long"):
                small_decoder(drafter).generate(
                    PROMPT, sampling=SamplingParams(temperature=temperature, processors=(short,)), max_new_tokens=4, seed=0
                )
            sampling = SamplingParams(temperature=temperature, processors=(short,))
            assert len(small_decoder(drafter).generate(PROMPT, sampling=sampling, max_new_tokens=3, seed=0).token_ids) == 3


def test_who_leaves_no_token_is_named() -> None:
    def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(FailureError, match="'nothing' left no token"):
        small_decoder("model").generate(PROMPT, sampling=SamplingParams(processors=(nothing,)), max_new_tokens=4)
