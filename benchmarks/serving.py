"""Batches and the server's scheduler, speculation on against off, without HTTP.

python benchmarks/serving.py --target inflated:7b --prompts spec_bench.jsonl     # a GPU, 4 minutes
python benchmarks/serving.py --target smollm2 --streams 1,8 --tokens 32 --only streams

Batches: tokens per second of `generate` after its prompts are read, plain and with trees by load. Streams: so many clients,
each asking again as soon as it is answered; tokens per second of all, and p50 and p99 of the time between two of a client's
rounds, per token. Texts never end early; those of streams are of different lengths, so that clients do not stay in step.
Overhead: the same clients in another process, over HTTP, against the scheduler alone.
"""

import argparse
import asyncio
import json
import multiprocessing
import queue
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from polydraft import SamplingParams, load
from polydraft.engine import Decoder
from polydraft.prompts import load_prompts
from polydraft.serve.lane import LaneOptions
from polydraft.serve.memory import fitting_pool
from polydraft.serve.request import AUTO, OFF, Request
from polydraft.serve.scheduler import Scheduler

LONGEST, CHUNK = 512, 256


def batches(options: argparse.Namespace, decoder: Decoder, prompts: list[list[int]]) -> dict[str, Any]:
    """Time batches, arms in turn."""
    sampling, found = SamplingParams(temperature=options.temperature), {}
    arms = {"plain": decoder.replace(drafter=None), "auto": decoder}
    if options.coupled:
        arms["coupled"] = decoder.replace(coupled=True)
    for rows in options.streams:
        texts = [prompts[row % len(prompts)] for row in range(rows)]
        longest = max(map(len, texts)) + options.tokens
        warm = {name: one.warm_up(sampling=sampling, batch_size=rows, longest=longest) for name, one in arms.items()}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        per_pass = {}
        for _ in range(options.repeat):
            for name, one in arms.items():
                stats = one.generate(texts, sampling=sampling, max_new_tokens=options.tokens)[0].stats
                rates[name].append(stats.new_tokens / stats.decode_seconds)
                per_pass[name] = stats.tokens_per_pass
        row = {name: statistics.median(rates[name]) for name in arms}
        found[f"batch {rows}"] = {**row, "per_pass": per_pass, "warm_up": warm}
        print(f"batch {rows}: plain {row['plain']:.0f} tokens/s")
        for name in list(arms)[1:]:
            print(f"    {name} {row[name]:.0f} ({row[name] / row['plain']:.2f}x), {per_pass[name]:.2f} per pass, "
                  f"warm-up {warm[name]:.1f} s", flush=True)  # fmt: skip
    return found


def length_of(number: int, turn: int, mean: int) -> int:
    """Return how long a client's text is: between half and one and a half times the mean."""
    return mean // 2 + random.Random(1000 * turn + number).randrange(mean + 1)


async def one_client(
    decoder: Decoder,
    scheduler: Scheduler,
    arm: str,
    prompts: list[list[int]],
    number: int,
    options: argparse.Namespace,
    gaps: list[float],
) -> None:
    """Ask some times, one after the other."""
    params = SamplingParams(temperature=options.temperature)
    for turn in range(options.turns):
        tokens = length_of(number, turn, options.tokens)
        text = decoder.sequence(
            prompts[(number + turn) % len(prompts)],
            params,
            seed=1000 * turn + number,
            max_new_tokens=tokens,
            max_positions=LONGEST,
            eos_token_ids=frozenset(),
        )
        request, last = Request([text], arm, asyncio.get_running_loop()), 0.0
        scheduler.submit(request)
        while True:
            progress = await request.events.get()
            now = time.perf_counter()
            if progress.error is not None:
                raise progress.error
            if last:
                gaps += [(now - last) / len(progress.emitted.token_ids)] * len(progress.emitted.token_ids)
            last = now
            if progress.emitted.stop_reason is not None:
                break


async def timed_clients(
    options: argparse.Namespace, decoder: Decoder, prompts: list[list[int]], count: int
) -> dict[str, float]:
    """Time so many clients of a scheduler."""
    warm = [SamplingParams(temperature=options.temperature)] if options.warm else []
    size = LaneOptions(slots=options.slots or count, slot_tokens=LONGEST, chunk_tokens=CHUNK)
    pool = None if options.cache_gb == 0 else fitting_pool(decoder.target.device, options.cache_gb)
    scheduler, gaps = Scheduler(decoder, size, max_queue=count, warm_up=warm, pool=pool), list[float]()
    scheduler.start()
    start = time.perf_counter()
    while not scheduler.ready:
        await asyncio.sleep(0.05)
    waited = time.perf_counter() - start
    start = time.perf_counter()
    await asyncio.gather(*(one_client(decoder, scheduler, AUTO, prompts, number, options, gaps) for number in range(count)))
    seconds = time.perf_counter() - start
    await asyncio.to_thread(scheduler.drain, 5.0)
    ordered = sorted(gaps)
    new = sum(length_of(number, turn, options.tokens) for number in range(count) for turn in range(options.turns))
    return {
        "warm_up": waited,
        "tokens_per_second": new / seconds,
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
    }


