"""Rounds before they count: what first requests would wait for is done beforehand."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polydraft.draft import DraftSession
from polydraft.models.hf_context import READING_COUNTS, READING_SIZES, reading_count

ROUNDS, NEW_TOKENS = 10, 64
"""A round is captured when it comes for the second time, and timed once it is captured; and room for the tokens of so many."""
USUAL_LENGTH = 512
_SHORTEST_POWER = 5
_SHORT = 2 * NEW_TOKENS
_BEHIND = 8
"""Tokens of a text that prompts are read behind."""


def lengths_of(longest: int, device: torch.device) -> list[int]:
    """Return the lengths of texts to rehearse, so that none up to `longest` meets anything new."""
    if device.type != "cuda":  # nothing there depends on the length, and reading takes its time
        return [min(longest - 1, _SHORT)]
    # A capture serves up to the next power of two. Long ones first: memory that grows would make others worthless.
    powers = range((longest - 1).bit_length(), _SHORTEST_POWER, -1)
    return [min(2**power, longest - 1) for power in powers] or [longest - 1]


def prompt_of(length: int, new_tokens: int, vocab_size: int) -> list[int]:
    """Return a text that is `length` tokens long before its last new one."""
    return [token % vocab_size for token in range(max(length + 1 - new_tokens, 1))]


def prompts_to_read(longest: int, chunk: int, vocab_size: int, device: torch.device) -> list[list[int]]:
    """Return prompts of all sizes that are read in passes of their own kind, at the beginning of a text and behind a chunk.

    Each comes twice, as a pass is captured when it comes for the second time. No two begin alike, so that memories keep
    nothing of one for the next.
    """
    if device.type != "cuda":
        return []
    sizes = [start + size for start in (0, chunk) for size in READING_SIZES if size <= chunk and start + size + 2 <= longest]
    first = range(7, 7 + 2 * len(sizes))
    # Of a prompt the last token is not read but drafted behind.
    return [[(number + place) % vocab_size for place in range(size + 1)] for number, size in zip(first, sizes * 2, strict=True)]


def groups_to_read(longest: int, chunk: int, slots: int, vocab_size: int, device: torch.device) -> list[list[list[int]]]:
    """Return prompts to read together, of all sizes and counts, behind text that slots hold already and anew.

    Each group comes twice, and the first leaves in some slots what others are read behind.
    """
    if device.type != "cuda":
        return []
    groups, first = [[list(range(_BEHIND + 2))] * min(READING_COUNTS[-1], slots)], _BEHIND
    for behind in (range(_BEHIND), range(0)):
        fitting = [size for size in READING_SIZES if size <= chunk and len(behind) + size + 2 <= longest]
        for size, count in itertools.product(fitting * 2, READING_COUNTS):
            if reading_count(size, min(count, chunk // size)) == count <= slots:
                # The last token of a prompt is not read but drafted behind.
                sizes = range(first + 1, first + 1 + count)
                groups.append([[*behind, *((own + place) % vocab_size for place in range(size + 1))] for own in sizes])
                first += count
    return groups


@contextmanager
def rehearsing(session: DraftSession, number: int) -> Iterator[None]:
    """Let rounds be of one kind."""
    session.rehearse(number)
    try:
        yield
    finally:
        session.rehearse(None)
