"""Bad sampling parameters are refused in one line that names parameter, value and what is allowed."""

import dataclasses
import math

import pytest

from polydraft.errors import PolydraftError, UsageError
from polydraft.sampling import SamplingParams

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
