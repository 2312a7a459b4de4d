"""What the engine asks of a model, and the memory of a batch of texts in one."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from polydraft.devices import can_sync, captures
from polydraft.errors import UsageError
from polydraft.models.attention import steady_attention
from polydraft.models.blocks import Pool
from polydraft.models.placing import Placed, place
from polydraft.models.storage import Pieces, Storage, move_up
from polydraft.rows import ByRow
from polydraft.sampling import PartialVocabulary
from polydraft.transfers import assign, brought
from polydraft.trees import Block, causal_block

PREFILL_CHUNK = 512
_SMALLEST_SPAN = 512
Observer = Callable[[slice, Sequence[int], Sequence[int], Tensor], None]
"""`(rows, starts, counts, features_BTF)`, of those rows alone: called with the features of texts while they are read."""


def round_up(slots: int) -> int:
    """Return the next power of two, so that few sizes serve for all lengths."""
    return max(1 << (slots - 1).bit_length(), _SMALLEST_SPAN)


class Replaying(Protocol):
    """Whatever captures passes and replays them: `polydraft.engine.graphs.GraphCache`."""

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        """Return `function(*inputs)`, and whether it was replayed; the next replay overwrites it."""
        ...


class Rows(ByRow):
    """The rows of a batch and how long their texts are: committed tokens in slots `0 .. lengths[row]`, behind them the others.

    Rows may sleep: only the first `batch_size` of them are at work.
    """

    ROW_STATE = ("lengths", "lengths_B", "positions_BS")

    def __init__(self, batch_size: int, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.lengths = [0] * batch_size
        """Committed tokens per row, as the host last knew them; see `settle`."""
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        """Committed tokens per row."""
        self.positions_BS = torch.arange(capacity, device=device).repeat(batch_size, 1)
        """Position of the token in each slot."""
        self._numbers_B1 = torch.arange(batch_size, device=device)[:, None]

    @property
    def batch_size(self) -> int:
        """Rows at work."""
        return len(self.lengths)

    @property
    def _rows_B1(self) -> Tensor:
        """The number of each row at work, as an index."""
        if self.batch_size > len(self._numbers_B1):
            self._numbers_B1 = torch.arange(self.batch_size, device=self.device)[:, None]
        return self._numbers_B1[: self.batch_size]

    def new_row(self, name: str) -> Tensor | int:
        """Begin with no text, and each slot at its own position."""
        return torch.arange(self.capacity, device=self.device) if name == "positions_BS" else 0

    def settle(self, lengths: Sequence[int]) -> None:
        """Tell the host how long the rows are after a commit, without waiting for the device."""
        self.lengths = list(lengths)

    def advance(self, counts_B: Tensor) -> None:
        """Keep the first `counts_B` uncommitted tokens of each row where they are."""
        self.lengths_B += counts_B

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed tokens."""
        self.settle(lengths)
        assign(self.lengths_B, self.lengths)

    def part(self, rows: slice) -> Self:
        """Return some adjacent rows, which share their tensors; what the host knows of them is a copy."""
        part = copy.copy(self)
        part.lengths, part.lengths_B, part.positions_BS = self.lengths[rows], self.lengths_B[rows], self.positions_BS[rows]
        return part

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots per row, keeping what is committed."""
        whole_BS = self.every_row("positions_BS")
        fresh_BS = torch.arange(self.capacity, capacity, device=self.device).repeat(len(whole_BS), 1)
        self.positions_BS = self.keep_rows("positions_BS", torch.cat([whole_BS, fresh_BS], dim=1), self.batch_size)
        self.capacity = capacity


class Context(Rows, ABC):
    """The memory of one batch of texts: what is committed, and behind it places for uncommitted tokens.

    Uncommitted place u of a block is slot `lengths[row] + u`. Slots past that hold leftovers that are never attended to.
    Subclasses define what a token stores (keys and values; the tokens themselves) and compute the pass.

    Parameters
    ----------
    owner : object
        The model whose memory it is.
    cache : Storage
        Slots of the texts.
    """

    elastic: bool = False
    """Whether the number of rows may change, see `resize`."""
    borrows: bool = False
    """Whether it keeps nothing of a text but reads what the target's keeps."""
    always_moves: ClassVar[bool] = False
    """Whether even tokens in the right places must be moved to be kept."""
    num_tokens: int | None = None
    """Rows of the table that tokens are looked up in; a draft's may lack padding rows that the target's has."""
    window: int | None = None
    """How many positions a token sees, its own included; all where there is no number."""
    cache: Storage

    def __init__(
        self, owner: object, cache: Storage, batch_size: int, capacity: int, device: torch.device, max_positions: int | None
    ) -> None:
        super().__init__(batch_size, capacity, device)
        self.cache, self.max_positions = cache, max_positions
        self.owner = owner
        self.places = 0
        """Most uncommitted tokens of a round, as its owner says."""
        self.idle_slots = 1
        """Slots that there is memory for in a row without a text, as its owner says: rounds write there, too."""
        self.span: int | None = None
        """Slots that every pass sees, where that must not follow the lengths; those in use otherwise."""
        self.graphs: Replaying | None = None
        """Captures passes that read prompts, where its owner lends one."""

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        used = self.used(block)
        placed = self.place(tokens_BT, block)
        with steady_attention(self.device):
            return self._forward(placed.tokens_BT, placed.positions_BT, placed.slots_BT, self._visible(block, used))

    def used(self, block: Block) -> int:
        """Return how many slots a pass over a block sees."""
        used = self.span or max(self.lengths) + block.stop
        assert max(self.lengths) + block.stop <= used <= self.capacity, (self.lengths, block.stop, used, self.capacity)
        assert block.places_BT is None or not self.aligned, "tokens go to places that are not known only under a fixed span"
        return used

    def place(self, tokens_BT: Tensor, block: Block) -> Placed:
        """Return where the tokens of a block go, and record their positions."""
        limits = {"max_positions": self.max_positions, "num_tokens": self.num_tokens, "window": self.window}
        return place(tokens_BT, block, self.lengths_B, self.positions_BS, **limits)

    @abstractmethod
    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store and compute T tokens per row; slot s is attended to where `visible_BTS` says so."""

    def _visible(self, block: Block, used: int) -> Tensor:
        """Widen the block's own mask to all used slots: committed text is visible, leftovers are not."""
        if self.aligned:
            committed_BTS = block.visible_BTU.new_ones(self.batch_size, block.size, self.lengths[0])
            return torch.cat([committed_BTS, block.visible_BTU], dim=-1)
        place_BS = torch.arange(used, device=self.device) - self.lengths_B[:, None]
        in_block_BS = (place_BS >= 0) & (place_BS < block.stop)
        place_BTS = place_BS.clamp(0, block.stop - 1)[:, None].expand(-1, block.size, -1)
        return (place_BS < 0)[:, None] | (in_block_BS[:, None] & block.visible_BTU.gather(2, place_BTS))

    @property
    def aligned(self) -> bool:
        """Whether all rows are equally long, and a pass may make use of that."""
        return self.span is None and len(set(self.lengths)) == 1

    def fix_span(self, span: int | None = None) -> int:
        """Let passes see so many slots, as many as wanted if not given, and return how many they are."""
        self.span = min(self.wanted_span() if span is None else span, self.capacity)
        return self.span

    def wanted_span(self, growth: int = 0) -> int:
        """Return a number of slots for passes to see that serves for many rounds to come, after so much growth."""
        return min(round_up(max(self.lengths) + growth + self.places), self.capacity)

    def steady(self, growth: int) -> bool:
        """Whether rows may grow by up to so many tokens, and the span that serves for them is the same however many it is."""
        fits = max(self.lengths) + growth + self.places <= self.capacity
        return fits and self.wanted_span() == self.wanted_span(growth)

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Keep the tokens in the first `counts_B` of `places_BD` as committed text, in that order; drop the rest.

        The caller may know that they are `in_place`: that the places are 0, 1, 2 and so on.
        """
        if can_sync(counts_B) and not in_place and not self.always_moves:
            places_BD = places_BD[:, : int(counts_B.max())]
            in_place = bool((places_BD == torch.arange(places_BD.shape[1])).all())
        if not in_place or self.always_moves:
            self._move_up(places_BD)
        self.lengths_B += counts_B

    def _move_up(self, places_BD: Tensor) -> None:
        move_up(self.cache, self.lengths_B, places_BD, self.positions_BS)

    def rearrange(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, in that order; they stay uncommitted where they stand."""
        source_BD = self.lengths_B[:, None] + places_BD
        target_BD = self.lengths_B[:, None] + torch.arange(places_BD.shape[1], device=self.device)
        self.cache.move(source_BD, target_BD)
        self.positions_BS[self._rows_B1, target_BD] = self.positions_BS[self._rows_B1, source_BD]

    def keepable(self, lengths: Sequence[int]) -> list[int]:
        """Return how many of so many committed tokens per row can be kept when it is cut there."""
        return list(lengths)

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Append tokens known beforehand to each row's committed text, showing their features to the observer.

        Where some rows have texts already, those that have nothing to read take no part.
        """
        self.span = None  # one that serves for rounds may be too narrow, and the next round fixes its own
        for rows in _runs(texts) if self.divisible and (self.lent or any(self.lengths)) else [slice(0, self.batch_size)]:
            # Where a row would be padded past the storage's end, or past what there is memory for, all read alone.
            fits = not self.divisible or self.has_room(rows, max(map(len, texts[rows])))
            for some in [rows] if fits else [slice(row, row + 1) for row in range(rows.start, rows.stop)]:
                self._prefill(texts[some], some, observer)

    def _prefill(self, texts: Sequence[Sequence[int]], rows: slice, observer: Observer | None) -> None:
        """Read the texts of some adjacent rows."""
        done = 0
        while (longest := max(len(text) for text in texts) - done) > 0:
            size = min(longest, PREFILL_CHUNK)
            parts = [list(text[done : done + size]) for text in texts]
            # Rows that have nothing more to read are padded along, which may take them past what they need themselves.
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
        """Let rows take memory from a pool as they grow, if no pass touches other slots; to be said before there is storage."""

    @property
    def lent(self) -> bool:
        """Whether rows take their memory from a pool."""
        return self.cache.pool is not None

    def open(self) -> None:
        """Have storage from now on, where it is known before the first pass what that looks like."""

    def has_room(self, rows: slice | Sequence[int], size: int) -> bool:
        """Have memory for so many further tokens in each of some rows, if there is enough; return whether there is."""
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if max(self.lengths[row] for row in numbers) + size > self.capacity:
            return False
        return all(self.cache.hold(row, self.lengths[row] + size) for row in numbers)

    @property
    def divisible(self) -> bool:
        """Whether there is storage, so that `part` can share it."""
        return self.address != 0

    def part(self, rows: slice) -> Self:
        """Return a context of some adjacent rows, which shares their storage; what the host knows of them is a copy."""
        if rows == slice(0, self.batch_size):
            return self
        part = super().part(rows)
        part.cache = self.cache.part(rows)
        return part

    def row_parts(self) -> Iterable[ByRow]:
        """Return the storage."""
        return (self.cache,)

    def swap_rows(self, first: int, second: int, used: int | None = None) -> None:
        """Swap two rows, the second of which may sleep, with their committed texts."""
        lengths = self.every_row("lengths")
        super().swap_rows(first, second, max(lengths[first], lengths[second]))

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots per row, keeping what is committed."""
        if capacity > self.capacity:
            if captures(self.device):  # storage that stays put keeps captured rounds valid
                capacity = round_up(capacity)
            self._grow(capacity)
            super().reserve(capacity)

    def _grow(self, capacity: int) -> None:
        self.cache.grow(capacity)

    def adopt(self, other: "Context") -> bool:
        """Take over the storage of a discarded context, before allocating any; return whether it fits.

        What it holds is forgotten, but stays there: `cache.wipe` where that may be NaNs.
        """
        if type(other) is not type(self) or other.owner is not self.owner or other.capacity < self.capacity:
            return False
        self.reserve(other.capacity)
        return self.cache.adopt(other.cache, self.batch_size)

    @property
    def portable(self) -> bool:
        """Whether committed text can be copied into rows of this and other memories of the model: slots are all there is."""
        return self.elastic and not self.borrows

    def paste(self, row: int, pieces: Pieces) -> None:
        """Write copies of slots, and how many of each, into the first slots of a row; the caller commits them."""
        length = sum(count for _, count in pieces)
        self.reserve(length + self.places)
        self.cache.paste(row, pieces, self.batch_size)
        self.positions_BS[row, :length] = torch.arange(length, device=self.device)

    @property
    def address(self) -> int:
        """Where the storage begins: it moves when it grows."""
        return self.cache.address

    @property
    def nbytes(self) -> int:
        """Bytes of storage, of rows at work or not."""
        return self.cache.nbytes


