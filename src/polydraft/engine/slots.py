"""Which text is in which row of a workspace, and how many rows a round has."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from polydraft.engine.sequence import TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.memory import NO_TEXT, common_prefix
from polydraft.models.prefixes import BLOCK, Prefixes
from polydraft.sampling import Noise

_ROUNDS = 2
"""Rounds for which a new text needs memory: one may be launched before the last one's outcome is known."""


class Slots:
    """The rows of a workspace: each has a running text, one that has ended, or none.

    A round costs what its rows cost, so an elastic workspace has about as many rows as there are running texts: these move to
    the first slots when others end (docs/decisions/046-rounds-have-the-rows-they-need.md). What an ended text leaves for
    others is not in its slot but in the prefix cache (docs/decisions/063-beginnings-are-found-by-content.md).

    Parameters
    ----------
    workspace : Workspace
    elastic : bool
        Let the number of slots follow the number of texts.
    prefixes : Prefixes, optional
        Cache of prompt prefixes, shared between texts.
    """

    def __init__(self, workspace: Workspace, *, elastic: bool, prefixes: Prefixes | None) -> None:
        self._workspace, self._elastic = workspace, elastic and workspace.elastic
        self._prefixes = prefixes if workspace.memory.context.portable else None
        self.most = len(workspace.asked)
        self.sequences: list[TokenSequence | None] = [None] * len(workspace.params)
        self.reading: dict[int, int] = {}
        """Slots whose prompts are still being read, and up to which token."""
        self.noise = Noise([torch.Generator() for _ in self.sequences], workspace.target.device)
        """Random numbers of the running texts."""
        self._turns = itertools.count()

    @property
    def recalls(self) -> bool:
        """Whether a new text's cached prefix is pasted into its slot, in place of the slot's last text."""
        return self._prefixes is not None

    @property
    def sizes(self) -> list[int]:
        """How many slots rounds may have, largest number first."""
        return self._workspace.sizes if self._elastic and self._workspace.has_graphs else [self.most]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[TokenSequence | None]:
        return iter(self.sequences)

    def __getitem__(self, slot: int) -> TokenSequence | None:
        return self.sequences[slot]

    def running(self) -> Iterator[TokenSequence]:
        """Yield texts that have not ended."""
        return (sequence for sequence in self.sequences if sequence is not None and not sequence.done)

    def free(self) -> list[int]:
        """Return the slots that can take a text."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None or sequence.done]

    def active(self) -> list[bool]:
        """Say which slots take part in rounds: those of running texts whose prompts have been read."""
        return [
            sequence is not None and not sequence.done and slot not in self.reading
            for slot, sequence in enumerate(self.sequences)
        ]

    def texts(self) -> list[Sequence[int]]:
        """Return each slot's text as far as the caches should hold it."""
        texts = [NO_TEXT if sequence is None else sequence.tokens for sequence in self.sequences]
        return [text[: self.reading[slot]] if slot in self.reading else text for slot, text in enumerate(texts)]

    def take(self, sequence: TokenSequence, free: list[int]) -> tuple[int, int]:
        """Put a text into a free slot; return the slot, and how many tokens of the prompt its caches already hold."""
        slot, known = free.pop(0), 0
        self.reading.pop(slot, None)
        self.sequences[slot] = sequence
        if self._prefixes is not None:
            known = self._workspace.recall(slot, _sought(sequence), sequence.space, self._prefixes)
        if sequence.turn is None:
            sequence.turn, sequence.cached = next(self._turns), known
        if self._workspace.pool is not None:
            self._workspace.pool.evicted.discard(sequence)
        return slot, known

    def can_take(self, sequence: TokenSequence) -> bool:
        """Whether the pool has memory for a text; evicted texts come before new ones."""
        pool = self._workspace.pool
        if pool is None:
            return True
        if any(not one.done for one in pool.evicted) and sequence not in pool.evicted:
            return False
        return self._workspace.room(*self._wants(sequence)) <= pool.free

    def hold(self, slot: int, sequence: TokenSequence) -> bool:
        """Reserve memory in a free slot for a text; return whether there was enough."""
        if not self.can_take(sequence):
            return False
        held = self._workspace.hold(slot, *self._wants(sequence))
        if not held:
            self._workspace.rest(slot)
        return held

    def _wants(self, sequence: TokenSequence) -> tuple[int, int]:
        """Return the length, and the number of further rounds, for which a text needs memory; evicted ones, up to their end."""
        owed = self._workspace.pool is not None and sequence in self._workspace.pool.evicted
        return sequence.end if owed else len(sequence.tokens), _ROUNDS

    def have_room(self, rounds: int) -> bool:
        """Reserve memory for `rounds` more rounds of the running texts; return whether there was enough."""
        if self._workspace.pool is None:
            return True
        works = zip(self.sequences, self.active(), strict=True)
        return all(
            self._workspace.hold(slot, len(one.tokens), rounds) for slot, (one, active) in enumerate(works) if one and active
        )

    def evict(self) -> TokenSequence:
        """Evict the youngest text, whose memory others need, and return it."""
        pool = self._workspace.pool
        assert pool is not None
        texts = [(one.turn, slot) for slot, one in enumerate(self.sequences) if one is not None and not one.done]
        slot = max(texts)[1]
        sequence = self.sequences[slot]
        assert sequence is not None
        if slot in self.reading:
            sequence.prompt_logprobs.clear()
        else:
            self.keep([slot])
            sequence.row_state = self._workspace.take_row(slot), self.noise.take_row(slot)
        pool.evicted.add(sequence)
        pool.evictions += 1
        self.vacate(slot)
        return sequence

    def restore(self, slot: int) -> None:
        """Restore the row of an evicted text that has been read again, so that it goes on as if nothing had happened."""
        sequence = self.sequences[slot]
        if sequence is not None and sequence.row_state is not None:
            of_workspace, of_noise = sequence.row_state
            self._workspace.put_row(slot, of_workspace)
            self.noise.put_row(slot, of_noise)
            sequence.row_state = None

    def rest(self) -> None:
        """Give back the memory of slots without texts."""
        if self._workspace.pool is not None:
            for slot, sequence in enumerate(self.sequences):
                if sequence is None:
                    self._workspace.rest(slot)

    def awaits(self, sequence: TokenSequence) -> bool:
        """Whether a text should wait for another prompt to be read, because the two share a prefix.

        If the other prompt is much longer than the shared part, reading both side by side is faster.
        """
        if self._prefixes is None or sequence.space is None:
            return False
        wanted, best = _sought(sequence)[:-1], 0
        for one in self.running():
            if one.space == sequence.space and one.prompt[:BLOCK] == wanted[:BLOCK] and one.is_fresh and one.max_new_tokens:
                shared = common_prefix(one.prompt[:-1], wanted) // BLOCK * BLOCK
                best = max(best, shared if len(one.prompt) <= 2 * shared else 0)
        return best > 0 and best > self._prefixes.known(self._workspace.memory.context, sequence.space, wanted)

    def keep(self, slots: Iterable[int]) -> None:
        """Put the texts of these slots into the prefix cache, after a round without faults."""
        for slot in slots:
            sequence = self.sequences[slot]
            if self._prefixes is not None and sequence is not None and sequence.space is not None:
                self._workspace.keep(slot, sequence.space, self._prefixes, whole=not sequence.done)

    def vacate(self, slot: int) -> None:
        """Empty a slot."""
        self.sequences[slot] = None
        self.reading.pop(slot, None)

    def vacate_ended(self) -> None:
        """Empty the slots of ended texts if their memory comes from a pool."""
        for slot, sequence in enumerate(self.sequences if self._workspace.pool is not None else ()):
            if sequence is not None and sequence.done:
                self.vacate(slot)

    def fit(self, waiting: Collection[TokenSequence]) -> tuple[range, bool]:
        """Match the number of slots to that of texts; return the new slots, and whether the number has changed."""
        before, rows = len(self.sequences), self.most  # the last run may have left fewer
        if self._elastic:
            for slot in [slot for slot in self.reading if slot in self.free()]:  # cancelled while their prompts were read
                self.vacate(slot)
            running = [slot for slot, one in enumerate(self.sequences) if one is not None and not one.done]
            rows = self._workspace.size_for(min(max(len(running) + len(waiting), 1), self.most))
            if rows < before:
                left = max((one.end - len(one.tokens) for one in (*self.running(), *waiting)), default=0)
                rows = self._gathered(rows, running, left)
        if rows == before:
            return range(0), False
        self.sequences = [*self.sequences, *([None] * rows)][:rows]
        self.reading = {slot: length for slot, length in self.reading.items() if slot < rows}
        self.noise.resize(rows, self.most)
        self._workspace.have_rows(rows)
        return range(before, rows), True

    def _gathered(self, rows: int, running: Sequence[int], left: int) -> int:
        """Move running texts to the first slots, if they can move and it pays; return how many slots are needed."""
        stay, go = [slot for slot in running if slot < rows], [slot for slot in running if slot >= rows]
        captured, pays = self._workspace.has_graphs, left >= self._workspace.worth(rows)
        can_move = pays and not self.reading and self._workspace.session.movable
        if (go and not can_move) or (captured and not pays):
            return len(self.sequences) if captured else go[-1] + 1
        lengths = [0 if one is None else len(one.tokens) for one in self.sequences]
        targets = sorted(set(range(rows)).difference(stay), key=lengths.__getitem__)  # a swap copies the longer text
        for source, target in zip(go, targets, strict=False):
            self._workspace.trade_rows(target, source)
            self.sequences[target], self.sequences[source] = self.sequences[source], self.sequences[target]
            self.noise.swap_rows(target, source)
        return rows


def _sought(sequence: TokenSequence) -> Sequence[int]:
    """Return the text to look up in the prefix cache; empty if the whole prompt must be read, for its log-probabilities."""
    seen = sequence.prompt_top_logprobs is not None and sequence.is_fresh
    return () if sequence.space is None or seen else sequence.tokens
