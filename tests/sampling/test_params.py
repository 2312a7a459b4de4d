"""Bad sampling parameters are refused in one line that names parameter, value and what is allowed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from polydraft.errors import PolydraftError, UsageError
from polydraft.sampling import SamplingParams, Warper, check_draft_temperature

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", True),
    ("top_k", "5"),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -0.5),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: 1e39}),
    ("logit_bias", {3: -1e39}),
    ("logit_bias", {3: "much"}),
    ("logit_bias", {"3": 1.0}),
    ("logit_bias", [1.0]),
    ("logit_bias", None),
    ("processors", (5,)),
    ("processors", abs),
    ("processors", None),
    ("temperature", 1e39),
    ("temperature", 5e-324),
    ("presence_penalty", 1e39),
    ("repetition_penalty", 1e-300),
]
BAD_TYPES = [("temperature", "hot"), ("temperature", None), ("top_p", "0.9"), ("min_p", None), ("repetition_penalty", [1.2])]


def refusal(name, value):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    return str(caught.value)


@pytest.mark.parametrize(("name", "value"), [*BAD, *BAD_TYPES], ids=str)
def test_a_bad_value_is_named(name, value):
    message = refusal(name, value)
    assert message.startswith(f"{name}={value!r}")
    assert "\n" not in message and ("allowed" in message or "use" in message)


@pytest.mark.parametrize("name", ["temperature", "top_k", "presence_penalty", "repetition_penalty", "logit_bias"])
def test_numbers_larger_than_any_float_are_refused_in_few_words(name):
    for value in (10**400, 10**9999):  # Python does not even write the second one out
        message = refusal(name, {3: value} if name == "logit_bias" else value)
        assert "a number of" in message and "is out of range" in message and len(message) < 200


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: 3e38}, "temperature": 0.1},
        {"logit_bias": {3: 1e38}, "repetition_penalty": 0.1},
        {"frequency_penalty": -1e34},
        {"temperature": 1e-30, "presence_penalty": -1e10},
    ],
    ids=str,
)
def test_numbers_that_together_leave_no_distribution_are_refused(options):
    with pytest.raises(UsageError, match="makes logits larger than"):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-30},
        {"temperature": 1e-30, "logit_bias": {3: -3.4e38}},
        {"logit_bias": {3: 3e38}},
        {"temperature": 0, "presence_penalty": -3e38},
        {"presence_penalty": 3e38, "temperature": 0.1},
        {"repetition_penalty": 1e-20},
        {"repetition_penalty": 1e30},
    ],
    ids=str,
)
def test_extreme_numbers_that_are_allowed_leave_a_distribution(options):
    distribution = Warper(SamplingParams(**options), 6, [[3, 4]], torch.device("cpu"))
    distribution.advance([[3, 5]])
    logits_BGV = torch.tensor([[[-100.0, 0.0, 40.0, 90.0, 2.0, 1.0]]])
    probs_BGV = distribution.probs(logits_BGV, torch.full((1, 1, 1), 3))
    assert probs_BGV.isfinite().all() and abs(float(probs_BGV.sum()) - 1) < 1e-6


@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan, 5e-324, "warm", True, 10**400], ids=lambda value: str(value)[:9])
def test_temperatures_that_no_draft_can_have_are_refused(value):
    with pytest.raises(UsageError, match=r"draft_temperature=.* is out of range; allowed: 0"):
        check_draft_temperature(value)
    for value in (None, 0, 0.5, 1e-30):
        check_draft_temperature(value)


def test_processors_may_come_in_any_sequence():
    processor = NoRepeatNGramLogitsProcessor(2)
    for given in ([processor], LogitsProcessorList([processor]), (processor,)):
        assert SamplingParams(processors=given).processors == (processor,)
    assert SamplingParams(top_k=np.int64(3)).top_k == 3


def test_refusals_are_value_errors_too():
    with pytest.raises(ValueError):
        SamplingParams(temperature=-1)
    with pytest.raises(PolydraftError):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 100.0), ("top_k", 0), ("top_p", 1), ("top_p", 1e-6), ("min_p", 0), ("min_p", 1)],
)
def test_the_ends_of_the_ranges_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_only_what_looks_back_needs_history():
    assert not SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, logit_bias={1: 2.0}).needs_history
    for name, value in [("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)]:
        assert SamplingParams(**{name: value}).needs_history
    assert SamplingParams(processors=(lambda input_ids, scores: scores,)).needs_history


def test_parameters_are_named_and_frozen():
    with pytest.raises(TypeError):
        SamplingParams(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0


class UnhashableProcessor:
    __hash__ = None

    def __call__(self, input_ids, scores):
        return scores

    def __eq__(self, other):
        return isinstance(other, UnhashableProcessor)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5, "logit_bias": {3: -1.0}}, {"processors": (UnhashableProcessor(),)}]
)
def test_equal_params_are_one_key(options):
    params, same, other = SamplingParams(**options), SamplingParams(**options), SamplingParams(**options, min_p=0.1)
    assert hash(params) == hash(same) and hash(params) != hash(other)
    assert {params: "found"}[same] == "found" and other not in {params}


def test_params_that_differ_in_their_bias_are_two_keys():
    assert len({SamplingParams(logit_bias={1: 1.0}), SamplingParams(logit_bias={1: 2.0}), SamplingParams()}) == 3
