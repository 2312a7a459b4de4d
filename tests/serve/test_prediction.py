"""`prediction` on both endpoints: the text without it, in fewer rounds, and what became of the predicted tokens."""

import pytest

from polydraft.loading import load

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "Hello"}]


def content(text):
    return {"type": "content", "content": text}


def details(answer):
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


@pytest.mark.parametrize("drafts", [{"draft": "none"}, {"draft": "early-exit:1"}, {"drafter": "suffix"}], ids=str)
def test_a_predicted_text_is_the_same_in_fewer_rounds(serving, roomy, drafts):
    server = serving(load(roomy, dtype="float32", **drafts))
    body = {"prompt": "ab cd", "temperature": 0, "max_tokens": 60}
    plain = server.post(COMPLETIONS, body).json()
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["text"]
    answer = server.post(COMPLETIONS, {**body, "prediction": content(text)}).json()
    accepted, _ = details(answer)
    assert answer["choices"][0]["text"] == text
    assert accepted > 10 and answer["choices"][0]["speculation"]["rounds"] < plain["choices"][0]["speculation"]["rounds"]
    assert answer["choices"][0]["speculation"]["accepted_tokens"]["prediction"] == accepted
    wrong = server.post(COMPLETIONS, {**body, "prediction": content("zq " * 30)}).json()
    assert wrong["choices"][0]["text"] == text and details(wrong)[1] > 30 > details(wrong)[0]


def test_chats_parts_seeds_streams_and_several_texts(shared):
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "n": 2, "temperature": 0.3}
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    expected = shared.post(CHAT, {**body, "prediction": content("abcd")}).json()
    again = shared.post(CHAT, {**body, "prediction": content(parts)}).json()
    texts = [[one["message"]["content"] for one in answer["choices"]] for answer in (expected, again)]
    assert texts[0] == texts[1] and len(texts[0]) == 2 and sum(details(again)) >= 8
    with shared.client.chat.completions.create(
        model=shared.service.model, stream=True, stream_options={"include_usage": True}, prediction=content("abcd"), **body
    ) as stream:
        chunks = list(stream)
    for index, text in enumerate(texts[0]):
        deltas = [one.delta.content or "" for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(deltas) == text
    told = chunks[-1].usage.completion_tokens_details
    assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == details(expected)


def test_a_text_of_a_grammar_may_be_predicted(shared):
    body = {"prompt": "x", "max_tokens": 40, "temperature": 0, "regex": "[a-c]{12}-[0-9]{12}"}
    text = shared.post(COMPLETIONS, body).json()["choices"][0]["text"]
    answer = shared.post(COMPLETIONS, {**body, "prediction": content(text)}).json()
    assert answer["choices"][0]["text"] == text and details(answer)[0] > 8
    assert "auto+grammar+prediction" in shared.service.scheduler.lanes


def test_requests_with_their_own_tree_may_predict(shared):
    body = {"prompt": "ab cd", "temperature": 0, "max_tokens": 30, "speculative": {"tree": "2x1", "trace": True}}
    text = shared.post(COMPLETIONS, body).json()["choices"][0]["text"]
    answer = shared.post(COMPLETIONS, {**body, "prediction": content(text)}).json()
    assert answer["choices"][0]["text"] == text and details(answer)[0] > 5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction"),
        ({"prediction": content(5)}, "prediction"),
        ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction"),
        ({"prediction": content("x"), "speculative": "off"}, 'prediction and "speculative": "off" cannot be combined'),
    ],
    ids=str,
)
def test_bad_predictions_are_named(shared, wrong, said):
    answer = shared.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4, **wrong})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith("prediction") and said in error["message"]


def test_an_empty_or_a_missing_prediction_asks_for_nothing(shared):
    for nothing in (None, content("")):
        answer = shared.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4, "prediction": nothing, "speculative": "off"})
        assert answer.status_code == 200 and "completion_tokens_details" not in answer.json()["usage"]


def test_no_more_of_a_prediction_is_kept_than_could_come_true(serving):
    server = serving(slot_tokens=64)
    answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4, "prediction": content("ab " * 10_000)}).json()
    assert sum(details(answer)) == 64
