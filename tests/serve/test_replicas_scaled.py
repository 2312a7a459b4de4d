"""Replicas on Ray Serve that come as the queue asks for them, and that are replaced while they work."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from serve.clusters import CHAT, Cluster, asked, model_options, running

pytestmark = pytest.mark.slow
REDEPLOYED = """
import sys
import ray
from ray import serve
from polydraft.serve.replicas import application
ray.init(address="auto", namespace="serve", log_to_driver=False)
arguments = dict(one.split("=", 1) for one in sys.argv[1:])
serve.run(application(arguments), name="polydraft", blocking=False)
"""


@pytest.fixture(scope="module")
def cluster(roomy: str) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with running(roomy, "--replicas", "1", "--max-replicas", "2", "--slots", "2") as made:
        yield made


def write(cluster: Cluster, number: int, stop: threading.Event, ends: list[str]) -> None:
    """Let a client ask for long texts, one after the other, and take down how they ended."""
    body = {**asked(f"topic {number}"), "max_tokens": 400, "logit_bias": {"256": -100}, "stream": True}
    while not stop.is_set():
        with httpx.stream("POST", cluster.url + CHAT, json=body, timeout=120) as answer:
            ends.append([line for line in answer.iter_lines() if line][-1])


def test_a_long_queue_brings_another_replica_and_all_are_replaced_without_a_loss(cluster: Cluster, roomy: str) -> None:
    assert len(cluster.replicas()) == 1
    stop, ends = threading.Event(), list[str]()
    clients = [threading.Thread(target=write, args=(cluster, number, stop, ends)) for number in range(8)]
    for client in clients:
        client.start()
    try:
        until = time.monotonic() + 120
        while len(cluster.replicas()) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        assert len(cluster.replicas()) == 2, "eight streams for two slots"
        before = set(cluster.replicas())
        options = {**model_options(roomy), "replica_cpus": "0.5", "replicas": "1", "max_replicas": "2", "slots": "3"}
        arguments = [f"{name}={value}" for name, value in options.items()]
        subprocess.run([sys.executable, "-c", REDEPLOYED, *arguments], check=True, capture_output=True, timeout=180)
        until = time.monotonic() + 120
        while before & set(cluster.replicas()) and time.monotonic() < until:
            assert cluster.ask("meanwhile").status_code == 200
        assert not before & set(cluster.replicas()), "every one was replaced"
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert len(ends) >= 8 and set(ends) == {"data: [DONE]"}, "no stream was cut off"
