"""Measure a server under load from the client's side: requests arrive at random, or a fixed number runs at a time."""

import dataclasses
import http.client
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from polydraft.errors import FailureError, UsageError

Asked = str | list[Mapping[str, Any]]
"""A user's message, or all messages of a conversation."""

AS_IS = "as-is"
PEERS = ("transformers", "llama.cpp")
ARMS = ("auto", "off", AS_IS, *PEERS)
_PEER_SLOTS = 8
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class ServingLoad:
    """Load."""

    url: str = "http://127.0.0.1:8000"
    """Server to measure: polydraft serve, or any that speaks the OpenAI API."""
    model: str | None = None
    """Model to ask for  [default: the first one that the server lists]."""
    arms: str = "auto off"
    """What to compare, separated by spaces: auto and off (polydraft serve with and without speculation), as-is (any server),
    transformers and llama.cpp (peers, started automatically)."""
    peer_model: str = "smollm2"
    """Model for the peers: a folder in Hugging Face format, or a GGUF file for llama.cpp."""
    requests: int = 64
    """Requests per arm."""
    rate: float | None = None
    """Requests per second, arriving at random (Poisson)."""
    concurrency: int | None = None
    """Requests to keep running at the same time, instead of --rate."""
    max_tokens: int = 128
    """Generate at most this many tokens per answer."""
    temperature: float = 0.7
    """Sampling temperature; 0 decodes greedily."""
    first_limit: float = 1.0
    """Goodput counts only answers whose first token came within this many seconds."""
    token_limit: float = 0.1
    """Goodput counts only answers whose other tokens took at most this many seconds each, on average."""
    seed: int = 0
    """Seed of the arrival times."""
    api_key: str | None = None
    """API key to send to the server."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--url {self.url!r} is not the address of a server; allowed: http://HOST[:PORT]")
        if self.rate is None and self.concurrency is None:
            raise UsageError("no load given; give --rate (requests per second) or --concurrency (requests at the same time)")
        if self.rate is not None and self.concurrency is not None:
            raise UsageError(f"--rate {self.rate} and --concurrency {self.concurrency} cannot be combined; leave one out")
        for name in ("requests", "rate", "concurrency", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} {value} is out of range; allowed: above 0")
        wrong = [arm for arm in self.arms.split() if arm not in ARMS]
        if wrong or not self.arms.split():
            raise UsageError(f"unknown --arms {self.arms!r}; allowed: {', '.join(ARMS)}, separated by spaces")


@dataclass
class Sample:
    """The timing of one request, in seconds."""

    first: float = 0.0
    """From sending the request to the first text."""
    whole: float = 0.0
    """From sending the request to the end of the answer."""
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    """Times between parts of the answer."""
    error: str | None = None

    @property
    def per_token(self) -> float:
        """Mean time per token after the first text."""
        return (self.whole - self.first) / max(self.tokens - 1, 1)


class Client:
    """Streams answers from a server; uses only the standard library."""

    def __init__(self, options: ServingLoad) -> None:
        parts = urlsplit(options.url)
        self._host, self._port, self._options = parts.hostname or "", parts.port or 80, options
        self._headers = {"Content-Type": "application/json"}
        if options.api_key:
            self._headers["Authorization"] = f"Bearer {options.api_key}"
        self.model = options.model or self._first_model()
        self._salt = secrets.token_hex(8)
        """Joined with the arm's name, it keeps an arm from reusing prompts that another arm has read."""

    def _first_model(self) -> str:
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=30)) as connection:
            try:
                connection.request("GET", "/v1/models", headers=self._headers)
                return str(json.loads(connection.getresponse().read())["data"][0]["id"])
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                url = self._options.url
                raise FailureError(f"cannot get the models of {url} ({error}); check --url, or give --model") from None

    def ask(self, prompt: Asked, arm: str) -> Sample:
        """Time one answer."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body |= {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature}
        body |= {"stream_options": {"include_usage": True}} | (
            {"speculative": arm, "cache_salt": f"{self._salt} {arm}"} if arm in ("auto", "off") else {}
        )
        sample, start = Sample(), time.perf_counter()
        with closing(http.client.HTTPConnection(self._host, self._port, timeout=600)) as connection:
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    sample.error = f"HTTP {response.status}"
                else:
                    _read(response, sample, start)
            except (OSError, ValueError, http.client.HTTPException) as error:
                sample.error = f"{type(error).__name__}: {error}"
        sample.whole = time.perf_counter() - start
        return sample


def _read(response: http.client.HTTPResponse, sample: Sample, start: float) -> None:
    last, parts = start, 0
    for line in iter(response.readline, b""):
        if not line.startswith(b"data: {"):
            continue
        chunk, now = json.loads(line[6:]), time.perf_counter()
        if "error" in chunk:
            sample.error = str(chunk["error"].get("message"))
            return
        if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
            if parts:
                sample.gaps.append(now - last)
            else:
                sample.first = now - start
            last, parts = now, parts + 1
        if chunk.get("usage"):
            sample.tokens = int(chunk["usage"]["completion_tokens"])
    sample.tokens = sample.tokens or parts


def run_load(options: ServingLoad, prompts: Sequence[Asked], done: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """Measure all arms one after the other, with the same prompts and arrival times; return a summary of each.

    After each answer, `done` is called with the arm and the number of its answers so far.
    """
    from polydraft.lab.bench.serving_peers import command_of, running

    for arm in options.arms.split():
        if arm in PEERS:
            command_of(arm, options.peer_model, 1, 0)  # refuses missing programs and models before anything runs
    summaries = []
    for arm in options.arms.split():
        if arm in PEERS:
            try:
                with running(arm, options.peer_model, options.concurrency or _PEER_SLOTS) as (url, name):
                    client = Client(dataclasses.replace(options, url=url, model=name, api_key=None))
                    summaries.append(_measured(options, client, prompts, arm, done))
            except FailureError as error:  # a peer's failure is a result; the other arms' figures are kept
                summaries.append({"arm": arm, **summary(options, [Sample(error=str(error))], 1.0)})
        else:
            summaries.append(_measured(options, Client(options), prompts, arm, done))
    return summaries


def _measured(
    options: ServingLoad, client: Client, prompts: Sequence[Asked], arm: str, done: Callable[[str, int], None]
) -> dict[str, Any]:
    """Send all requests of an arm, and summarise them once all are answered."""
    client.ask(prompts[0], arm)  # warms the arm up; not counted
    samples: list[Sample] = []
    chance, room = random.Random(options.seed), threading.Semaphore(options.concurrency or 1)

    def one(number: int) -> None:
        samples.append(client.ask(prompts[number % len(prompts)], arm))
        done(arm, len(samples))
        room.release()

    threads = []
    due = start = time.perf_counter()
    for number in range(options.requests):
        if options.rate is None:
            room.acquire()
        else:
            due += chance.expovariate(options.rate)
            time.sleep(max(due - time.perf_counter(), 0.0))
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {"arm": arm, **summary(options, samples, time.perf_counter() - start)}


def summary(options: ServingLoad, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Summarise an arm's requests, which took `seconds` together."""
    good = [sample for sample in samples if sample.error is None]
    within = [one for one in good if one.first <= options.first_limit and one.per_token <= options.token_limit]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "first_error": next((sample.error for sample in samples if sample.error is not None), None),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(one.tokens for one in good) / seconds, 2),
        "requests_per_second": round(len(good) / seconds, 3),
        "goodput": round(len(within) / seconds, 3),
        "first_token_seconds": _percentiles([one.first for one in good]),
        "between_parts_seconds": _percentiles([gap for one in good for gap in one.gaps]),
        "per_token_seconds": _percentiles([one.per_token for one in good]),
        "whole_seconds": _percentiles([one.whole for one in good]),
    }


def format_load(found: Mapping[str, Any]) -> str:
    """Return a summary in one line."""
    rates = f"{found['tokens_per_second']:g} tokens/s, goodput {found['goodput']:g}/s, {found['errors']} errors"
    rates += f" (the first: {found['first_error']})" if found["errors"] else ""
    times = []
    for name, label in (("first_token", "first"), ("between_parts", "between"), ("whole", "whole")):
        times.append(f"{label} {'/'.join(f'{one:.3f}' for one in found[f'{name}_seconds'].values())} s")
    return f"{found['arm']}: {rates}; p50/p95/p99: {', '.join(times)}"


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles, by nearest rank."""
    ordered = sorted(values)
    return {
        f"p{percent}": round(ordered[min(-(-len(ordered) * percent // 100), len(ordered)) - 1], 5) if ordered else 0.0
        for percent in _PERCENTILES
    }
