"""Tensor-parallel processes: the leader's scheduler takes requests, the followers' do the same."""

from collections.abc import Callable, Container
from dataclasses import fields
from typing import Any

import torch

from polydraft.engine import Decoder, TokenSequence
from polydraft.models.placement import agreed
from polydraft.serve.request import Request

_CARRIED = [one.name for one in fields(TokenSequence) if one.init and one.name not in ("row", "generator", "assembler")]
"""Fields of a sequence that can be sent as they are."""


class Lockstep:
    """Keep the schedulers of tensor-parallel processes in lockstep: requests arrive and leave between the same two rounds.

    Everything else follows: every process admits the same sequences to the same slots, drafts and verifies with the same random
    numbers, and computes its slices of the same passes.

    Parameters
    ----------
    decoder : Decoder
    leads : bool
        Whether requests come to this process.
    broadcast : callable
        Returns the leader's argument in every process.
    """

    def __init__(self, decoder: Decoder, *, leads: bool, broadcast: Callable[[Any], Any] = agreed) -> None:
        self._decoder, self.leads, self._broadcast, self._last = decoder, leads, broadcast, 0
        self._requests: dict[int, Request] = {}
        """By numbers that all processes share."""

    def agree(
        self, arrived: list[Request], cancelled: list[Request], stopping: bool, unfinished: Container[Request]
    ) -> tuple[list[Request], list[Request], bool]:
        """Return the leader's arguments in every process: who arrived, who cancelled, and whether to stop."""
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

    def _unpacked(self, speculative: str, texts: list[dict[str, Any]]) -> Request:
        sequences = []
        for text in texts:
            generator, stop = torch.Generator(), text.pop("stop")
            generator.set_state(text.pop("state"))
            sequences.append(TokenSequence(generator=generator, assembler=self._decoder.assembler(stop), **text))
        return Request(sequences, speculative)


def _packed(request: Request) -> tuple[str, list[dict[str, Any]]]:
    assert not request.constrained, "grammars are refused in tensor-parallel processes"
    return request.speculative, [
        {name: getattr(one, name) for name in _CARRIED} | {"state": one.generator.get_state(), "stop": one.assembler.stop}
        for one in request.sequences
    ]
