"""Slots of one way of drafting: an engine, and which requests' texts are in it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.engine.sequence import Emitted
from polydraft.engine.warm_up import USUAL_LENGTH, groups_to_read, prompt_of, rehearse
from polydraft.engine.workspace import Workspace
from polydraft.models import Context
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.serve.ticket import Progress, Ticket

_SHORT = 4
"""Tokens of a text that makes memories show their shapes."""


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """How large a lane is."""

    slots: int
    slot_tokens: int
    """Most tokens of a text."""
    chunk_tokens: int
    """Tokens of prompts that are read between two rounds."""
    stall_seconds: float | None = None
    """Seconds that reading them may keep texts at work waiting."""
    places: tuple[int, ...] = ()
    """Room for candidates behind a text, at least, in each of the lane's contexts: lanes that hand memory on need the same."""


class Waiting:
    """Texts that wait for slots. Requests take turns: the next slot is for whoever holds the fewest.

    So a request of many texts leaves the next free slot to one that has none, and goes on with one slot at least. Of those that
    hold equally many, whoever has waited longest since it came, or since its last turn.
    """

    def __init__(self) -> None:
        self._texts: dict[Ticket, list[int]] = {}
        """Those of each request that wait, longest first."""

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))

    def add(self, ticket: Ticket) -> None:
        """Let all texts of a request wait."""
        self._texts[ticket] = list(range(len(ticket.sequences)))

    def next(self, held: Mapping[Ticket, int]) -> tuple[Ticket, int]:
        """Take the text whose turn it is, where requests hold so many slots."""
        ticket = min(self._texts, key=lambda one: held.get(one, 0))
        index, *rest = self._texts.pop(ticket)
        if rest:
            self._texts[ticket] = rest
        return ticket, index

    def remove(self, ticket: Ticket) -> list[tuple[Ticket, int]]:
        """Let the texts of a request wait no more; return them."""
        return [(ticket, index) for index in self._texts.pop(ticket, ())]

    def clear(self) -> list[tuple[Ticket, int]]:
        """Let nobody wait any more; return who did."""
        return [pair for ticket in tuple(self._texts) for pair in self.remove(ticket)]


class Lane:
    """Texts that are drafted for in one way, some at work and some waiting.

    Parameters
    ----------
    decoder : Decoder
    options : LaneOptions
    memory : sequence of Context
        What another lane has released; taken over as far as it fits.
    """

    def __init__(self, decoder: Decoder, options: LaneOptions, memory: Sequence[Context] = ()) -> None:
        self.decoder, self._options = decoder, options
        self.waiting = Waiting()
        self.running: dict[int, tuple[Ticket, int]] = {}
        """By the row's number, which is never given twice."""
        self._engine: Engine | None = None
        self._workspace: Workspace | None = None
        self._rows = 0
        self._memory = list(memory)
        """Contexts that nobody uses, kept for their storage."""
        self._spoilt = False
        """Whether what is stored there may be no numbers."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.running)

    def step(self, awaited: bool = False) -> list[tuple[Ticket, Progress]]:
        """Let waiting texts in and run one round; return what it brought. `awaited` if texts of another lane wait for it."""
        engine = self._opened()
        held = Counter(ticket for ticket, _ in self.running.values())
        while self.waiting and engine.free_slots:
            ticket, index = self.waiting.next(held)
            held[ticket] += 1
            sequence = ticket.sequences[index]
            sequence.row, self._rows = self._rows, self._rows + 1
            self.running[sequence.row] = ticket, index
            ticket.admitted[index] = time.perf_counter()
            engine.add(sequence)
        return [self._progress(emitted) for emitted in engine.step(awaited)] if self.running else []

    def _progress(self, emitted: Emitted) -> tuple[Ticket, Progress]:
        ticket, index = self.running[emitted.row]
        if emitted.stop_reason is not None:
            del self.running[emitted.row]
        return ticket, Progress(index, emitted, ticket.sequences[index].failure)

    def warm_up(self, samplings: Sequence[SamplingParams], stopped: Callable[[], bool]) -> None:
        """Rehearse rounds of all kinds, for texts of usual lengths, with all numbers of rows, until told to stop.

        Sampling parameters are rehearsed one by one, and all of them side by side.
        """
        if not samplings:
            return
        options, target = self._options, self.decoder.target
        chunk = min(options.chunk_tokens, PREFILL_CHUNK)
        groups = groups_to_read(options.slot_tokens, chunk, options.slots, target.vocab_size, target.device)
        longest = min(USUAL_LENGTH, options.slot_tokens)
        rehearse(self.decoder, self._opened(), samplings, longest=longest, groups=groups, stopped=stopped)

    def cancel(self, ticket: Ticket) -> list[TokenSequence]:
        """End all texts of a request; return them."""
        ended = [ticket.sequences[index] for _, index in self.waiting.remove(ticket)]
        for sequence in ended:
            sequence.cut(StopReason.CANCELLED, 0)
        for row, (owner, index) in list(self.running.items()):
            if owner is ticket:
                del self.running[row]
                sequence = ticket.sequences[index]
                assert self._engine is not None
                self._engine.end(sequence, StopReason.CANCELLED, len(sequence.new_tokens))
                ended.append(sequence)
        return ended

    def reset(self, *, waiting_too: bool = False) -> list[tuple[Ticket, int]]:
        """Let the texts at work go, in memory that nobody knows the state of; return them, and those that wait if told so."""
        lost = list(self.running.values())
        self.running.clear()
        self._forget()
        self._spoilt = True  # wiped when it is used again: the device may be what has failed
        return lost + self.waiting.clear() if waiting_too else lost

    def release(self) -> list[Context]:
        """Forget all texts and have no memory any more; return it, for another lane to go on with."""
        assert not self.busy, "texts need it"
        self._forget()
        self._wipe()
        memory, self._memory = self._memory, []
        return memory

    def _forget(self) -> None:
        self._memory, self._engine, self._workspace = self._contexts, None, None

    @torch.inference_mode()
    def _wipe(self) -> None:
        if self._spoilt:
            for context in self._memory:
                context.wipe()
            self._spoilt = False

    @property
    def _contexts(self) -> list[Context]:
        workspace = self._workspace
        return [*self._memory, *(() if workspace is None else workspace.contexts)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, of all slots."""
        return sum(context.nbytes for context in self._contexts)

    def reserve(self) -> None:
        """Take all memory for keys and values now, by writing a short text and then to every byte."""
        engine = self._opened()
        prompt = prompt_of(_SHORT, 1, self.decoder.target.vocab_size)
        engine.add(self.decoder.sequence(prompt, IDLE, seed=0, max_new_tokens=1))
        while not engine.done:
            engine.step()
        self._forget()
        self._spoilt = True
        self._wipe()  # a system may lend memory only when it is written to

    def _opened(self) -> Engine:
        """Return the engine; its memory is as large as it will ever be from the start."""
        if self._engine is None:
            decoder, options = self.decoder, self._options
            params = RowParams((IDLE,) * options.slots)
            workspace = Workspace(decoder.target, decoder.drafter, params, decoder.graphs, decoder.ahead)
            self._wipe()
            workspace.adopt(self._memory)
            self._workspace = workspace
            workspace.reserve(options.slot_tokens, options.places)
            self._engine = Engine(
                workspace,
                walk=decoder.walk,
                reuse=True,
                elastic=True,
                chunk=options.chunk_tokens,
                stall=options.stall_seconds,
                isolate=True,
            )
        return self._engine
