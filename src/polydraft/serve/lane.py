"""A lane: an engine that drafts in one way, with the requests in its slots and in its queue."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from polydraft.draft import TreeDrafter
from polydraft.draft.forced import with_forced
from polydraft.draft.predicted import PLACES
from polydraft.engine import Decoder, Engine, StopReason
from polydraft.engine.warm_up import USUAL_LENGTH, groups_to_read, prompt_of, rehearse
from polydraft.engine.workspace import Workspace
from polydraft.errors import UsageError
from polydraft.models import Context
from polydraft.models.blocks import Pool
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.serve.request import AUTO, OFF, Progress, Request, SlotQueue
from polydraft.trees import DynamicShape, Topology, parse_dynamic, parse_tree

_SHORT = 4
"""Prompt tokens of the text that `Lane.reserve` generates."""
_MOST_NODES, _MOST_LEVELS = 128, 16
"""Limits of a request's own tree: memory for its candidates is reserved in advance."""
_LARGEST_TREES = (
    Topology(Topology.fork(-(-_MOST_NODES // _MOST_LEVELS), _MOST_LEVELS).parents[:_MOST_NODES]),
    DynamicShape(nodes=_MOST_NODES, depth=_MOST_LEVELS, adaptive=False),
)


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """Size of a lane."""

    slots: int
    slot_tokens: int
    """Most tokens of a sequence, prompt included."""
    chunk_tokens: int
    """Most prompt tokens to read between two rounds."""
    stall_seconds: float | None = None
    """Longest time for which reading prompts may hold up running sequences between two rounds."""
    places: tuple[int, ...] = ()
    """Minimum of places for candidates in each context; lanes that reuse each other's memory need the same."""


class Lane:
    """Run sequences in slots, with one way of drafting, and queue the others.

    Parameters
    ----------
    decoder : Decoder
    options : LaneOptions
    memory : sequence of Context
        Contexts that another lane released, to be reused where they fit.
    prefixes : Prefixes, optional
        Cache of text beginnings, shared by lanes.
    pool : Pool, optional
        Memory that the texts of all lanes take blocks from as they grow; without it, each slot has memory for the longest text.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: LaneOptions,
        memory: Sequence[Context] = (),
        prefixes: Prefixes | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.decoder, self._options, self._prefixes, self._pool = decoder, options, prefixes, pool
        self.waiting = SlotQueue()
        self.running: dict[int, tuple[Request, int]] = {}
        """Requests and sequence indices by row number; numbers are never reused."""
        self._engine: Engine | None = None
        self._workspace: Workspace | None = None
        self._rows = 0
        self._memory = list(memory)
        """Unused contexts, kept for their storage."""
        self._dirty = False
        """Whether that storage may hold NaNs."""

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.waiting or self.running)

    def step(self, awaited: bool = False) -> list[tuple[Request, Progress]]:
        """Admit waiting sequences to free slots and run one round; `awaited` if another lane waits for it to end."""
        engine = self._opened()
        held = Counter(request for request, _ in self.running.values())
        while self.waiting and engine.free_slots:
            request, index = self.waiting.next(held)
            held[request] += 1
            sequence = request.sequences[index]
            sequence.row, self._rows = self._rows, self._rows + 1
            self.running[sequence.row] = request, index
            request.admitted[index] = time.perf_counter()
            engine.add(sequence)
        if not self.running:
            return []
        events = []
        for emitted in engine.step(awaited):
            ended = emitted.stop_reason is not None
            request, index = self.running.pop(emitted.row) if ended else self.running[emitted.row]
            events.append((request, Progress(index, emitted, request.sequences[index].failure)))
        return events

    def warm_up(self, samplings: Sequence[SamplingParams], stopped: Callable[[], bool]) -> None:
        """Run rounds of every kind, text length and number of rows before the first request, until `stopped` says so.

        Sampling parameters are rehearsed one by one, then all of them side by side.
        """
        if not samplings:
            return
        options, target = self._options, self.decoder.target
        chunk = min(options.chunk_tokens, PREFILL_CHUNK)
        groups = groups_to_read(options.slot_tokens, chunk, options.slots, target.vocab_size, target.device)
        longest = min(USUAL_LENGTH, options.slot_tokens)
        rehearse(self.decoder, self._opened(), samplings, longest=longest, groups=groups, stopped=stopped)
        if self._prefixes is not None:
            self._prefixes.clear()

    def cancel(self, request: Request) -> None:
        """End all sequences of a request."""
        for _, index in self.waiting.remove(request):
            request.sequences[index].cut(StopReason.CANCELLED, 0)
        for row, (owner, index) in list(self.running.items()):
            if owner is request:
                del self.running[row]
                sequence = request.sequences[index]
                assert self._engine is not None
                self._engine.end(sequence, StopReason.CANCELLED, len(sequence.new_tokens))

    def reset(self) -> list[tuple[Request, int]]:
        """Drop all running sequences after a failure, and return them; memory is wiped before the next step."""
        lost = list(self.running.values())
        self.running.clear()
        if self._pool is not None:
            self._pool.evicted.difference_update(request.sequences[index] for request, index in lost)
        self._forget()
        self._dirty = True  # wiped before the next step at the latest: wiping now may fail, if it was the device that failed
        if self._pool is not None:
            with suppress(RuntimeError):  # try now: other lanes wait for the blocks of these sequences
                self._wipe()
                self._give_back()
        return lost

    def release(self) -> list[Context]:
        """Return the memory of an idle lane, for another lane to adopt."""
        assert not self.busy, "its sequences need the memory"
        self._forget()
        self._wipe()
        self._give_back()
        memory, self._memory = self._memory, []
        return memory

    def _give_back(self) -> None:
        """Return all blocks to the pool except those that idle slots need."""
        for context in self._memory:
            for row in range(self._options.slots):
                context.cache.trim(row, context.idle_slots)

    def _forget(self) -> None:
        self._memory, self._engine, self._workspace = self._contexts, None, None

    @torch.inference_mode()
    def _wipe(self) -> None:
        if self._dirty:
            for context in self._memory:
                for row in range(len(context.every_row("lengths"))):
                    context.cache.clear(row)
            self._dirty = False

    @property
    def _contexts(self) -> list[Context]:
        workspace = self._workspace
        return [*self._memory, *(() if workspace is None else workspace.contexts)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that slots hold permanently, outside the pool."""
        return sum(context.nbytes for context in self._contexts if not context.lent)

    @property
    def least_bytes(self) -> tuple[int, int]:
        """Bytes of the pool that all slots take when idle, and how many more the longest text takes."""
        workspace = self._opened().workspace
        return self._options.slots * workspace.idle_bytes, workspace.room(self._options.slot_tokens, 2)

    @property
    def used_tokens(self) -> int:
        """Tokens of all running sequences, prompts included."""
        running = [request.sequences[index] for request, index in tuple(self.running.values())]
        return sum(len(one.prompt) + len(one.new_tokens) for one in running)

    def reserve(self) -> None:
        """Allocate all memory for keys and values: generate a short text, then write to every byte."""
        engine = self._opened()
        prompt = prompt_of(_SHORT, 1, self.decoder.target.vocab_size)
        engine.add(self.decoder.sequence(prompt, IDLE, seed=0, max_new_tokens=1, space=None))
        while not engine.done:
            engine.step()
        if self.cache_bytes:
            self._forget()
            self._dirty = True
            self._wipe()  # the system may provide memory only once it is written to

    def _opened(self) -> Engine:
        """Return the engine, created on first use with all the memory that it will ever need."""
        if self._engine is None:
            decoder, options = self.decoder, self._options
            params = RowParams((IDLE,) * options.slots)
            workspace = Workspace(decoder.target, decoder.drafter, params, decoder.graphs, decoder.ahead, self._pool)
            self._wipe()
            workspace.adopt(self._memory)
            self._workspace = workspace
            workspace.reserve(options.slot_tokens, options.places)
            self._engine = Engine(
                workspace,
                walk=decoder.walk,
                prefixes=self._prefixes,
                elastic=True,
                chunk=options.chunk_tokens,
                stall=options.stall_seconds,
                isolate=True,
            )
        return self._engine


def with_speculation(decoder: Decoder, speculative: str) -> Decoder:
    """Return a decoder that drafts as a request says: as the server does, not at all, or with the request's own tree."""
    if speculative == AUTO:
        return decoder
    if speculative == OFF:
        return decoder.replace(drafter=None)
    model = decoder.drafter.model
    if model is None:
        raise UsageError(f"speculative tree {speculative!r}: this server has no draft; allowed: auto, off")
    shape = parse_dynamic(speculative) or parse_tree(speculative)
    nodes = shape.nodes if isinstance(shape, DynamicShape) else shape.num_nodes
    for count, most, name in ((nodes, _MOST_NODES, "nodes"), (shape.depth, _MOST_LEVELS, "levels")):
        if count > most:
            raise UsageError(f"speculative tree {speculative!r} has {count} {name}; allowed: at most {most}")
    return decoder.replace(drafter=TreeDrafter(model, shape), walk="auto")


def most_places(decoder: Decoder, slots: int, *, own_trees: bool) -> tuple[int, ...]:
    """Return the most places for candidates that any request needs, per context: the target's, then those of the drafts."""
    drafter = decoder.drafter
    trees = [TreeDrafter(drafter.model, one) for one in _LARGEST_TREES] if own_trees and drafter.model is not None else []
    params = RowParams((IDLE,) * slots)
    sessions = [with_forced(one).start(params, decoder.target) for one in (drafter, *trees)]
    found = [(session.num_nodes + PLACES, *(context.places for context in session.contexts)) for session in sessions]
    return tuple(map(max, zip(*found, strict=True)))
