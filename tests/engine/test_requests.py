"""What a call may ask for: wrong values are one line that names them, and nothing is guessed."""

import math
import threading

import numpy as np
import pytest
import torch

from polydraft import BeamDecoder, SamplingParams
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.engine.warm_up import lengths_of
from polydraft.errors import FailureError, UsageError
from polydraft.models.tabular import TabularModel
from polydraft.trees import Topology

SIZE = 5
TARGET, DRAFT = TabularModel.random(SIZE, 1, seed=0), TabularModel.random(SIZE, 1, seed=1)
DECODERS = {"plain": Decoder(TARGET), "drafted": Decoder(TARGET, TreeDrafter(DRAFT, Topology.fork(2, 2)))}
BEAMS = BeamDecoder(DECODERS["drafted"])
CALLS = {
    **{name: decoder.generate for name, decoder in DECODERS.items()},
    "beam search": lambda prompts, **options: BEAMS.search(prompts, beams=2, **options),
    "beam sampling": lambda prompts, **options: BEAMS.sample(prompts, beams=2, **options),
}

PROMPTS = {
    "fractions": ([1.5, 2.5], "holds 1.5, which is not a token id"),
    "fractions in a list": ([[1.9, 2.9]], "holds 1.9, which is not a token id"),
    "fractions in an array": (np.array([1.0, 2.0]), "holds 1.0, which is not a token id"),
    "fractions in a tensor": (torch.tensor([[1.0, 2.0]]), "holds 1.0, which is not a token id"),
    "a list among tokens": ([1, [2]], r"holds \[2\], which is not a token id"),
    "a token among lists": ([[1], 2], "prompt 2 of type int"),
    "bytes": (b"Hi", "prompt b'Hi' of type bytes; decode it first"),
    "bytes in a list": ([b"Hi"], "prompt b'Hi' of type bytes"),
    "truths": ([True, False], "holds True, which is not a token id"),
    "nothing": (None, "prompt None of type NoneType; allowed: text, token ids"),
    "a number": (3, "prompt 3 of type int"),
    "a set": ({1, 2}, "of type set"),
    "a dict": ({"input_ids": [1, 2]}, "of type dict"),
    "no prompts": ([], "no prompt given"),
    "a prompt without tokens": ([[]], "empty prompt"),
}
OPTIONS = {
    "parameters in a dict": ({"sampling": {}}, r"sampling=\{\} of type dict; allowed: SamplingParams"),
    "a truth to cancel by": ({"cancel": True}, "cancel=True; allowed: a threading.Event"),
    "half a token": ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 is out of range"),
    "endless": ({"max_new_tokens": 10**400}, "is out of range; allowed: whole numbers from 1 to 1000000000"),
    "a fraction as a seed": ({"seed": np.float64(1.0)}, "is not a whole number"),
    "bytes as seeds": ({"seed": b"1"}, "seed=b'1' is not a whole number"),
    "a word for a truth": ({"chat": "no"}, "chat='no'; allowed: True, False"),
}