async def streams(options: argparse.Namespace, decoder: Decoder, prompts: list[list[int]]) -> dict[str, Any]:
    """Time many clients of a scheduler."""
    found: dict[str, Any] = {}
    for count in options.streams:
        row: dict[str, Any] = {}
        arms = {OFF: decoder.replace(drafter=None), AUTO: decoder}
        if options.coupled:
            arms["coupled"] = decoder.replace(coupled=True)
        for arm, own in arms.items():
            row[arm] = await timed_clients(options, own, prompts, count)
            ratio = row[arm]["tokens_per_second"] / row[OFF]["tokens_per_second"]
            print(f"streams {count}, {arm}: {row[arm]['tokens_per_second']:.0f} tokens/s ({ratio:.2f}x); ms per token p50/p99: "
                  f"{row[arm]['p50'] * 1000:.1f}/{row[arm]['p99'] * 1000:.1f}; warm-up {row[arm]['warm_up']:.1f} s",
                  flush=True)  # fmt: skip
        found[f"streams {count}"] = row
    return found


async def one_http_client(http: Any, prompts: list[list[int]], number: int, options: argparse.Namespace) -> None:
    """Ask some times, one after the other, and read the answers as they come."""
    for turn in range(options.turns):
        tokens = length_of(number, turn, options.tokens)
        asked = {"prompt": prompts[(number + turn) % len(prompts)], "max_tokens": tokens, "stream": True}
        async with http.stream("POST", "/v1/completions", json=asked | {"temperature": options.temperature}) as answer:
            lines = [line async for line in answer.aiter_lines()]
        if answer.status_code != 200 or "[DONE]" not in lines[-2:][0] + lines[-1]:
            raise RuntimeError(f"status {answer.status_code}: {lines[-2:]}")


def ask_over_http(url: str, prompts: list[list[int]], count: int, options: argparse.Namespace, seconds: Any) -> None:
    """Be all clients, in a process of their own, twice: who comes first meets what was not rehearsed."""
    import httpx

    async def ask() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            for _ in range(2):
                start = time.perf_counter()
                await asyncio.gather(*(one_http_client(http, prompts, number, options) for number in range(count)))
                seconds.value = time.perf_counter() - start

    asyncio.run(ask())


def overhead(options: argparse.Namespace, decoder: Decoder, prompts: list[list[int]]) -> dict[str, Any]:
    """Time clients of a server against those of its scheduler."""
    from polydraft.serve.app import make_app
    from polydraft.serve.options import ServeOptions
    from polydraft.serve.server import Server, listen
    from polydraft.serve.service import Service

    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for count in options.streams:
        serve = ServeOptions(slots=count, slot_tokens=LONGEST, chunk_tokens=CHUNK, port=0, max_queue=count)
        service, listening, address = Service(decoder, serve), listen(serve), queue.Queue[str]()
        server = Server(make_app(service), service, listening, address.put)
        serving = threading.Thread(target=server.serve_until_drained)
        serving.start()
        url = address.get()
        while not service.scheduler.ready:
            time.sleep(0.05)
        seconds = context.Value("d", 0.0)
        clients = context.Process(target=ask_over_http, args=(url, prompts, count, options, seconds))
        clients.start()
        clients.join()
        server.drain()
        serving.join()
        new = sum(length_of(number, turn, options.tokens) for number in range(count) for turn in range(options.turns))
        direct = asyncio.run(timed_clients(options, decoder, prompts, count))["tokens_per_second"]
        over = new / seconds.value
        found[f"overhead {count}"] = {"http": over, "direct": direct, "overhead": direct / over - 1}
        print(
            f"overhead, {count} streams: {over:.0f} tokens/s over HTTP, {direct:.0f} without: {direct / over - 1:.1%}",
            flush=True,
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="inflated:7b")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7])
    parser.add_argument("--streams", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--slots", type=int, help="of the scheduler; as many as there are streams otherwise")
    parser.add_argument("--cache-gb", type=float, help="for all texts; with 0 each slot has memory for the longest of its own")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--coupled", action="store_true", help="also measure coupled texts, where they are not the default")
    parser.add_argument("--cold", dest="warm", action="store_false", help="leave the scheduler's warm-up out")
    parser.add_argument("--only", choices=["batches", "streams", "overhead"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    decoder = load(options.target, draft=options.draft, tree=options.tree).replace(eos_token_ids=())
    texts = [decoder.encode(prompt.text, chat=True) for prompt in load_prompts(options.prompts, 64)]
    prompts = [text for text in texts if len(text) + 2 * options.tokens < LONGEST]
    print(f"loaded in {time.perf_counter() - start:.1f} s; {decoder.drafter.name} {decoder.drafter.topology}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for temperature in options.temperatures:
        options.temperature = temperature
        print(f"T={temperature:g}", flush=True)
        rows = found[f"T={temperature:g}"] = {}
        if options.only in (None, "batches"):
            rows |= batches(options, decoder, prompts)
        if options.only in (None, "streams"):
            rows |= asyncio.run(streams(options, decoder, prompts))
        if options.only == "overhead":
            rows |= overhead(options, decoder, prompts)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
