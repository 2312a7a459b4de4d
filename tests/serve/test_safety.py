"""Nobody keeps others waiting, and every request gets its whole answer or an explicit error."""

import json
import logging
import re
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from polydraft.serve.service import surely_exceeds

MESSAGES = [{"role": "user", "content": "Hello there"}]
LONG = {"messages": MESSAGES, "max_tokens": 450, "logit_bias": {"256": -100}}  # 256 ends texts
CHAT = "/v1/chat/completions"
CANCELLED = re.compile(r"request_cancelled_total\{.*\} 1\.0")


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_large_requests_are_refused_whatever_their_header_says(serving):
    server = serving(max_body_bytes=2000)
    body = {"messages": [{"role": "user", "content": "x" * 3000}]}
    assert server.post(CHAT, body).status_code == 413

    def parts():
        for _ in range(50):
            yield b" " * 100

    answer = httpx.post(server.url + CHAT, content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_bodies_of_many_requests_together_are_limited(serving):
    """4,096 connections with a megabyte each would be 4 GB."""
    server = serving(max_body_bytes=2000, slots=1, max_queue=1)
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 1900\r\n\r\n".encode()
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(3)]
        for line in lines:
            line.sendall(head + b" " * 1800)
        told = []
        eventually(lambda: told.extend(select.select(lines, [], [], 0)[0]) or told)
        assert b" 429 " in told[0].recv(1000)
    eventually(lambda: server.post(CHAT, {"messages": MESSAGES, "user": "x" * 1500, "max_tokens": 2}).status_code == 200)


def test_requests_that_dawdle_are_ended(serving):
    server = serving(client_seconds=0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        line.sendall(head.encode() + b'{"mess')
        line.settimeout(10)
        assert b" 408 " in line.recv(1000)


TOO_LONG = "x" * 2**19


def test_prompts_that_are_too_long_are_not_read_to_their_end(shared, monkeypatch):
    """All prompts are tokenized one after another: five of a megabyte kept others waiting for 11 seconds."""
    read, original = [], PreTrainedTokenizerFast.__call__

    def spied(self, text, *args, **kwargs):
        read.append(len(text))
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", spied)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/completions", {"prompt": ["x", TOO_LONG]}),
    ):
        error = shared.post(path, body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "more than 512 tokens" in error["message"]
    assert sum(read) < 50_000
    read.clear()
    assert shared.post("/v1/completions", {"prompt": ["x"] * 1000}).json()["error"]["param"] == "n" and not read


def test_a_text_is_too_long_only_where_its_beginnings_have_twice_as_many_tokens():
    def per(characters):
        return lambda text, **_: {"input_ids": [0] * (len(text) // characters)}

    assert surely_exceeds("x" * 100_000, 512, per(4))
    assert not surely_exceeds("x" * 100_000, 512, per(200))  # fits
    assert surely_exceeds("x" * 300_000, 512, per(100)) and not surely_exceeds("x" * 100, 512, per(1))
    dense = lambda text, **_: {"input_ids": [0] * min(len(text), 700)}  # noqa: E731  # begins with many, ends with none
    assert not surely_exceeds("x" * 100_000, 512, dense)


def test_counting_the_tokens_of_long_texts_keeps_nobody_waiting(shared, monkeypatch):
    going_on, original = threading.Event(), PreTrainedTokenizerFast.__call__

    def slow(self, text, *args, **kwargs):
        if len(text) > 1000:
            assert going_on.wait(30)
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", slow)
    with ThreadPoolExecutor(12) as pool:
        counts = [pool.submit(shared.post, "/tokenize", {"prompt": "x" * (2000 + number)}) for number in range(12)]
        try:
            time.sleep(0.3)
            quick = httpx.post(shared.url + CHAT, json={"messages": MESSAGES, "max_tokens": 2}, timeout=10)
        finally:
            going_on.set()
        assert quick.status_code == 200
        assert [one.result().json()["count"] for one in counts] == list(range(2000, 2012))


def test_a_full_queue_is_a_429_that_says_when(serving):
    server = serving(slots=1, max_queue=1)
    scheduler, short, go = server.service.scheduler, {"messages": MESSAGES, "max_tokens": 2}, threading.Event()
    lane = scheduler.lanes["auto"]
    step = lane.step

    def held(*awaited: bool):
        return step(*awaited) if go.wait(0.01) else []  # nobody gets on, but requests may come and leave

    lane.step = held
    answers: list[httpx.Response] = []
    posting = [threading.Thread(target=lambda: answers.append(server.post(CHAT, short))) for _ in range(2)]
    posting[0].start()
    eventually(lambda: scheduler.unfinished == 1)
    with pytest.raises(httpx.ReadTimeout):
        server.post(CHAT, short, timeout=0.2)
    eventually(lambda: scheduler.unfinished == 1)  # it waited, and left: its place is free again
    posting[1].start()
    eventually(lambda: scheduler.unfinished == 2)
    answer = server.post(CHAT, short)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    go.set()
    for thread in posting:
        thread.join(20)
    assert [one.status_code for one in answers] == [200, 200]
    eventually(server.idle)


def test_more_texts_than_fit_at_once_are_refused(serving):
    server = serving(slots=1, max_queue=1)
    answer = server.post(CHAT, {"messages": MESSAGES, "n": 3})
    assert answer.status_code == 429 and answer.headers["retry-after"]


def test_answers_that_take_too_long_end(serving):
    server = serving(request_seconds=0.05)
    answer = server.post(CHAT, LONG)
    assert answer.status_code == 504 and "0.05 seconds" in answer.json()["error"]["message"]
    eventually(server.idle)
    text = server.post(CHAT, {**LONG, "stream": True}).text
    assert "0.05 seconds" in text and "[DONE]" not in text
    eventually(server.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(serving, stream):
    server = serving(slots=1)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    with socket.create_connection((host, int(port))) as line:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        eventually(lambda: server.service.scheduler.running == 1)
    eventually(server.idle, seconds=2)
    assert CANCELLED.search(httpx.get(f"{server.url}/metrics").text)


def test_clients_and_proxies_are_the_first_to_close_an_idle_connection(shared):
    """Else a request may be on its way when the server closes, as one of 2,000 was: httpx keeps connections for 5 seconds."""
    assert shared.server.config.timeout_keep_alive > 60


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_nobody_waiting(serving):
    server = serving(slots=2, client_seconds=1.0, slot_tokens=1000)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "max_tokens": 900, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 6}).encode()
    # More than the buffers of both ends hold.
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    line.sendall(head.encode() + body)
    eventually(lambda: server.service.scheduler.running == 2)
    for _ in range(3):
        assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 10}).status_code == 200
    eventually(server.idle, seconds=120)
    eventually(lambda: CANCELLED.search(httpx.get(f"{server.url}/metrics").text), seconds=120)
    line.close()


