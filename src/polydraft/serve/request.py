"""Requests in the scheduler: sequences, events, the queue for slots, and how tensor-parallel processes share them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from polydraft.engine import Decoder
from polydraft.engine.sequence import Emitted, TokenSequence
from polydraft.models.placement import agreed
from polydraft.serve.parsing import Parser

AUTO, OFF = "auto", "off"
_GRAMMAR, _PREDICTION = "+grammar", "+prediction"


@dataclass(frozen=True, slots=True)
class Progress:
    """What one round added to one sequence of a request."""

    index: int
    """Which sequence of the request."""
    emitted: Emitted
    error: Exception | None = None
    """Why the sequence failed, or None."""


@dataclass(eq=False)
class Request:
    """A request's sequences, and the events for its handler."""

    sequences: Sequence[TokenSequence]
    speculative: str = AUTO
    """``"auto"``, ``"off"``, or a tree."""
    loop: asyncio.AbstractEventLoop | None = None
    """Event loop of the handler, or None without one."""
    constrained: bool = False
    """Whether its sequences follow a grammar."""
    predicted: bool = False
    """Whether it has a prediction."""
    parsers: Sequence[Parser] = ()
    """A parser for the text of each sequence; empty if texts are nothing but content."""
    arrived: float = field(default_factory=time.perf_counter)
    admitted: dict[int, float] = field(default_factory=dict)
    """When each sequence got its slot."""
    last_emitted: dict[int, float] = field(default_factory=dict)
    """When each sequence got its last tokens."""
    cancelled: bool = False
    client: str = ""
    """Digest of the API key, or address. Clients take turns for slots."""
    events: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    """Filled in the event loop only. Unbounded (at most one event per token), so slow readers never block the scheduler."""

    @property
    def lane(self) -> str:
        """Name of the lane that this request needs.

        Grammars and predictions have their own: masks of a grammar come from the host, which rules out captures, and
        predictions make rounds larger.
        """
        return self.speculative + (_GRAMMAR if self.constrained else "") + (_PREDICTION if self.predicted else "")


class SlotQueue:
    """Sequences that wait for slots.

    The next slot goes to the client that holds the fewest slots, and among its requests to the one that holds the fewest. Ties
    go to the request that has waited longest since it arrived or had its last turn.
    """

    def __init__(self) -> None:
        self._waiting: dict[Request, list[int]] = {}
        """Indices of waiting sequences, by request, in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        """Queue all sequences of a request."""
        self._waiting[request] = list(range(len(request.sequences)))

    def next(self, held: Mapping[Request, int]) -> tuple[Request, int]:
        """Remove and return the next sequence, given how many slots each request holds."""
        by_client = Counter[str]()
        for request, slots in held.items():
            by_client[request.client] += slots
        request = min(self._waiting, key=lambda one: (by_client[one.client], held.get(one, 0)))
        index, *rest = self._waiting.pop(request)
        if rest:
            self._waiting[request] = rest
        return request, index

    def remove(self, request: Request) -> list[tuple[Request, int]]:
        """Remove and return all sequences of a request."""
        return [(request, index) for index in self._waiting.pop(request, ())]

    def clear(self) -> list[tuple[Request, int]]:
        """Remove and return everything."""
        return [pair for request in tuple(self._waiting) for pair in self.remove(request)]


_CARRIED = [one.name for one in fields(TokenSequence) if one.init and one.name not in ("row", "generator", "assembler")]
"""Fields of a sequence that are sent to other processes unchanged."""


class Lockstep:
    """Keep tensor-parallel schedulers in lockstep: in all processes, requests arrive and leave between the same two rounds.

    That is all they must agree on. From there, every process admits the same sequences to the same slots, draws the same random
    numbers, and computes its slice of the same passes.

    Parameters
    ----------
    decoder : Decoder
    leads : bool
        Whether this is the process that receives requests.
    broadcast : callable
        Returns the leader's argument in every process.
    """

    def __init__(self, decoder: Decoder, *, leads: bool, broadcast: Callable[[Any], Any] = agreed) -> None:
        self._decoder, self.leads, self._broadcast, self._last = decoder, leads, broadcast, 0
        self._requests: dict[int, Request] = {}
        """By numbers that all processes know."""

    def agree(
        self, arrived: list[Request], cancelled: list[Request], stopping: bool, unfinished: Container[Request]
    ) -> tuple[list[Request], list[Request], bool]:
        """Return the leader's arguments in every process: new requests, cancelled ones, and whether to stop."""
        self._requests = {
            number: request for number, request in self._requests.items() if request in unfinished or request in cancelled
        }
        if self.leads:
            new = dict(enumerate(arrived, start=self._last + 1))
            self._last += len(new)
            self._requests |= new
            gone = [number for number, request in self._requests.items() if request in cancelled]
            self._broadcast(({number: _packed(request) for number, request in new.items()}, gone, stopping))
            return arrived, cancelled, stopping
        packed, gone, stopping = self._broadcast(None)
        new = {number: self._unpacked(*one) for number, one in packed.items()}
        self._requests |= new
        return list(new.values()), [self._requests[number] for number in gone if number in self._requests], stopping

    def _unpacked(self, speculative: str, client: str, texts: list[dict[str, Any]]) -> Request:
        sequences = []
        for text in texts:
            generator, written = torch.Generator(), text.pop("written")
            generator.set_state(text.pop("state"))
            sequences.append(TokenSequence(generator=generator, assembler=self._decoder.assembler(*written), **text))
        return Request(sequences, speculative, client=client)


def _packed(request: Request) -> tuple[str, str, list[dict[str, Any]]]:
    assert not request.constrained, "grammars are refused in tensor-parallel processes"
    texts = [
        {name: getattr(one, name) for name in _CARRIED}
        | {"state": one.generator.get_state(), "written": (one.assembler.stop, one.assembler.markers)}
        for one in request.sequences
    ]
    return request.speculative, request.client, texts
