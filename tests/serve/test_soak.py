"""Many requests of all kinds at once: each gets its whole answer or an explicit error, and nothing is left behind."""

import asyncio
import gc
import json
import os
import random
import threading

import httpx
import pytest

from polydraft.sampling import SamplingParams
from polydraft.serve.ticket import Ticket

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 2, "three"]}, "minItems": 1, "maxItems": 3},
]


def random_body(chance):
    body = {"prompt": "".join(chance.choices("abcdef ", k=chance.randrange(1, 150))), "max_tokens": chance.randrange(1, 60)}
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
        if answer.status_code == 200:
            json.loads(answer.json()["choices"][0]["text"])
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


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak(serving, tiny_decoder, count):
    server = serving(slots=4, max_queue=40)
    checked = []

    async def main():
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            room = asyncio.Semaphore(40)

            async def limited(number):
                async with room:
                    await one_request(client, tiny_decoder, number, checked)

            await asyncio.gather(*map(limited, range(count)))

    asyncio.run(main())
    for _ in range(500):
        if server.idle():
            break
        threading.Event().wait(0.01)
    assert server.idle()
    gc.collect()
    tickets = [one for one in gc.get_objects() if type(one) is Ticket]
    assert len(tickets) < 50, "requests that are over are forgotten"
    assert len(checked) > count / 3
    for body, text in checked[:: max(len(checked) // (60 if count > 100 else 15), 1)]:
        assert text == expected_text(tiny_decoder, body)
    assert threading.active_count() < 50 and len(os.listdir("/proc/self/fd")) < 200
