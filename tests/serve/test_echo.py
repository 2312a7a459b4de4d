"""`echo`: completions that begin with their prompts, whose log-probabilities are the target's own."""

import pytest
import torch

PROMPTS = ["Once upon a time", "Grüße, 世界!", [40, 41, 42, 43, 44, 45, 46]]


def created(shared, **options):
    return shared.client.completions.create(model=shared.service.model, seed=4, **options)


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_come_back_with_the_targets_log_probabilities(shared, prompt, limit):
    decoder = shared.service.decoder
    for _ in range(2):  # the second time the prompt is known to a slot
        answer = created(shared, prompt=prompt, max_tokens=limit, echo=True, logprobs=2)
        (choice,), tokens = answer.choices, decoder.encode(prompt)
        plain = created(shared, prompt=prompt, max_tokens=limit).choices[0]
        sent = prompt if isinstance(prompt, str) else decoder.tokenizer.decode(prompt)
        assert choice.text == sent + plain.text and choice.finish_reason == plain.finish_reason
        told, count = choice.logprobs, len(tokens)
        assert answer.usage.prompt_tokens == count and answer.usage.completion_tokens == len(told.tokens) - count <= limit
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        expected_DV = torch.log_softmax(decoder.target.plain(torch.tensor([tokens]))[0, :-1], -1)
        own = [float(expected_V[token]) for expected_V, token in zip(expected_DV, tokens[1:], strict=True)]
        assert told.token_logprobs[1:count] == pytest.approx(own, abs=1e-4)
        likeliest = [max(top.values()) for top in told.top_logprobs[1:count]]
        assert likeliest == pytest.approx(expected_DV.max(-1).values.tolist(), abs=1e-4)


def test_offsets_are_those_of_the_text(shared):
    choice = created(shared, prompt="Grüße, 世界!", max_tokens=0, echo=True, logprobs=0).choices[0]
    # One token per byte: those of one character share it, and the next one begins behind it.
    begins = [0]
    for character in choice.text:
        begins += [begins[-1] + 1] * len(character.encode())
    assert choice.logprobs.text_offset == begins[:-1]
    plain = created(shared, prompt="Once", max_tokens=5, logprobs=0).choices[0]
    assert plain.logprobs.text_offset[0] == 0 and plain.logprobs.text_offset == sorted(plain.logprobs.text_offset)


def test_what_a_tokenizer_adds_has_no_place_in_the_text(serving, tiny_decoder, monkeypatch):
    server = serving()
    encode = server.service._encoder.encode
    monkeypatch.setattr(server.service._encoder, "encode", lambda prompt, *rest: [1, *encode(prompt, *rest)])
    choice = server.client.completions.create(
        model=server.service.model, prompt="abc", max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert choice.text == "abc" and choice.logprobs.text_offset == [0, 0, 1, 2]


def test_streams_tell_prompts_once(shared):
    options = {"prompt": PROMPTS[:2], "n": 2, "max_tokens": 6, "echo": True, "logprobs": 1}
    whole = created(shared, **options)
    texts, told = [""] * 4, [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(4)]
    for chunk in created(shared, **options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in told[choice.index].items():
                values += getattr(choice.logprobs, name)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        found = told[choice.index]
        assert found["tokens"] == choice.logprobs.tokens and found["text_offset"] == choice.logprobs.text_offset
        assert found["token_logprobs"][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-5)


def test_an_echo_alone_is_the_prompt(shared):
    choice = created(shared, prompt="Once", max_tokens=0, echo=True).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("Once", None, "length")
    refused = shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"
