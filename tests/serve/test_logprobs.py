"""Log-probabilities are the target's own, and tokens have their true texts and bytes."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from polydraft.serve.token_texts import TokenTexts

MESSAGES = [{"role": "user", "content": "Hello there"}]
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_log_probabilities_are_the_targets(shared, speculative):
    answer = shared.client.chat.completions.create(
        model=shared.service.model, messages=MESSAGES, max_tokens=12, temperature=0.5, seed=4, logprobs=True, top_logprobs=3,
        extra_body={"speculative": speculative},
    )  # fmt: skip
    decoder = shared.service.decoder
    tokenizer, text = decoder.tokenizer, decoder.encode("Hello there", chat=True)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for told in content:
        distribution_V = torch.log_softmax(decoder.target.plain(torch.tensor([text]))[0, -1], -1)
        best = distribution_V.topk(3)
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        token = next(
            one
            for one in range(len(distribution_V))
            if tokenizer.decode([one]) == told.token and abs(distribution_V[one] - told.logprob) < 1e-4
        )
        byte = BYTES.get(tokenizer.convert_ids_to_tokens(token))  # one token per byte, but for the end of the text
        assert told.bytes == [byte] or token == tokenizer.eos_token_id
        text.append(token)


def test_log_probabilities_of_completions(shared):
    answer = shared.client.completions.create(model=shared.service.model, prompt="Once", max_tokens=6, seed=4, logprobs=2)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 6
    assert all(
        len(top) <= 2 and -math.inf < value <= 0 for top, value in zip(told.top_logprobs, told.token_logprobs, strict=True)
    )


def test_of_tokens_with_equal_text_the_likeliest_is_told(shared):
    # One token a byte: those of parts of characters all decode to the replacement character.
    decoder, tokenizer = shared.service.decoder, shared.service.decoder.tokenizer
    answer = shared.client.completions.create(model=shared.service.model, prompt="Once", max_tokens=1, seed=4, logprobs=20)
    distribution_V = torch.log_softmax(decoder.target.plain(torch.tensor([decoder.encode("Once")]))[0, -1], -1)
    expected: dict[str, list[float]] = {}
    for token in distribution_V.topk(20).indices.tolist():
        expected.setdefault(tokenizer.decode([token]), []).append(float(distribution_V[token]))
    assert max(map(len, expected.values())) > 3
    (told,) = answer.choices[0].logprobs.top_logprobs
    assert told == pytest.approx({text: max(values) for text, values in expected.items()}, abs=1e-4)
    assert list(told.values()) == sorted(told.values(), reverse=True)


def test_tokens_with_and_without_a_space_are_told_apart():
    pieces = ["<s>", "</s>", "a", "\u2581the", "the", "\u2581", "<0xE2>", "<0x0A>"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))
    told = [texts(number) for number in range(len(pieces))]
    assert [text for text, _ in told] == ["<s>", "</s>", "a", " the", "the", " ", "\ufffd", "\n"]
    assert [bytes(found) for _, found in told] == [b"<s>", b"</s>", b"a", b" the", b"the", b" ", b"\xe2", b"\n"]
