"""What first requests would otherwise wait for: rounds are captured and timed beforehand, kernels compiled in threads."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from polydraft.backends import triton as kernels
from polydraft.engine.round import State, distributions
from polydraft.engine.sequence import StopReason, TokenSequence
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import READING_COUNTS, READING_SIZES, reading_count
from polydraft.sampling import SamplingParams
from polydraft.trees import DraftTree, Topology
from polydraft.verify import Walk

if TYPE_CHECKING:
    from polydraft.engine.decoder import Decoder
    from polydraft.engine.loop import Engine

ROUNDS, NEW_TOKENS = 10, 64
"""Rounds of each kind, which is captured when it comes for the second time and timed from then on; room for their tokens."""
USUAL_LENGTH = 512
_SHORTEST_POWER = 5
_SHORT = 2 * NEW_TOKENS
_BEHIND = 8
"""Tokens of a text that slots hold already."""
_LOGGER = logging.getLogger("polydraft")
_MOST_SLOTS = 4096
"""Slots of a cache that exists only to compile: what large batches reserve may be all the memory there is."""


def rehearse(
    decoder: "Decoder",
    engine: "Engine",
    samplings: Sequence[SamplingParams],
    *,
    longest: int,
    groups: Sequence[Sequence[Sequence[int]]] = (),
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run rounds of all kinds, with all numbers of rows and for texts of all lengths, so that no request meets a new one.

    Parameters
    ----------
    decoder : Decoder
        Makes the texts.
    engine : Engine
        Without texts of its own.
    samplings : sequence of SamplingParams
        Each is rehearsed by itself, and all of them side by side.
    longest : int
        Prompt and new tokens of the longest text.
    groups : sequence of lists of prompts
        To read, all of a group at once; see `groups_to_read`.
    stopped : function
        Asked after every round whether to stop.
    progress : function, optional
        Called with every length that is about to be tried.
    """
    target, new_tokens = decoder.target, min(NEW_TOKENS, longest - 1)
    casts = [[params] for params in samplings]
    if min(len(samplings), engine.slots.most) > 1:
        casts.append(sorted(samplings, key=lambda one: one.temperature))  # so that two of them are mixed as well

    def texts(prompts: Sequence[Sequence[int]], cast: Sequence[SamplingParams], limit: int) -> list[TokenSequence]:
        return [
            decoder.sequence(
                prompt,
                cast[row % len(cast)],
                seed=row,
                seeded=False,
                max_new_tokens=limit,
                eos_token_ids=frozenset(),
            )
            for row, prompt in enumerate(prompts)
        ]

    for cast in casts:
        for length in lengths_of(longest, target.device):
            if stopped():
                return
            if progress is not None:
                progress(length)
            prompt = prompt_of(length, new_tokens, target.vocab_size)
            for rows in (size for size in engine.slots.sizes if size >= min(len(cast), 2)):
                number, kinds = 0, 1
                while number < kinds and not stopped():
                    sequences = texts([prompt] * rows, cast, new_tokens)
                    with _at_work(engine, sequences):
                        engine.step()  # after which there are as many rows as there are texts
                        last, kinds = engine.stats.rounds + ROUNDS, engine.session.num_kinds
                        with _only(engine, number):
                            while not engine.done and engine.stats.rounds < last and not stopped():
                                engine.step()
                    number += 1
    for group in groups:
        if stopped():
            return
        with _at_work(engine, texts(group, samplings[:1], 1)):
            while not engine.done and not stopped():
                engine.step()


@contextmanager
def _at_work(engine: "Engine", sequences: Sequence[TokenSequence]) -> Iterator[None]:
    """Let an engine have some texts."""
    for sequence in sequences:
        engine.add(sequence)
    yield
    for sequence in sequences:
        if not sequence.done:
            engine.end(sequence, StopReason.CANCELLED, 0)


@contextmanager
def _only(engine: "Engine", number: int) -> Iterator[None]:
    """Let all rounds be of one kind."""
    engine.session.rehearse(number)
    try:
        yield
    finally:
        engine.session.rehearse(None)


def lengths_of(longest: int, device: torch.device) -> list[int]:
    """Return the lengths of texts to rehearse, so that none up to `longest` meets anything new."""
    if device.type != "cuda":  # nothing there depends on the length, and reading takes its time
        return [min(longest - 1, _SHORT)]
    # A capture serves up to the next power of two. Long ones first: captures are lost when memory grows.
    powers = range((longest - 1).bit_length(), _SHORTEST_POWER, -1)
    return [min(2**power, longest - 1) for power in powers] or [longest - 1]


