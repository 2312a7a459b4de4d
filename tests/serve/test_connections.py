"""Whoever holds connections without using them shuts nobody out, and answers leave at once."""

import logging
import os
import resource
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from tests.serve.test_safety import eventually

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODILESS = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connections(server):
    return server.server.server_state.connections


def is_closed(line):
    """Whether the other end has closed a connection; waits for it."""
    line.settimeout(10)
    try:
        return line.recv(1000) == b""
    except ConnectionResetError:
        return True


def is_answered(line):
    """Whether a request on a connection gets its answer."""
    text = b""
    line.settimeout(10)
    line.sendall(HEAD + b"\r\n")
    while not text.endswith(b'{"status":"ok"}'):
        if not (came := line.recv(1000)):
            return False
        text += came
    return b" 200 " in text


def drip(line, seconds):
    """Send a header's characters one by one until the other end closes."""
    end = time.monotonic() + seconds
    line.sendall(HEAD + b"X: ")
    while time.monotonic() < end:
        try:
            line.sendall(b"x")
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD], ids=["nothing", "part of a line", "part of a head"])
def test_requests_that_do_not_begin_are_not_waited_for(serving, sent):
    with socket.create_connection(address(serving(client_seconds=0.2))) as line:
        line.sendall(sent)
        assert is_closed(line)


def test_a_head_that_comes_in_drips_has_the_same_time(serving):
    with socket.create_connection(address(serving(client_seconds=0.2))) as line:
        assert drip(line, seconds=5)


def test_a_second_request_has_a_deadline_too_but_an_idle_connection_has_not(serving):
    server = serving(client_seconds=0.4)
    with ExitStack() as stack:
        lines = []
        for _ in range(2):
            lines.append(stack.enter_context(socket.create_connection(address(server))))
            assert is_answered(lines[-1])
        line, idle = lines
        assert drip(line, seconds=5)
        time.sleep(0.1)
        assert is_answered(idle)  # later than a head would have had to come


def test_a_request_may_wait_for_its_answer_longer_than_clients_may_take(serving):
    server = serving(client_seconds=0.2)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "logit_bias": {"256": -100}}
    start = time.monotonic()
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert time.monotonic() - start > 0.3  # else this shows nothing: make it longer


def test_an_answer_that_nobody_reads_is_dropped(serving):
    """Also one that was written at once: closing the connection would wait until the last byte is read."""
    server = serving(client_seconds=0.3, max_body_bytes=2**22)
    body = b'{"prompt": "' + b"x" * 2**19 + b'"}'
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(address(server))
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        line.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: any(one.cycle and one.cycle.response_complete for one in connections(server)), seconds=30)
        eventually(lambda: not connections(server))


@pytest.mark.parametrize("sent", [b"", HEAD, BODILESS], ids=["nothing", "part of a head", "no body"])
def test_there_are_never_more_connections_than_half_the_files(serving, monkeypatch, sent):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    server = serving()
    with ExitStack() as stack:
        lines = []
        for _ in range(100):
            lines.append(stack.enter_context(socket.create_connection(address(server))))
            lines[-1].sendall(sent)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert len(connections(server)) <= 33
        assert is_closed(lines[0])  # the oldest


def test_whoever_is_being_answered_keeps_the_connection(serving, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    server = serving(slots=1)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "logit_bias": {"256": -100}, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer, ExitStack() as stack:
        lines = answer.iter_lines()
        next(lines)
        for _ in range(50):
            stack.enter_context(socket.create_connection(address(server)))
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert "data: [DONE]" in list(lines)


@pytest.mark.slow
def test_thousands_of_open_connections_shut_nobody_out(serving):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 10_000:
        pytest.skip("needs ulimit -n 10000: both ends are here")
    server = serving()
    with ExitStack() as stack:
        for _ in range(4200):
            stack.enter_context(socket.create_connection(address(server)))
        start = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
        assert time.monotonic() - start < 5


def test_no_more_files_are_said_once_and_waited_for(serving, caplog):
    """Python's own loop tried 2,048 times a second, and wrote a page for each: 40 MB in a minute."""
    server = serving()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.socket()) for _ in range(20)]
        spare = os.dup(0)
        os.close(spare)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 2, hard))
            for line in lines:
                line.connect(address(server))
            time.sleep(1.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        told = [record for record in caplog.records if "Too many open files" in record.getMessage() or record.exc_info]
        assert len(told) == 1 and told[0].levelno == logging.WARNING
        assert all(map(is_answered, lines))


def test_answers_are_not_held_back(shared):
    """A head and its body are two writes; the second would wait for the client's word that the first has come."""
    with socket.create_connection(address(shared)) as line:
        assert is_answered(line)
        own = line.getsockname()
        (one,) = [one for one in connections(shared) if one.transport.get_extra_info("peername") == own]
        assert one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_a_connection_that_is_used_again_answers_as_fast_as_a_new_one(shared):
    """Without TCP_NODELAY each answer but the first few took 40 ms: what the client's system waits before it acknowledges."""
    with socket.create_connection(address(shared)) as line:
        seconds = []
        for _ in range(30):
            start = time.perf_counter()
            assert is_answered(line)
            seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[len(seconds) // 2] < 0.035
