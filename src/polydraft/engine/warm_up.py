"""Warm-up: capturing and timing rounds before the first requests, which would otherwise wait for it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from polydraft.devices import captures
from polydraft.engine.sequence import StopReason, TokenSequence
from polydraft.models.hf_context import READING_COUNTS, READING_SIZES, reading_count
from polydraft.operations import operation
from polydraft.sampling import SamplingParams

if TYPE_CHECKING:
    from polydraft.engine.decoder import Decoder
    from polydraft.engine.loop import Engine
    from polydraft.engine.round import State
    from polydraft.verify import Walk

ROUNDS, NEW_TOKENS = 10, 64
"""Rounds of each kind (captured in the second one, timed from then on), and room for their tokens."""
USUAL_LENGTH = 512
_SHORTEST_POWER = 5
_SHORT = 2 * NEW_TOKENS
_BEHIND = 8
"""Tokens of a text that are already cached."""


def rehearse(
    decoder: "Decoder",
    engine: "Engine",
    samplings: Sequence[SamplingParams],
    *,
    longest: int,
    groups: Sequence[Sequence[Sequence[int]]] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Run every kind of round, with every number of rows and for texts of all lengths, so that no request needs a new capture.

    Parameters
    ----------
    decoder : Decoder
        Makes the texts.
    engine : Engine
        Must have no texts.
    samplings : sequence of SamplingParams
        Rehearsed one by one, then all together in one batch.
    longest : int
        Most tokens of a text, prompt included.
    groups : sequence of lists of prompts
        Prompts to read together, group by group; see `groups_to_read`.
    stopped : function
        Called after every round; True ends the rehearsal.
    """
    target, new_tokens = decoder.target, min(NEW_TOKENS, longest - 1)
    casts = [[params] for params in samplings]
    if min(len(samplings), engine.slots.most) > 1:
        casts.append(sorted(samplings, key=lambda one: one.temperature))  # sorted, so that two rows already mix greedy and not

    def texts(
        prompts: Sequence[Sequence[int]], cast: Sequence[SamplingParams], limit: int, space: str | None = None
    ) -> list[TokenSequence]:
        return [
            decoder.sequence(
                prompt,
                cast[row % len(cast)],
                seed=row,
                max_new_tokens=limit,
                eos_token_ids=frozenset(),
                space=space,
            )
            for row, prompt in enumerate(prompts)
        ]

    for cast in casts:
        for length in lengths_of(longest, target.device):
            if stopped():
                return
            prompt = prompt_of(length, new_tokens, target.vocab_size)
            for rows in (size for size in engine.slots.sizes if size >= min(len(cast), 2)):
                number, kinds = 0, 1
                while number < kinds and not stopped():
                    sequences = texts([prompt] * rows, cast, new_tokens)
                    with _at_work(engine, sequences):
                        engine.step()  # from here on there are as many rows as texts
                        last, kinds = engine.stats.rounds + ROUNDS, engine.session.num_kinds
                        engine.session.rehearse(number)
                        try:
                            while not engine.done and engine.stats.rounds < last and not stopped():
                                engine.step()
                        finally:
                            engine.session.rehearse(None)
                    number += 1
    for group in groups:
        if stopped():
            return
        with _at_work(engine, texts(group, samplings[:1], 1, space="")):
            while not engine.done and not stopped():
                engine.step()


@contextmanager
def _at_work(engine: "Engine", sequences: Sequence[TokenSequence]) -> Iterator[None]:
    """Give an engine some texts, and cancel those that have not ended afterwards."""
    for sequence in sequences:
        engine.add(sequence)
    yield
    for sequence in sequences:
        if not sequence.done:
            engine.end(sequence, StopReason.CANCELLED, 0)


def lengths_of(longest: int, device: torch.device) -> list[int]:
    """Return the lengths of texts to rehearse, so that no text up to `longest` needs a new capture."""
    if not captures(device):  # nothing depends on the length, and reading long prompts takes time
        return [min(longest - 1, _SHORT)]
    # A capture serves up to the next power of two. Longest first: captures are lost when caches grow.
    powers = range((longest - 1).bit_length(), _SHORTEST_POWER, -1)
    return [min(2**power, longest - 1) for power in powers] or [longest - 1]


def prompt_of(length: int, new_tokens: int, vocab_size: int) -> list[int]:
    """Return a prompt whose text is `length` tokens long before its last new token."""
    return [token % vocab_size for token in range(max(length + 1 - new_tokens, 1))]


def groups_to_read(
    longest: int, chunk: int, slots: int, vocab_size: int, device: torch.device, *, behind: int = _BEHIND
) -> list[list[list[int]]]:
    """Return groups of prompts for captured passes of all sizes and counts, from a text's start and after `behind` tokens.

    Each group comes twice, because the second pass of a kind is captured. With a prefix cache, the very first group fills it
    with the tokens that other prompts continue; without one, a prompt continues its own first chunk.
    """
    if not captures(device):
        return []
    held = [token % vocab_size for token in range(behind + 2)]
    groups, first = [[held] * min(READING_COUNTS[-1], slots)], _BEHIND
    for before in (held[:behind], []):
        fitting = [size for size in READING_SIZES if size <= chunk and len(before) + size + 2 <= longest]
        for size, count in itertools.product(fitting * 2, READING_COUNTS):
            if reading_count(size, min(count, chunk // size)) == count <= slots:
                # The last token of a prompt is pending, not read.
                sizes = range(first + 1, first + 1 + count)
                groups.append([[*before, *((own + place) % vocab_size for place in range(size + 1))] for own in sizes])
                first += count
    return groups


@operation
def compiling_ahead(state: "State", walk: "Walk") -> AbstractContextManager[None]:
    """Compile a batch's kernels in other threads while its first round runs; does nothing without a backend that compiles."""
    return nullcontext()
