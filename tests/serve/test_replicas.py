"""Replicas on Ray Serve, as real processes: the answers of one, and the loss of one is the loss of its streams alone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from polydraft.engine import Decoder
from polydraft.sampling import SamplingParams
from serve.clusters import CHAT, Cluster, asked, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(roomy: str) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with running(roomy, "--replicas", "2", "--slots", "4", "--client-seconds", "2") as made:
        yield made


def test_answers_are_the_librarys_whichever_replica_writes_them(cluster: Cluster, tiny_decoder: Decoder) -> None:
    for seed in range(8):
        answer = cluster.ask(f"talk {seed}", seed=seed, temperature=1)
        prompt = tiny_decoder.encode(f"talk {seed}", chat=True)
        expected = tiny_decoder.generate(prompt, sampling=SamplingParams(), max_new_tokens=20, seed=[seed])
        assert answer.json()["choices"][0]["message"]["content"] == expected.text
    written = cluster.count("generation_tokens_total")
    assert len(written) == 2 and all(written.values()), "both of them wrote some"


def test_a_conversation_stays_where_its_cache_is(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "stay"}]
    before = cluster.count("generation_tokens_total")
    for turn in range(4):
        answer = httpx.post(cluster.url + CHAT, json={"messages": messages, "max_tokens": 8}, timeout=60).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}"}]
    after = cluster.count("generation_tokens_total")
    assert sum(after[one] > before[one] for one in after) == 1


def test_whoever_leaves_frees_the_slot(cluster: Cluster) -> None:
    before = sum(cluster.count("request_cancelled_total").values())
    body = {**asked("long"), "max_tokens": 900, "logit_bias": {"256": -100}, "stream": True}
    with httpx.stream("POST", cluster.url + CHAT, json=body, timeout=60) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 30
    while sum(cluster.count("request_cancelled_total").values()) == before and time.monotonic() < end:
        time.sleep(0.1)
    assert sum(cluster.count("request_cancelled_total").values()) == before + 1


def test_bad_requests_are_told_as_by_one_server(cluster: Cluster) -> None:
    answer = cluster.ask("x", best_of=3)
    assert answer.status_code == 400 and "best_of" in answer.json()["error"]["message"]
    assert httpx.get(f"{cluster.url}/v1/models", timeout=60).json()["data"]
    assert httpx.get(f"{cluster.url}/nowhere", timeout=60).status_code == 404


def test_requests_that_dawdle_are_ended_at_the_front(cluster: Cluster) -> None:
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        line.sendall(head.encode() + b'{"mess')
        line.settimeout(20)
        assert b" 408 " in line.recv(1000)


def test_replicas_write_a_line_for_every_request(cluster: Cluster) -> None:
    assert cluster.ask("x", best_of=3).status_code == 400
    end = time.monotonic() + 30
    wanted = re.compile(rf" WARNING 127\.0\.0\.1:\d+ [0-9a-f-]+ POST {CHAT} 400 .*best_of")
    while not any(wanted.search(line) for line in cluster.said):
        assert time.monotonic() < end, "".join(cluster.said)
        time.sleep(0.1)


def test_replicas_that_do_not_fit_are_refused_in_one_line(cluster: Cluster, roomy: str) -> None:
    command = [sys.executable, "-m", "polydraft", "serve", "--ray", "--target", roomy, "--replica-cpus", "64", "--port", "8798"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 1 and "but 1 replicas need 64" in done.stderr and "Traceback" not in done.stderr


def test_a_replica_that_dies_takes_its_own_streams_along_and_comes_back(cluster: Cluster) -> None:
    lines: dict[int, list[str]] = {number: [] for number in range(6)}

    def stream(number: int) -> None:
        body = {**asked(f"topic {number}"), "max_tokens": 400, "logit_bias": {"256": -100}, "stream": True}
        with httpx.stream("POST", cluster.url + CHAT, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    lines[number].append(line)

    clients = [threading.Thread(target=stream, args=(number,)) for number in lines]
    for client in clients:
        client.start()
    while not all(len(seen) > 5 for seen in lines.values()):
        time.sleep(0.01)
    lost, *_ = before = cluster.replicas()
    assert len(before) == 2
    os.kill(lost, signal.SIGKILL)
    assert all(cluster.ask(f"new {number}").status_code == 200 for number in range(5))
    for client in clients:
        client.join()
    ends = [seen[-1] for seen in lines.values()]
    told = [json.loads(end.removeprefix("data: "))["error"]["message"] for end in ends if end != "data: [DONE]"]
    assert told and all("replica that wrote this answer is gone" in message for message in told)
    assert len(told) < len(ends), "those of the other replica are whole"
    end = time.monotonic() + 60
    while (len(cluster.replicas()) < 2 or lost in cluster.replicas()) and time.monotonic() < end:
        time.sleep(0.2)
    assert len(cluster.replicas()) == 2 and lost not in cluster.replicas()