def prompt_of(length: int, new_tokens: int, vocab_size: int) -> list[int]:
    """Return a text that is `length` tokens long before its last new one."""
    return [token % vocab_size for token in range(max(length + 1 - new_tokens, 1))]


def groups_to_read(
    longest: int, chunk: int, slots: int, vocab_size: int, device: torch.device, *, behind: int = _BEHIND
) -> list[list[list[int]]]:
    """Return prompts to read together, of all sizes and counts, at the beginning of a text and behind `behind` tokens.

    Each group comes twice, as a pass is captured when it comes for the second time. The first one leaves in some slots what
    others are read behind, where slots keep their texts; elsewhere a prompt is read behind its own first chunk.
    """
    if device.type != "cuda":
        return []
    held = [token % vocab_size for token in range(behind + 2)]
    groups, first = [[held] * min(READING_COUNTS[-1], slots)], _BEHIND
    for before in (held[:behind], []):
        fitting = [size for size in READING_SIZES if size <= chunk and len(before) + size + 2 <= longest]
        for size, count in itertools.product(fitting * 2, READING_COUNTS):
            if reading_count(size, min(count, chunk // size)) == count <= slots:
                # The last token of a prompt is not read but drafted behind.
                sizes = range(first + 1, first + 1 + count)
                groups.append([[*before, *((own + place) % vocab_size for place in range(size + 1))] for own in sizes])
                first += count
    return groups


@contextmanager
def compiling_ahead(state: State, walk: Walk) -> Iterator[None]:
    """Compile the kernels of a batch's first round in several threads.

    A GPU compiles each kernel when it is first launched, and a round launches some forty, one after the other: 16 seconds on a
    fast machine. Most of a compiler's work needs no Python, so threads that launch later kernels on made-up values shorten
    that. Kernels that they miss, because a round launches them in another form, are compiled in the round as ever. See
    docs/decisions/045-kernels-compile-in-threads.md.

    They work in the order of the round's stream, so that whatever one of them makes for all is there for all, and write to
    nothing that the round reads. It waits for them at the end: the next round is captured, and nobody else may work then.
    """
    device, threads = state.target.device, list[threading.Thread]()
    if kernels.are_new(device) and isinstance(state.target, HFModel):
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        for work in (_pass_through_target, _draw_and_verify):
            threads.append(threading.Thread(target=_quietly, args=(work, state, walk, stream), daemon=True))
            threads[-1].start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _quietly(work: Callable[[State, Walk], None], state: State, walk: Walk, stream: torch.cuda.Stream | None) -> None:
    """Do some work; what goes wrong here goes wrong in the round as well, and is told there."""
    try:
        with torch.inference_mode(), torch.cuda.stream(stream):  # both are a thread's own; without a stream nothing changes
            work(state, walk)
    except Exception as error:
        _LOGGER.debug("compiling ahead failed: %s", error)


def _pass_through_target(state: State, walk: Walk) -> None:
    """Pass a tree through the target, in a memory of its own, where kernels of ours are its layers.

    Torch's layers need no compiling, and set switches of the whole process.
    """
    target, session, rows = state.target, state.session, len(state.tail_B2)
    if not isinstance(target, HFModel) or target.fused is None:
        return
    topology = Topology.likeliest(session.num_nodes, session.depth) if session.depth else Topology()
    tokens_BN = torch.zeros(rows, topology.num_nodes, dtype=torch.long, device=target.device)
    tree = DraftTree.from_topology(topology, tokens_BN, (), tokens_BN[0])
    span = state.memory.context.span or session.num_nodes
    if rows * span > _MOST_SLOTS:
        return
    context = target.start(rows, span)
    context.places = session.num_nodes
    context.fix_span(span)
    context.extend(tree.tokens_BN, tree.block())


def _draw_and_verify(state: State, walk: Walk) -> None:
    """Build a tree of no meaning, and verify it."""
    target, session = state.target, state.session
    assert isinstance(target, HFModel)
    tree = session.made_up(target.dtype)
    if tree is None:
        return
    width = target.hidden_size * (1 + len(target.taps))
    features_BNF = torch.zeros(*tree.tokens_BN.shape, width, dtype=target.dtype, device=target.device)
    numbers = walk.uniforms(session.scheme, session.depth)
    uniforms_BU = torch.zeros(len(tree.tokens_BN), numbers, dtype=torch.float64, device=target.device)
    walk.run(session.scheme, tree, distributions(state, features_BNF), uniforms_BU)
