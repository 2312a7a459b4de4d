"""The interface of models (`LanguageModel`) and of their caches (`Context`)."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from polydraft.devices import assign, brought, can_sync, captures
from polydraft.errors import UsageError
from polydraft.models.attention import steady_attention, visible_slots
from polydraft.models.block_slots import Placed, place
from polydraft.models.blocks import Pool
from polydraft.models.storage import Pieces, Storage, move_up
from polydraft.rows import ByRow
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block, causal_block

PREFILL_CHUNK = 512
_SMALLEST_SPAN = 512
Observer = Callable[[slice, Sequence[int], Sequence[int], Tensor], None]
"""Called while texts are read: `(rows, starts, counts, features_BTF)`, the features of those rows only."""


def round_up(slots: int) -> int:
    """Round up to a power of two, so that a few sizes cover all lengths."""
    return max(1 << (slots - 1).bit_length(), _SMALLEST_SPAN)


class Replaying(Protocol):
    """Captures passes and replays them, as `polydraft.engine.graphs.GraphCache` does."""

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        """Return `function(*inputs)`, and whether it was replayed. The next replay overwrites the result."""
        ...


class Context(ByRow, ABC):
    """The cache of one batch of texts: per row, committed tokens, and behind them places for uncommitted ones.

    Row r has its committed tokens in slots `0 .. lengths[r]`. Uncommitted place u of a block is slot `lengths[r] + u`; slots
    after that hold leftovers, which nothing attends to. Rows may sleep: only the first `batch_size` are in use. Subclasses
    define what a slot stores (keys and values, or the tokens themselves) and compute the pass.

    Parameters
    ----------
    owner : object
        The model that this is a cache of.
    cache : Storage
        The slots.
    """

    ROW_STATE = ("lengths", "lengths_B", "positions_BS")
    elastic: bool = False
    """Whether the number of rows may change, see `resize`."""
    borrows: bool = False
    """Whether it stores nothing itself and reads the target's cache instead."""
    num_tokens: int | None = None
    """Rows of the embedding table. A draft may lack padding rows that the target has."""
    window: int | None = None
    """How many positions a token sees, its own included; None for all."""
    cache: Storage

    def __init__(
        self, owner: object, cache: Storage, batch_size: int, capacity: int, device: torch.device, max_positions: int | None
    ) -> None:
        self.owner, self.cache = owner, cache
        self.capacity, self.device, self.max_positions = capacity, device, max_positions
        self.lengths = [0] * batch_size
        """Committed tokens per row, as the host last knew them; see `settle`."""
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        """Committed tokens per row."""
        self.positions_BS = torch.arange(capacity, device=device).repeat(batch_size, 1)
        """Position of the token in each slot."""
        self._numbers_B1 = torch.arange(batch_size, device=device)[:, None]
        self.places = 0
        """Most uncommitted tokens in a round. Set by the owner of the context, like `idle_slots` and `graphs`."""
        self.idle_slots = 1
        """Slots that a row without a text has memory for: rounds write there, too."""
        self.span: int | None = None
        """Slots that every pass sees; None for as many as the texts need. Captures need a fixed number."""
        self.graphs: Replaying | None = None
        """Captures the passes that read prompts, if set."""
        self.checked = False
        """Whether a backend has checked the model's weights since the last text began."""

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def _rows_B1(self) -> Tensor:
        """The index of each row in use."""
        if self.batch_size > len(self._numbers_B1):
            self._numbers_B1 = torch.arange(self.batch_size, device=self.device)[:, None]
        return self._numbers_B1[: self.batch_size]

    def new_row(self, name: str) -> Tensor | int:
        """Start without text, each slot at its own position."""
        return torch.arange(self.capacity, device=self.device) if name == "positions_BS" else 0

    def settle(self, lengths: Sequence[int]) -> None:
        """Set the host's copy of the lengths after a commit, without a sync."""
        self.lengths = list(lengths)

    def advance(self, counts_B: Tensor) -> None:
        """Commit the first `counts_B` uncommitted tokens of each row in place."""
        self.lengths_B += counts_B

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed tokens."""
        self.settle(lengths)
        assign(self.lengths_B, self.lengths)
        self.checked = False

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        used = self.used(block)
        placed = self.place(tokens_BT, block)
        with steady_attention(self.device):
            return self._forward(placed.tokens_BT, placed.positions_BT, placed.slots_BT, self._visible(block, used))

    def used(self, block: Block) -> int:
        """Return how many slots a pass over this block sees."""
        used = self.span or max(self.lengths) + block.stop
        assert max(self.lengths) + block.stop <= used <= self.capacity, (self.lengths, block.stop, used, self.capacity)
        assert block.places_BT is None or not self.aligned, "places that only the device knows need a fixed span"
        return used

    def place(self, tokens_BT: Tensor, block: Block) -> Placed:
        """Return which slots the tokens of a block go to, and record their positions."""
        limits = {"max_positions": self.max_positions, "num_tokens": self.num_tokens, "window": self.window}
        return place(tokens_BT, block, self.lengths_B, self.positions_BS, **limits)

    @abstractmethod
    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store and compute T tokens per row; `visible_BTS` says which slots each attends to."""

    def _visible(self, block: Block, used: int) -> Tensor:
        """Extend the block's mask to all used slots: committed text is visible, leftovers are not."""
        if self.aligned:
            committed_BTS = block.visible_BTU.new_ones(self.batch_size, block.size, self.lengths[0])
            return torch.cat([committed_BTS, block.visible_BTU], dim=-1)
        return visible_slots(self.lengths_B, block.visible_BTU, used)

    @property
    def aligned(self) -> bool:
        """Whether all rows are equally long and passes may rely on it."""
        return self.span is None and len(set(self.lengths)) == 1

    def fix_span(self, span: int | None = None) -> int:
        """Fix how many slots passes see, `wanted_span()` by default, and return the number."""
        self.span = min(self.wanted_span() if span is None else span, self.capacity)
        return self.span

    def wanted_span(self, growth: int = 0) -> int:
        """Return a span for rows that have grown by `growth` tokens, large enough to last for many rounds."""
        return min(round_up(max(self.lengths) + growth + self.places), self.capacity)

    def steady(self, growth: int) -> bool:
        """Whether rows can grow by up to `growth` tokens without needing another span."""
        fits = max(self.lengths) + growth + self.places <= self.capacity
        return fits and self.wanted_span() == self.wanted_span(growth)

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Commit the tokens in the first `counts_B` of `places_BD`, in that order, and drop the rest.

        `in_place` says that the places are known to be 0, 1, 2 and so on.
        """
        if can_sync(counts_B) and not in_place:
            places_BD = places_BD[:, : int(counts_B.max())]
            in_place = bool((places_BD == torch.arange(places_BD.shape[1])).all())
        if not in_place:
            move_up(self.cache, self.lengths_B, places_BD, self.positions_BS)
        self.lengths_B += counts_B

    def rearrange(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, in that order; they stay uncommitted."""
        source_BD = self.lengths_B[:, None] + places_BD
        target_BD = self.lengths_B[:, None] + torch.arange(places_BD.shape[1], device=self.device)
        self.cache.move(source_BD, target_BD)
        self.positions_BS[self._rows_B1, target_BD] = self.positions_BS[self._rows_B1, source_BD]

    def keepable(self, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens rows have left if they are cut to these lengths."""
        return list(lengths)

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Read known tokens at the end of each row's committed text, and pass their features to the observer.

        Once some rows have text, rows with nothing to read are skipped.
        """
        self.span = None  # the span of rounds may be too narrow; the next round fixes a new one
        skips = self.divisible and (self.lent or any(self.lengths))
        for rows in _runs(texts) if skips else [slice(0, self.batch_size)]:
            # If padding would take a row past the end of the storage, or past its memory, rows read one by one.
            together = not self.divisible or self.has_room(rows, max(map(len, texts[rows])))
            for part in [rows] if together else [slice(row, row + 1) for row in range(rows.start, rows.stop)]:
                self._prefill(texts[part], part, observer)

    def _prefill(self, texts: Sequence[Sequence[int]], rows: slice, observer: Observer | None) -> None:
        """Read the texts of some adjacent rows."""
        done = 0
        while (longest := max(len(text) for text in texts) - done) > 0:
            size = min(longest, PREFILL_CHUNK)
            parts = [list(text[done : done + size]) for text in texts]
            # Rows that have read their whole text are padded meanwhile, which may take more slots than their own texts need.
            self.reserve(max(self.lengths[rows]) + size)
            features_BTF = self._read(parts, rows, size)
            starts = self.lengths[rows]
            if observer is not None:
                observer(rows, starts, [len(part) for part in parts], features_BTF)
            ends = [start + len(part) for start, part in zip(starts, parts, strict=True)]
            self.rewind([*self.lengths[: rows.start], *ends, *self.lengths[rows.stop :]])
            done += size

    def _read(self, parts: Sequence[list[int]], rows: slice, size: int) -> Tensor:
        """Pass the next tokens of some adjacent rows, at most `size` each, and return their features `[B, size, F]`."""
        tokens_BT = brought(torch.tensor([part + [0] * (size - len(part)) for part in parts]), self.device)
        return self.part(rows).extend(tokens_BT, causal_block(len(parts), size, self.device))

    def lend(self, pool: Pool) -> None:
        """Let rows take memory from a pool as they grow, if passes touch no other slots. Call this before storage exists."""

    @property
    def lent(self) -> bool:
        """Whether rows take their memory from a pool."""
        return self.cache.pool is not None

    def open(self) -> None:
        """Allocate storage now, if its shape is known before the first pass."""

    def has_room(self, rows: slice | Sequence[int], size: int) -> bool:
        """Reserve memory for `size` more tokens in each of these rows; return whether there was enough."""
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if max(self.lengths[row] for row in numbers) + size > self.capacity:
            return False
        return all(self.cache.hold(row, self.lengths[row] + size) for row in numbers)

    @property
    def divisible(self) -> bool:
        """Whether there is storage for `part` to share."""
        return self.address != 0

    def part(self, rows: slice) -> Self:
        """Return a context of some adjacent rows that shares their storage; the host's lengths are copied."""
        if rows == slice(0, self.batch_size):
            return self
        part = copy.copy(self)
        part.lengths, part.lengths_B, part.positions_BS = self.lengths[rows], self.lengths_B[rows], self.positions_BS[rows]
        part.cache = self.cache.part(rows)
        return part

    def row_parts(self) -> Iterable[ByRow]:
        """Return the storage."""
        return (self.cache,)

    def swap_rows(self, first: int, second: int, used: int | None = None) -> None:
        """Swap two rows and their committed texts; the second may be asleep."""
        lengths = self.every_row("lengths")
        super().swap_rows(first, second, max(lengths[first], lengths[second]))

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots per row, keeping what is committed."""
        if capacity <= self.capacity:
            return
        if captures(self.device):  # storage that stays put keeps captured rounds valid
            capacity = round_up(capacity)
        self._grow(capacity)
        whole_BS = self.every_row("positions_BS")
        fresh_BS = torch.arange(self.capacity, capacity, device=self.device).repeat(len(whole_BS), 1)
        self.positions_BS = self.keep_rows("positions_BS", torch.cat([whole_BS, fresh_BS], dim=1), self.batch_size)
        self.capacity = capacity

    def _grow(self, capacity: int) -> None:
        self.cache.grow(capacity)

    def adopt(self, other: "Context") -> bool:
        """Take over the storage of a discarded context instead of allocating any; return whether it fits.

        Its content stays in memory, unused: clear all rows if it may hold NaNs.
        """
        if type(other) is not type(self) or other.owner is not self.owner or other.capacity < self.capacity:
            return False
        self.reserve(other.capacity)
        return self.cache.adopt(other.cache, self.batch_size)

    @property
    def portable(self) -> bool:
        """Whether a row is nothing but slots, which can be copied between contexts of the same model."""
        return self.elastic and not self.borrows

    def paste(self, row: int, pieces: Pieces) -> None:
        """Write copied slots into the first slots of a row; the caller commits them."""
        length = sum(count for _, count in pieces)
        self.reserve(length + self.places)
        self.cache.paste(row, pieces, self.batch_size)
        self.positions_BS[row, :length] = torch.arange(length, device=self.device)

    @property
    def address(self) -> int:
        """Where the storage begins; this changes when it grows."""
        return self.cache.address

    @property
    def nbytes(self) -> int:
        """Bytes of storage for all rows, in use or asleep."""
        return self.cache.nbytes


class LanguageModel(ABC):
    """A causal language model that can score trees."""

    name: str
    vocab_size: int
    device: torch.device
    max_positions: int | None
    """Longest text the model can read; None for any length."""
    graph_obstacle: str | None = None
    """Why passes cannot be captured as CUDA graphs; None if they can."""
    shape_obstacle: str | None = None
    """Why passes cannot be captured over trees whose shape only the device knows or that differ by row; None if they can."""
    vocabulary: PartialVocabulary | None = None
    """Tokens that the columns of `head` stand for, if a draft knows only some."""

    @property
    def num_columns(self) -> int:
        """Columns of `head`."""
        return self.vocab_size if self.vocabulary is None else len(self.vocabulary.tokens_D)

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> Context:
        """Return an empty context for `batch_size` texts with room for `capacity` slots each."""

    @abstractmethod
    def head(self, features_RF: Tensor) -> Tensor:
        """Turn features from `Context.extend` into logits `[R, V]`.

        A separate step, because walks visit few nodes of a tree and only these need the logits of a large vocabulary.
        """

    def mark(self) -> Hashable:
        """Return a value that changes with the weights: contexts and captures made under another mark are stale."""
        return None


def check_prompts(prompts: Sequence[Sequence[int]], max_positions: int | None, vocab_size: int) -> None:
    """Refuse prompts that a model cannot read."""
    if not prompts:
        raise UsageError("no prompt given; pass at least one")
    for prompt in prompts:
        if not prompt:
            raise UsageError("empty prompt: it has no tokens; give at least one character")
        if max_positions is not None and len(prompt) >= max_positions:
            raise UsageError(
                f"prompt of {len(prompt)} tokens does not fit the model's context of {max_positions}; "
                f"shorten it to at most {max_positions - 1} tokens"
            )
        if not all(0 <= token < vocab_size for token in prompt):
            raise UsageError(f"prompt holds a token id outside the vocabulary; allowed: 0 to {vocab_size - 1}")


def _runs(texts: Sequence[Sequence[int]]) -> list[slice]:
    """Group the rows that have something to read into runs of adjacent ones."""
    runs: list[slice] = []
    for row, text in enumerate(texts):
        if text:
            follows = bool(runs) and runs[-1].stop == row
            runs.append(slice(runs.pop().start if follows else row, row + 1))
    return runs