class LanguageModel(ABC):
    """A causal language model that can score trees."""

    name: str
    vocab_size: int
    device: torch.device
    max_positions: int | None
    """Longest text the model can read; None for any length."""
    graph_obstacle: str | None = None
    """Why passes cannot be captured in a CUDA graph; None if they can."""
    shape_obstacle: str | None = None
    """The same of passes over trees whose shapes the host does not know, or that rows do not share."""
    leaves_out: bool = False
    """Whether a pass takes no time for tokens that its block does not keep."""
    vocabulary: PartialVocabulary | None = None
    """Tokens that the columns of `head` stand for, where a draft does not know all of them."""

    @property
    def num_columns(self) -> int:
        """Columns of `head`."""
        return self.vocab_size if self.vocabulary is None else len(self.vocabulary.tokens_D)

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> Context:
        """Open an empty memory for `batch_size` texts with room for `capacity` slots each."""

    @abstractmethod
    def head(self, features_RF: Tensor) -> Tensor:
        """Turn features, as `Context.extend` returns them, into logits `[R, V]`.

        Apart, because a walk visits few nodes of a tree: a large vocabulary's logits are needed only there.
        """

    def mark(self) -> Hashable:
        """Return a mark of the weights: memories and captures made under another mark are of no use."""
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
    """Return the longest runs of adjacent rows that have something to read."""
    runs: list[slice] = []
    for row, text in enumerate(texts):
        if text:
            follows = bool(runs) and runs[-1].stop == row
            runs.append(slice(runs.pop().start if follows else row, row + 1))
    return runs
