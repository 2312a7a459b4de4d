"""Schedulers of processes that share a model see the same requests come and go, and write the same texts."""

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from polydraft.engine import Decoder, TokenSequence
from polydraft.loading import load
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.serve.lane import LaneOptions
from polydraft.serve.request import OFF, Lockstep, Request
from polydraft.serve.scheduler import Scheduler


class Following(Lockstep):
    """Keeps the requests that it hears of; a lockstep forgets finished ones."""

    def __init__(self, decoder: Decoder, broadcast) -> None:
        super().__init__(decoder, leads=False, broadcast=broadcast)
        self.seen = list[Request]()

    def agree(self, *arguments):
        found = super().agree(*arguments)
        self.seen += found[0]
        return found


def test_a_follower_writes_what_the_leader_writes(tiny: str) -> None:
    decoders = [load(tiny, "early-exit:1", tree="2x1", device="cpu", dtype="float32") for _ in range(2)]
    wire: queue.Queue[bytes] = queue.Queue()

    def broadcast(value):
        if value is None:
            return pickle.loads(wire.get(timeout=30))
        wire.put(pickle.dumps(value))
        return value

    leading, following = Lockstep(decoders[0], leads=True, broadcast=broadcast), Following(decoders[1], broadcast)
    size = LaneOptions(slots=2, slot_tokens=96, chunk_tokens=16)
    first, second = (
        Scheduler(one, size, max_queue=8, lockstep=own) for one, own in zip(decoders, (leading, following), strict=True)
    )
    thread = threading.Thread(target=second.follow)
    thread.start()
    first.start()

    async def ask() -> list[Request]:
        loop, requests = asyncio.get_running_loop(), []
        for number in range(6):
            params = SamplingParams(temperature=0.8 if number % 2 else 0.0, repetition_penalty=1.1 if number == 3 else 1.0)
            text = TokenSequence(
                prompt=[5 + number, 6, 7] * (1 + 3 * number),
                params=params,
                generator=row_generator(number),
                max_new_tokens=64 if number == 4 else 10 + number,
                assembler=decoders[0].assembler(("q",) if number == 2 else ()),
                max_positions=96,
            )
            request = Request([text], OFF if number == 5 else "auto", loop)
            first.submit(request)
            requests.append(request)
        await requests[4].events.get()
        first.cancel(requests[4])
        for request in (*requests[:4], requests[5]):
            while (await request.events.get()).emitted.stop_reason is None:
                pass
        return requests

    requests = asyncio.run(ask())
    first.drain(5.0)
    thread.join(timeout=30)
    assert not thread.is_alive() and len(following.seen) == 6
    for one, other in zip(requests, following.seen, strict=True):
        assert one.sequences[0].tokens == other.sequences[0].tokens
        assert one.sequences[0].stop_reason == other.sequences[0].stop_reason


@pytest.mark.slow
def test_two_processes_serve_one_model(roomy: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "polydraft", "serve", "--device-map", "tp"]
    model = ["--target", roomy, "--draft", roomy, "--tree", "2x1", "--dtype", "float32", "--threads", "1"]
    command = [sys.executable, *start, *model, "--port", str(port), "--slots", "3", "--slot-tokens", "128"]
    url = f"http://127.0.0.1:{port}/v1/completions"
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file, stdout=file, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    assert process.poll() is None, log.read_text()
                time.sleep(0.5)
            asked = [{"prompt": f"number {number}", "max_tokens": 12, "temperature": 0} for number in range(7)]
            answers: dict[int, str] = {}

            def ask(number: int) -> None:
                answers[number] = httpx.post(url, json=asked[number], timeout=120).json()["choices"][0]["text"]

            clients = [threading.Thread(target=ask, args=(number,)) for number in range(7)]
            for client in clients:
                client.start()
            with httpx.stream("POST", url, json={**asked[0], "max_tokens": 100, "stream": True}, timeout=60) as one:
                next(one.iter_lines())  # and leaves
            for client in clients:
                client.join(timeout=120)
            refused = httpx.post(url, json={**asked[0], "response_format": {"type": "json_object"}}, timeout=60)
            assert refused.status_code == 400 and "several processes share" in refused.text
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    decoder = load(roomy, device="cpu", dtype="float32")
    expected = [decoder.generate(one["prompt"], sampling=SamplingParams(temperature=0), max_new_tokens=12) for one in asked]
    assert answers == {number: one.text for number, one in enumerate(expected)}, log.read_text()[-2000:]
