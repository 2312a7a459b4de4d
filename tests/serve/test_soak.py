"""Many requests of all kinds at once: each gets its whole answer or an explicit error, and nothing is left behind."""

import asyncio
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from polydraft.loading import load
from polydraft.sampling import SamplingParams
from polydraft.serve.request import Request

from .test_command import process

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 2, "three"]}, "minItems": 1, "maxItems": 3},
]


SHARED = "".join(random.Random(1).choices("abcdef ", k=200))
"""What many prompts begin with."""


def random_body(chance):
    prompt = SHARED[: chance.choice([0, 0, 100, 200])] + "".join(chance.choices("abcdef ", k=chance.randrange(1, 150)))
    body = {"prompt": prompt, "max_tokens": chance.randrange(1, 60)}
    body["seed"] = chance.randrange(10**6)
    body |= {"temperature": chance.choice([0, 0.7, 1.0])}
    if chance.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 20}
    if chance.random() < 0.2:
        body |= {"repetition_penalty": 1.3}
    if chance.random() < 0.2:
        body |= {"presence_penalty": 0.5}
    return body


def expected_text(decoder, body):
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty")
    sampling = SamplingParams(**{name: body[name] for name in names if name in body})
    return decoder.generate(body["prompt"], sampling=sampling, max_new_tokens=body["max_tokens"], seed=body["seed"]).text


async def one_request(client, decoder, number, checked):
    chance = random.Random(number)
    body, kind = random_body(chance), chance.random()
    if kind < 0.1:
        body[chance.choice(["temperature", "seed", "odd", "stop"])] = {"wrong": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400
    elif kind < 0.2:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 300}) as answer:
            assert answer.status_code in (200, 429)
            async for _ in answer.aiter_lines():
                break
    elif kind < 0.3:
        schema = chance.choice(SCHEMAS)
        wish = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = await client.post("/v1/completions", json={**body, "max_tokens": 100, "response_format": wish})
        assert answer.status_code in (200, 429)
        if answer.status_code == 200:
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            if choice["finish_reason"] == "stop":
                json.loads(choice["text"])
    else:
        slow = kind < 0.4
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                assert answer.status_code == 429 and answer.headers["retry-after"]
                return
            done = False
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                done = done or line == "data: [DONE]"
                await asyncio.sleep(0.02 if slow else 0)
        assert done
        checked.append((body, text))


async def soak(url, decoder, count, seconds=0.0, first=0):
    """Send requests, evenly over some seconds or as fast as they are answered; return answers with what was asked."""
    checked = []
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        room, start = asyncio.Semaphore(40), time.monotonic()

        async def limited(number):
            await asyncio.sleep(max(start + number * seconds / count - time.monotonic(), 0))
            async with room:
                await one_request(client, decoder, first + number, checked)

        await asyncio.gather(*map(limited, range(count)))
    return checked


def sample(checked, most):
    return checked[:: max(len(checked) // most, 1)]


def hits(server):
    """Return how many tokens of prompts were not read again."""
    lines = server.service.metrics.text().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("polydraft:prefix_cache_hits_total"))


@pytest.mark.parametrize("count", [16, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak(serving, tiny_decoder, count):
    server = serving(slots=4, max_queue=40)
    checked = asyncio.run(soak(server.url, tiny_decoder, count))
    for _ in range(500):
        if server.idle():
            break
        threading.Event().wait(0.01)
    assert server.idle()
    gc.collect()
    requests = [one for one in gc.get_objects() if type(one) is Request]
    assert len(requests) < 50, "requests that are over are forgotten"
    assert len(checked) > count / 3
    assert server.service.scheduler.prefixes.nbytes > 0 and hits(server) > 0
    for body, text in sample(checked, 60 if count > 100 else 15):
        assert text == expected_text(tiny_decoder, body)
    assert threading.active_count() < 50 and len(os.listdir("/proc/self/fd")) < 200


def held(one):
    """Return what a process holds: bytes, threads, open files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{one.pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), len(os.listdir(f"/proc/{one.pid}/fd"))


async def last_requests(url, one):
    """Send a signal while answers are on their way; return how each ended."""

    async def ask(client, number):
        body = {"prompt": "abc", "max_tokens": 60, "seed": number, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        return answer.status_code, lines[-1] if lines else ""

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in range(6)]
        await asyncio.sleep(0.3)
        one.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asked)


@pytest.mark.slow
def test_soak_of_a_process(roomy, capsys):
    """Ten minutes; SOAK_TARGET=smollm2 takes the bundled pair, SOAK_SECONDS and SOAK_REQUESTS another size."""
    target, count = os.environ.get("SOAK_TARGET", roomy), int(os.environ.get("SOAK_REQUESTS", "2000"))
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    pair = {"target": target, "tree": "3x2x1", "draft": "early-exit:1" if target == roomy else "auto", "dtype": "float32"}
    given = [text for name, value in pair.items() for text in (f"--{name}", value)]
    with process(*given, "--slots", "4", "--max-queue", "40", "--slot-tokens", "512", "--prefix-gb", "0.01") as (one, url):
        threading.Thread(target=one.stderr.read, daemon=True).start()  # a full pipe would stop the server
        decoder = load(**pair)
        start, sizes, checked = time.monotonic(), [], []
        for part in range(4):  # what the first part takes, others may use again
            checked += asyncio.run(soak(url, decoder, count // 4, seconds / 4, part * count))
            sizes.append(held(one))
        took = time.monotonic() - start
        ends = asyncio.run(last_requests(url, one))
        assert one.wait(90) == 0
    with capsys.disabled():
        sys.stderr.write(f"\n{count} requests in {took:.0f} s, {len(checked)} whole streams; bytes, threads, files: {sizes}\n")
    for status, last in ends:
        assert (status == 200 and (last == "data: [DONE]" or "error" in last)) or status in (429, 503)
    assert len(checked) > count / 4
    for body, text in sample(checked, 40):
        assert text == expected_text(decoder, body)
    (first_bytes, first_threads, first_files), (last_bytes, last_threads, last_files) = sizes[0], sizes[-1]
    assert last_bytes < 1.1 * first_bytes + 2**25 and last_threads <= first_threads + 8 and last_files <= first_files + 16
