"""Processes that share a model: the first one's scheduler takes requests, the others' do as it does."""

from collections.abc import Container
from dataclasses import fields
from typing import Any

import torch

from polydraft.engine import Decoder, TokenSequence
from polydraft.models.placement import agreed, is_follower
from polydraft.serve.ticket import Ticket

_CARRIED = [one.name for one in fields(TokenSequence) if one.init and one.name not in ("row", "generator", "assembler")]
"""What a text is asked for, but for what cannot be sent as it is."""


class Company:
    """Let the schedulers of all processes see the same requests come and go between the same two rounds.

    Whatever else they do follows from that: every process admits the same texts to the same slots, drafts and verifies by the
    same random numbers, and computes its slices of the same passes.

    Parameters
    ----------
    decoder : Decoder
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._last = decoder, 0
        self.leads = not is_follower()
        """Whether requests come to this process."""
        self._tickets: dict[int, Ticket] = {}
        """By numbers that all processes know them by."""

    def agree(
        self, came: list[Ticket], left: list[Ticket], stopping: bool, unanswered: Container[Ticket]
    ) -> tuple[list[Ticket], list[Ticket], bool]:
        """Return who came, who left and whether to stop, as the first process says."""
        self._tickets = {number: ticket for number, ticket in self._tickets.items() if ticket in unanswered or ticket in left}
        if self.leads:
            fresh = dict(enumerate(came, start=self._last + 1))
            self._last += len(fresh)
            self._tickets |= fresh
            gone = [number for number, ticket in self._tickets.items() if ticket in left]
            agreed(({number: _packed(ticket) for number, ticket in fresh.items()}, gone, stopping))
            return came, left, stopping
        packed, gone, stopping = agreed(None)
        fresh = {number: self._unpacked(*one) for number, one in packed.items()}
        self._tickets |= fresh
        return list(fresh.values()), [self._tickets[number] for number in gone if number in self._tickets], stopping

    def _unpacked(self, speculative: str, texts: list[dict[str, Any]]) -> Ticket:
        sequences = []
        for text in texts:
            generator, stop = torch.Generator(), text.pop("stop")
            generator.set_state(text.pop("state"))
            sequences.append(TokenSequence(generator=generator, assembler=self._decoder.assembler(stop), **text))
        return Ticket(sequences, speculative)


def _packed(ticket: Ticket) -> tuple[str, list[dict[str, Any]]]:
    assert not ticket.constrained, "grammars are refused where a model is shared"
    return ticket.speculative, [
        {name: getattr(one, name) for name in _CARRIED} | {"state": one.generator.get_state(), "stop": one.assembler.stop}
        for one in ticket.sequences
    ]