def refusal(call: str, prompts, **options) -> str:
    with pytest.raises(UsageError) as caught:
        CALLS[call](prompts, **{"max_new_tokens": 2, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", PROMPTS)
def test_what_is_no_prompt_is_named(call: str, case: str) -> None:
    prompts, expected = PROMPTS[case]
    with pytest.raises(UsageError, match=expected):
        CALLS[call](prompts, max_new_tokens=2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", OPTIONS)
def test_what_is_no_option_is_named(call: str, case: str) -> None:
    options, expected = OPTIONS[case]
    with pytest.raises(UsageError, match=expected):
        CALLS[call]([1, 2], **{"max_new_tokens": 2, **options})


@pytest.mark.parametrize("call", CALLS)
def test_messages_are_one_line_whatever_the_value(call: str) -> None:
    assert len(refusal(call, np.zeros((9, 999)))) < 200
    assert len(refusal(call, [1, 2], sampling=np.zeros((9, 999)))) < 300


def token_ids(found) -> list:
    """Token ids of a result, or of each of several."""
    if isinstance(found, list):
        return [token_ids(one) for one in found]
    return found.best.token_ids if hasattr(found, "best") else found.token_ids


@pytest.mark.parametrize("call", CALLS)
def test_numbers_of_numpy_and_torch_are_welcome(call: str) -> None:
    expected = token_ids(CALLS[call]([1, 2], max_new_tokens=3, seed=7))
    for prompt in ((1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)]):
        found = CALLS[call](prompt, max_new_tokens=np.int64(3), seed=np.int64(7))
        assert token_ids(found) == expected
        assert type(found.settings["max_new_tokens"]) is int
    for prompts in ([[1, 2]], np.array([[1, 2]]), torch.tensor([[1, 2]]), [np.array([1, 2])], [torch.tensor([1, 2])]):
        for seed in ([7], [np.int64(7)], np.array([7])):
            assert token_ids(CALLS[call](prompts, max_new_tokens=3, seed=seed)) == [expected]
    assert CALLS[call]([1, 2], max_new_tokens=3, seed=7, cancel=threading.Event()) is not None


@pytest.mark.parametrize("call", CALLS)
def test_each_prompt_may_have_a_seed_of_its_own(call: str) -> None:
    alone = [token_ids(CALLS[call]([1, 2], max_new_tokens=6, seed=seed)) for seed in (3, 4)]
    assert token_ids(CALLS[call]([[1, 2], [1, 2]], max_new_tokens=6, seed=[3, 4])) == alone
    assert "3 seeds for 2 prompts" in refusal(call, [[1, 2], [1, 2]], seed=[1, 2, 3])


def distributions_of(call: str) -> list[float]:
    return [1.0] if call == "beam sampling" else [0.0] if call == "beam search" else [0.0, 1.0]


@pytest.mark.parametrize("call", CALLS)
def test_banning_every_token_is_not_the_targets_fault(call: str) -> None:
    for temperature in distributions_of(call):
        distribution = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(SIZE), -math.inf))
        assert "logit_bias bans all 5 tokens" in refusal(call, [1, 2], sampling=distribution)


def ban_all_after_two(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - math.inf if input_ids.shape[1] >= 4 else scores


@pytest.mark.parametrize("spoil", [ban_all_after_two, lambda input_ids, scores: scores * math.nan], ids=["ban", "nan"])
@pytest.mark.parametrize("call", CALLS)
def test_a_processor_that_leaves_nothing_is_named(call: str, spoil) -> None:
    for temperature in distributions_of(call):
        distribution = SamplingParams(temperature=temperature, processors=(spoil,))
        with pytest.raises(FailureError, match=f"logits processor '{spoil.__name__}' left no") as caught:
            CALLS[call]([1, 2], max_new_tokens=6, sampling=distribution, seed=1)
        assert "float32" not in str(caught.value)


def test_logits_of_the_target_are_still_blamed_on_the_target() -> None:
    broken = TabularModel(torch.full((SIZE, SIZE), math.nan))
    for distribution in (SamplingParams(), SamplingParams(temperature=0, processors=(ban_all_after_two,))):
        with pytest.raises(FailureError, match="returned logits that are not numbers"):
            Decoder(broken).generate([1, 2], max_new_tokens=3, sampling=distribution)


def test_penalties_on_length_are_bounded() -> None:
    for penalty in (10**400, 1e5, -51, math.nan):
        assert "is out of range; allowed: -50 to 50" in refusal("beam search", [1, 2], length_penalty=penalty)
    assert BEAMS.search([1, 2], beams=2, max_new_tokens=3, length_penalty=50).best is not None


def test_warming_up_leaves_later_texts_as_they_are():
    decoder = DECODERS["drafted"]
    sampling, prompt = SamplingParams(temperature=1.0), [1, 2, 3]
    before = decoder.generate(prompt, sampling=sampling, max_new_tokens=8, seed=3)
    assert decoder.warm_up(sampling=sampling, batch_size=2, longest=40) > 0 and lengths_of(40, torch.device("cpu")) == [39]
    after = decoder.generate(prompt, sampling=sampling, max_new_tokens=8, seed=3)
    assert after.token_ids == before.token_ids
    assert 0 < after.stats.first_token_seconds <= after.stats.total_seconds
    with pytest.raises(UsageError, match="batch_size=0"):
        decoder.warm_up(batch_size=0)