def test_leaving_lets_answers_end_and_refuses_new_ones(serving):
    server = serving(drain_seconds=20)
    with httpx.stream("POST", server.url + CHAT, json={**LONG, "max_tokens": 250, "stream": True}, timeout=120) as running:
        lines = running.iter_lines()
        next(lines)
        server.server.drain()
        eventually(lambda: not server.service.scheduler.ready)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = server.post(CHAT, {"messages": MESSAGES})
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        rest = list(lines)
    assert "data: [DONE]" in rest


def test_who_is_not_done_in_time_is_told(serving):
    server = serving(drain_seconds=0.0)
    with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=120) as running:
        lines = running.iter_lines()
        next(lines)
        server.server.drain()
        rest = list(lines)
    assert any("stopped before the answer was complete" in line for line in rest) or "data: [DONE]" in rest


def test_out_of_memory_is_a_503_and_the_server_goes_on(serving):
    server = serving()
    lane = server.service.scheduler.lanes["auto"]
    step = lane.step

    def broken(awaited: bool):
        lane.step = step
        lane.step(awaited)
        raise MemoryError

    lane.step = broken
    answer = server.post(CHAT, LONG)
    assert answer.status_code == 503 and "memory" in answer.json()["error"]["message"] and answer.headers["retry-after"]
    again = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 12, "seed": 3}).json()
    expected = server.service.decoder.generate("Hello there", chat=True, max_new_tokens=12, seed=3)
    assert again["choices"][0]["message"]["content"] == expected.text


def test_texts_are_not_logged_unless_asked_for(serving, caplog):
    caplog.set_level(logging.DEBUG, "polydraft")
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "seed": 1}
    answer = serving().post(CHAT, body).json()["choices"][0]["message"]["content"]
    eventually(lambda: "tokens" in caplog.text)
    assert "secret" not in caplog.text and repr(answer) not in caplog.text and "POST /v1/chat/completions 200" in caplog.text
    serving(log_texts=True).post(CHAT, body)
    eventually(lambda: repr(answer) in caplog.text)


def test_a_broken_model_is_a_500_that_says_why(serving, broken):
    from polydraft.loading import load

    answer = serving(load(broken)).post(CHAT, {"messages": MESSAGES, "max_tokens": 5})
    assert answer.status_code == 500 and "not numbers" in answer.json()["error"]["message"]


def test_unexpected_errors_are_logged_and_not_sent(serving, caplog, monkeypatch):
    server = serving()

    def fail(*_):
        raise KeyError("a secret")

    monkeypatch.setattr(server.service, "prepare", fail)
    answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 5})
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "unexpected" and "secret" not in answer.text
    eventually(lambda: "Traceback" in caplog.text and "a secret" in caplog.text)
