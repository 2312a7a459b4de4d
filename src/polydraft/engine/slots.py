"""Which text is in which row of a workspace, and how many rows rounds have."""

from collections.abc import Collection, Iterator, Sequence

import torch

from polydraft.engine.sequence import TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.memory import NO_TEXT, common_prefix
from polydraft.sampling import Noise


class Slots:
    """The rows of a workspace, each with a text at work, one that has ended, or none.

    Rounds cost what their rows cost. So an elastic workspace has about as many rows as there are texts at work, which move
    to the first slots when others end (docs/decisions/046-rounds-have-the-rows-they-need.md).

    Parameters
    ----------
    workspace : Workspace
    elastic : bool
        Let the number of slots follow that of texts.
    reuse : bool
        Let a text into the slot whose last text it begins with.
    """

    def __init__(self, workspace: Workspace, *, elastic: bool, reuse: bool) -> None:
        self._workspace, self._reuse, self._elastic = workspace, reuse, elastic and workspace.elastic
        self.most = len(workspace.asked)
        self.sequences: list[TokenSequence | None] = [None] * len(workspace.params)
        self._sleeping: list[TokenSequence | None] = []
        """What is in the slots behind them, where these sleep and come back as they were."""
        self.known: dict[int, int] = {}
        """Slots whose prompts are not read to their ends yet, and how many tokens of them the memories may know."""
        self.noise = Noise([torch.Generator() for _ in self.sequences], workspace.target.device)
        """Random numbers of the texts at work."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of slots that rounds may have, largest first."""
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
        """Return slots that a text may be let into."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None or sequence.done]

    def active(self) -> list[bool]:
        """Say which slots take part in rounds: those of running texts whose prompts are read."""
        return [
            sequence is not None and not sequence.done and slot not in self.known
            for slot, sequence in enumerate(self.sequences)
        ]

    def texts(self) -> list[Sequence[int]]:
        """Return what the memories should hold, as far as it is known to them."""
        texts = [NO_TEXT if sequence is None else sequence.tokens for sequence in self.sequences]
        return [text[: self.known[slot]] if slot in self.known else text for slot, text in enumerate(texts)]

    def take(self, sequence: TokenSequence, free: list[int]) -> tuple[int, int]:
        """Let a text into a free slot; return it, and how many tokens of the prompt the memories know there already."""
        place, known = 0, 0  # of equal ones the first
        if self._reuse and sequence.prompt_top_logprobs is None:  # such a prompt is read from its beginning
            texts = self.texts()
            shared = [common_prefix(texts[slot], sequence.prompt) for slot in free]
            known = max(shared)
            place = shared.index(known)
            asleep = [0 if one is None else common_prefix(one.tokens, sequence.prompt) for one in self._sleeping]
            if max(asleep, default=0) > known:
                known = max(asleep)
                place = self._wake(asleep.index(known), free)
        slot = free.pop(place)
        self.known.pop(slot, None)
        self.sequences[slot] = sequence
        return slot, known

    def vacate(self, slot: int) -> None:
        """Empty a slot, so that the next text reuses nothing of it."""
        self.sequences[slot] = None

    def fit(self, waiting: Collection[TokenSequence]) -> tuple[range, bool]:
        """Have about as many slots as there are texts; return those that are new, and whether their number has changed."""
        before, rows = len(self.sequences), self.most  # the last run may have left fewer
        if self._elastic:
            self._drop_unread()
            running = [slot for slot, one in enumerate(self.sequences) if one is not None and not one.done]
            rows = self._workspace.size_for(min(max(len(running) + len(waiting), 1), self.most))
            if rows < before:
                left = max((one.end - len(one.tokens) for one in (*self.running(), *waiting)), default=0)
                rows = self._gathered(rows, running, left)
        if rows == before:
            return range(0), False
        whole = [*self.sequences, *self._sleeping, *([None] * rows)]
        self.sequences, self._sleeping = whole[:rows], whole[rows : self.most] if self._workspace.has_graphs else []
        self.known = {slot: known for slot, known in self.known.items() if slot < rows}
        self.noise.resize(rows, self.most)
        self._workspace.have_rows(rows)
        return range(before, rows), True

    def _drop_unread(self) -> None:
        """Empty slots whose texts were cancelled while their prompts were read: half a prompt cannot sleep."""
        for slot in [slot for slot in self.known if slot in self.free()]:
            self.vacate(slot)
            del self.known[slot]

    def _gathered(self, rows: int, running: Sequence[int], left: int) -> int:
        """Move texts at work to the first slots, if they can move and it pays; return how many slots there must be."""
        stay, go = [slot for slot in running if slot < rows], [slot for slot in running if slot >= rows]
        captured, pays = self._workspace.has_graphs, left >= self._workspace.worth(rows)
        can_move = pays and not self.known and self._workspace.session.movable
        if (go and not can_move) or (captured and not pays):
            return len(self.sequences) if captured else go[-1] + 1
        targets = sorted(set(range(rows)).difference(stay), key=self._length)  # those with most text stay with their rows
        for source, target in zip(go, targets, strict=False):
            self._swap(target, source)
            self.noise.swap_rows(target, source)
        return rows

    def _wake(self, number: int, free: list[int]) -> int:
        """Swap a sleeping text into a free slot; return that slot's place in `free`."""
        place = min(range(len(free)), key=lambda place: self._length(free[place]))
        first = free[place]
        self.known.pop(first, None)
        self._workspace.trade_rows(first, len(self.sequences) + number)
        self.sequences[first], self._sleeping[number] = self._sleeping[number], self.sequences[first]
        return place

    def _swap(self, first: int, second: int) -> None:
        self._workspace.trade_rows(first, second)
        self.sequences[first], self.sequences[second] = self.sequences[second], self.sequences[first]

    def _length(self, slot: int) -> int:
        sequence = self.sequences[slot]
        return 0 if sequence is None else len(sequence.tokens)
