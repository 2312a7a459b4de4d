"""Beginnings that requests share: told in `usage` and in metrics, and kept to whoever has sent them."""

import threading

import pytest

from polydraft.errors import UsageError
from polydraft.models.prefixes import BLOCK
from polydraft.serve.options import ServeOptions

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
STEM = [3 + (7 * place) % 60 for place in range(200)]


def cached(answer) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask(server, prompt, **options):
    headers = {"authorization": f"Bearer {options.pop('key')}"} if "key" in options else {}
    answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 6, "seed": 1, **options}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def values(server):
    lines = server.service.metrics.text().decode().splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("polydraft:prefix")}


def test_usage_and_metrics_tell_what_was_not_read_again(serving):
    server = serving()
    first = ask(server, [*STEM, 5])
    assert cached(first) == 0
    again = ask(server, [*STEM, 5])
    assert cached(again) == len(STEM) and again.json()["choices"] == first.json()["choices"]
    assert cached(ask(server, [*STEM[:150], 4])) == 150
    assert cached(ask(server, [*STEM[:150], 4, 4, 4], n=3)) == 151, "of one text that gets three answers"
    assert cached(ask(server, [*STEM, 5], speculative="off")) == len(STEM), "the other lane finds it too"
    assert cached(ask(server, [*STEM, 5], regex="[a-c]{3}")) == len(STEM)
    assert cached(ask(server, [*STEM, 5], echo=True, logprobs=1)) == 0, "its log-probabilities come from reading it"
    found = values(server)
    assert found["polydraft:prefix_cache_hits_total"] == 3 * len(STEM) + 150 + 3 * 151
    assert found["polydraft:prefix_cache_queries_total"] == 4 * 201 + 151 + 3 * 153
    assert 0 < found["polydraft:prefix_cache_bytes"] <= server.service.scheduler.prefixes.most


def test_the_next_turn_of_a_conversation_reads_what_is_new(templated):
    server = templated("hermes")
    messages = [{"role": "user", "content": "Tell me of rivers and their sources, one by one."}]
    first = server.post(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "More"}]
    second = server.post(CHAT, {"messages": messages, "max_tokens": 4, "temperature": 0})
    assert cached(second) >= first["usage"]["prompt_tokens"] - 2
    third = server.post(RESPONSES, {"input": messages, "max_output_tokens": 4, "temperature": 0}).json()
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == third["usage"]["input_tokens"] - 1


def test_a_burst_reads_a_shared_prompt_once(serving):
    server, answers = serving(slots=8, other_slots=1), {}

    def one(number):
        answers[number] = ask(server, [*STEM, number], max_tokens=20)

    clients = [threading.Thread(target=one, args=(3 + number,)) for number in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    shared = len(STEM) // BLOCK * BLOCK
    assert sorted(min(cached(answer), shared) for answer in answers.values()) == [0, *[shared] * 11]
    fresh = serving()
    for number in (3, 9, 14):
        assert answers[number].json()["choices"] == ask(fresh, [*STEM, number], max_tokens=20).json()["choices"]


def test_requests_with_a_salt_share_with_those_that_say_the_same(serving):
    server = serving()
    found = [cached(ask(server, [*STEM, 5], **({"cache_salt": salt} if salt else {}))) for salt in ("", "a", "b", "a", "")]
    assert found == [0, 0, 0, len(STEM), len(STEM)]
    answer = server.post(COMPLETIONS, {"prompt": STEM, "cache_salt": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("share", [False, True])
def test_keys_share_nothing_unless_told(serving, tmp_path, share):
    (tmp_path / "keys").write_text("first-key-1234\nsecond-key-5678\n")
    server = serving(api_keys=tmp_path / "keys", share_prefixes=share)
    mine = [cached(ask(server, [*STEM, 5], key="first-key-1234")) for _ in range(2)]
    theirs = [cached(ask(server, [*STEM, 5], key="second-key-5678")) for _ in range(2)]
    assert mine == [0, len(STEM)] and theirs == [len(STEM) if share else 0, len(STEM)]


def test_nothing_is_kept_where_there_is_no_room(serving):
    for size in (0, 1e-6):
        server = serving(prefix_gb=size)
        assert [cached(ask(server, [*STEM, 5])) for _ in range(2)] == [0, 0]
        assert values(server)["polydraft:prefix_cache_bytes"] == 0
    with pytest.raises(UsageError, match="--prefix-gb -1"):
        ServeOptions(prefix_gb=-1)


def test_turns_are_by_key_or_by_address(serving, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("first-key-1234\nsecond-key-5678\n")
    clients = []
    for options in ({"api_keys": tmp_path / "keys"}, {}):
        server = serving(**options)
        submit = server.service.scheduler.submit
        monkeypatch.setattr(
            server.service.scheduler, "submit", lambda one, submit=submit: (clients.append(one.client), submit(one))
        )
        for key in ("first-key-1234", "second-key-5678", "first-key-1234"):
            ask(server, [1, 2], key=key)
    first, second, third, *addresses = clients
    assert first == third != second and "key" not in first
    assert len(set(addresses)) == 1 and addresses[0]


def test_a_round_that_breaks_takes_what_was_kept_with_it(serving, monkeypatch):
    server = serving()
    ask(server, [*STEM, 5])
    lane = server.service.scheduler.lanes["auto"]
    step, steps = lane.step, []

    def breaks(awaited=False):
        steps.append(True)
        if len(steps) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return step(awaited)

    monkeypatch.setattr(lane, "step", breaks)
    answer = server.post(COMPLETIONS, {"prompt": [*STEM, 5], "max_tokens": 60, "ignore_eos": True})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
    assert server.service.scheduler.prefixes.nbytes == 0
    assert [cached(ask(server, [*STEM, 5])) for _ in range(2)] == [0, len(STEM)]
