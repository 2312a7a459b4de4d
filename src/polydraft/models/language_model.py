"""What the engine asks of a model, and what models share."""

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.errors import UsageError
from polydraft.models._slots import Placed, place
from polydraft.row_storage import RowStorage
from polydraft.sampling import PartialVocabulary
from polydraft.transfers import assign, brought
from polydraft.trees import Block, causal_block

PREFILL_CHUNK = 512
_SMALLEST_SPAN = 512


class _WithoutPlans(AbstractContextManager[None]):
    """cuDNN's attention is off while any thread is inside; torch keeps one switch for all of them."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_WITHOUT_PLANS = _WithoutPlans()


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """Leave cuDNN's attention out, for a while: it takes 0.1 to 1.3 s to plan for every length that it has not met before.

    Once it has planned, it reads a prompt within 10 % of what the others take (docs/log), and prompts come in all lengths.
    """
    return _WITHOUT_PLANS if device.type == "cuda" else nullcontext()


def by_rows(product: Callable[[Tensor], Tensor], input_XF: Tensor) -> Tensor:
    """Apply a linear layer to all rows of an input of any shape as to one matrix.

    Of a view whose leading strides do not fit together, such as a slice of a tree's nodes, torch makes a batch of products:
    on a CPU with matrix units, in bfloat16, that took four times as long.
    """
    output_RG = product(input_XF.flatten(0, -2))
    return output_RG.view(*input_XF.shape[:-1], output_RG.shape[-1])


def round_up(slots: int) -> int:
    """Return the next power of two, so that few sizes serve for all lengths."""
    return max(1 << (slots - 1).bit_length(), _SMALLEST_SPAN)


class Replaying(Protocol):
    """Whatever captures passes and replays them: `polydraft.engine.graphs.GraphCache`."""

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        """Return `function(*inputs)`, and whether it was replayed; the next replay overwrites it."""
        ...


class Context(ABC):
    """The memory of one batch of texts: what is committed, and behind it places for uncommitted tokens.

    Each row has committed tokens in slots `0 .. lengths[row]`; uncommitted place u of a block is slot `lengths[row] + u`.
    Slots past that hold leftovers that nobody attends to. Subclasses store whatever a token leaves behind (keys and
    values; the tokens themselves) and compute the pass.
    """

    elastic: bool = False
    """Whether the number of rows may change, see `resize`."""
    always_moves: ClassVar[bool] = False
    """Whether even tokens in the right places must be moved to be kept."""
    num_tokens: int | None = None
    """Rows of the table that tokens are looked up in; a draft's may lack padding rows that the target's has."""
    window: int | None = None
    """How many positions a token sees, its own included; all where there is no number."""

    def __init__(self, batch_size: int, capacity: int, device: torch.device, max_positions: int | None) -> None:
        self.batch_size, self.capacity, self.device = batch_size, capacity, device
        self.max_positions = max_positions
        self.lengths = [0] * batch_size
        """Committed tokens per row, as the host last knew them; see `settle`."""
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        """Committed tokens per row."""
        self.places = 0
        """Most uncommitted tokens of a round, as its owner says."""
        self.span: int | None = None
        """Slots that every pass sees, where that must not follow the lengths; those in use otherwise."""
        self.graphs: Replaying | None = None
        """Captures passes that read prompts, where its owner lends one."""
        self._positions_BS = torch.arange(capacity, device=device).repeat(batch_size, 1)
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]
        self._storage = RowStorage()

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        used = self.span or max(self.lengths) + block.stop
        assert max(self.lengths) + block.stop <= used <= self.capacity, (self.lengths, block.stop, used, self.capacity)
        assert block.places_BT is None or not self.aligned, "tokens go to places that are not known only under a fixed span"
        limits = {"max_positions": self.max_positions, "num_tokens": self.num_tokens, "window": self.window}
        return self._pass(place(tokens_BT, block, self.lengths_B, self._positions_BS, **limits), block, used)

    @property
    def address(self) -> int:
        """Where the storage begins: it moves when it grows."""
        return 0

    @property
    def aligned(self) -> bool:
        """Whether all rows are equally long, and a pass may make use of that."""
        return self.span is None and len(set(self.lengths)) == 1

    def wanted_span(self) -> int:
        """Return a number of slots for passes to see that serves for many rounds to come."""
        return self._span(max(self.lengths))

    def fix_span(self, span: int | None = None) -> int:
        """Let passes see so many slots, as many as wanted if not given, and return how many they are."""
        self.span = min(self.wanted_span() if span is None else span, self.capacity)
        return self.span

    def steady(self, growth: int) -> bool:
        """Whether rows may grow by up to so many tokens, and the span that serves for them is the same however many it is."""
        longest = max(self.lengths)
        return longest + growth + self.places <= self.capacity and self._span(longest) == self._span(longest + growth)

    def _span(self, length: int) -> int:
        return min(round_up(length + self.places), self.capacity)

    def _pass(self, placed: Placed, block: Block, used: int) -> Tensor:
        """Store and compute a block; to be overridden where attention needs no mask over all slots."""
        with steady_attention(self.device):
            return self._forward(placed.tokens_BT, placed.positions_BT, placed.slots_BT, self._visible(block, used))

    def _visible(self, block: Block, used: int) -> Tensor:
        """Widen the block's own mask to all used slots: committed text is visible, leftovers are not."""
        if self.aligned:
            committed_BTS = block.visible_BTU.new_ones(self.batch_size, block.size, self.lengths[0])
            return torch.cat([committed_BTS, block.visible_BTU], dim=-1)
        place_BS = torch.arange(used, device=self.device) - self.lengths_B[:, None]
        in_block_BS = (place_BS >= 0) & (place_BS < block.stop)
        place_BTS = place_BS.clamp(0, block.stop - 1)[:, None].expand(-1, block.size, -1)
        return (place_BS < 0)[:, None] | (in_block_BS[:, None] & block.visible_BTU.gather(2, place_BTS))

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Keep the tokens in the first `counts_B` of `places_BD` as committed text, in that order; drop the rest.

        The caller may know that they are `in_place`: that the places are 0, 1, 2 and so on.
        """
        if in_place and not self.always_moves:
            self.lengths_B += counts_B
            return
        if can_sync(counts_B) and not self.always_moves:
            places_BD = places_BD[:, : int(counts_B.max())]
            if bool((places_BD == torch.arange(places_BD.shape[1])).all()):  # they are where they belong
                self.lengths_B += counts_B
                return
        self._move_up(places_BD)
        self.lengths_B += counts_B

    def _move_up(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, each to the position of its place."""
        source_BD = self.lengths_B[:, None] + places_BD
        target_BD = self.lengths_B[:, None] + torch.arange(places_BD.shape[1], device=self.device)
        self._move(source_BD, target_BD)
        self._positions_BS.scatter_(1, target_BD, target_BD)

    def rearrange(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, in that order; they stay uncommitted where they stand."""
        source_BD = self.lengths_B[:, None] + places_BD
        target_BD = self.lengths_B[:, None] + torch.arange(places_BD.shape[1], device=self.device)
        self._move(source_BD, target_BD)
        self._positions_BS[self._rows_B1, target_BD] = self._positions_BS[self._rows_B1, source_BD]

    def advance(self, counts_B: Tensor) -> None:
        """Keep the first `counts_B` uncommitted tokens of each row where they are."""
        self.lengths_B += counts_B

    def settle(self, lengths: Sequence[int]) -> None:
        """Tell the host how long the rows are after a commit, without waiting for the device."""
        self.lengths = list(lengths)

    def keepable(self, lengths: Sequence[int]) -> list[int]:
        """Return how many of so many committed tokens per row can be kept when it is cut there."""
        return list(lengths)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed tokens."""
        self.settle(lengths)
        assign(self.lengths_B, self.lengths)

    def prefill(self, texts: Sequence[Sequence[int]], observer: "Observer | None" = None) -> None:
        """Append tokens known beforehand to each row's committed text, showing their features to the observer.

        Where some rows have texts already, those that have nothing to read take no part.
        """
        self.span = None  # one that serves for rounds may be too narrow, and the next round fixes its own
        for rows in _runs(texts) if self.divisible and any(self.lengths) else [slice(0, self.batch_size)]:
            # A row that would be padded past the storage's end reads alone, as do those beside it.
            fits = max(self.lengths[rows]) + max(map(len, texts[rows])) <= self.capacity or not self.divisible
            for some in [rows] if fits else [slice(row, row + 1) for row in range(rows.start, rows.stop)]:
                self._prefill(texts[some], some, observer)

    def _prefill(self, texts: Sequence[Sequence[int]], rows: slice, observer: "Observer | None") -> None:
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
            self.rewind([*self.lengths[: rows.start], *(map(_sum, starts, parts)), *self.lengths[rows.stop :]])
            done += size

    def _read(self, parts: Sequence[list[int]], rows: slice, size: int) -> Tensor:
        """Pass the next tokens of some adjacent rows, at most `size` each, and return their features `[B, size, F]`."""
        tokens_BT = brought(torch.tensor([part + [0] * (size - len(part)) for part in parts]), self.device)
        return self.part(rows).extend(tokens_BT, causal_block(len(parts), size, self.device))

    @property
    def divisible(self) -> bool:
        """Whether there is storage, so that `part` can share it."""
        return self.address != 0

    def part(self, rows: slice) -> Self:
        """Return a context of some adjacent rows, which shares their storage; what the host knows of them is a copy."""
        if rows == slice(0, self.batch_size):
            return self
        part = copy.copy(self)
        part.lengths, part.lengths_B = self.lengths[rows], self.lengths_B[rows]
        part.batch_size, part._positions_BS = len(part.lengths), self._positions_BS[rows]
        part._rows_B1 = self._rows_B1[: part.batch_size]
        part._share(self, rows)
        return part

    def _share(self, whole: "Context", rows: slice) -> None:  # noqa: B027 (storage of one's own has whoever has some)
        """Take the storage of some rows of another context."""

    def resize(self, rows: int, most: int) -> None:
        """Have so many rows from now on, never more than `most`: others sleep, and come back as they were."""
        self.lengths = self._storage.resized_list("lengths", self.lengths, rows, int)
        seen = len(self._storage.whole("positions", self._positions_BS))
        self.lengths_B = self._storage.resized("lengths", self.lengths_B, rows)
        self._rows_B1 = self._storage.resized("rows", self._rows_B1, rows)
        self._positions_BS = self._storage.resized("positions", self._positions_BS, rows)
        if rows > seen:
            self._rows_B1[seen:, 0] = torch.arange(seen, rows, device=self.device)
            self._positions_BS[seen:] = torch.arange(self.capacity, device=self.device)
        self._resize(rows, most)
        self.batch_size = rows

    def _resize(self, rows: int, most: int) -> None:
        """Let the storage have so many rows."""
        raise NotImplementedError

    def swap_rows(self, first: int, second: int) -> None:
        """Swap two rows, the second of which may sleep, with their committed texts."""
        lengths = self._storage.whole_list("lengths", self.lengths)
        self._swap_rows(first, second, max(lengths[first], lengths[second]))
        self.lengths = self._storage.swapped_list("lengths", self.lengths, first, second)
        self._storage.swap("lengths", self.lengths_B, first, second)
        self._storage.swap("positions", self._positions_BS, first, second)

    def _swap_rows(self, first: int, second: int, used: int) -> None:
        """Do so with the first slots of the storage."""
        raise NotImplementedError

    def clear(self, row: int) -> None:  # noqa: B027
        """Forget what a row holds, down to its numbers: they may be none."""

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots per row, keeping what is committed."""
        if capacity > self.capacity:
            if self.device.type == "cuda":  # storage that stays put keeps captured rounds valid
                capacity = round_up(capacity)
            whole_BS = self._storage.whole("positions", self._positions_BS)
            fresh_BS = torch.arange(self.capacity, capacity, device=self.device).repeat(len(whole_BS), 1)
            self._positions_BS = self._storage.keep("positions", torch.cat([whole_BS, fresh_BS], dim=1), self.batch_size)
            self._grow(capacity)
            self.capacity = capacity

    @property
    def nbytes(self) -> int:
        """Bytes of storage, of rows at work or not."""
        return 0

    def adopt(self, other: "Context") -> bool:
        """Take over the storage of a context that nobody needs any more, before there is any; return whether it fits.

        What it holds is forgotten, but stays there: numbers that may be none are to be `wipe`d.
        """
        return False

    def wipe(self) -> None:  # noqa: B027
        """Forget what all rows hold, at work or not, down to their numbers."""

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """Enlarge the storage."""

    @abstractmethod
    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store and compute T tokens per row; slot s is attended to where `visible_BTS` says so."""

    @abstractmethod
    def _move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy what is stored in some slots of each row to others."""


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


Observer = Callable[[slice, Sequence[int], Sequence[int], Tensor], None]
"""`(rows, starts, counts, features_BTF)`, of those rows alone: who wants to see features of texts while they are read."""


def _runs(texts: Sequence[Sequence[int]]) -> list[slice]:
    """Return the longest runs of adjacent rows that have something to read."""
    runs: list[slice] = []
    for row, text in enumerate(texts):
        if text:
            follows = bool(runs) and runs[-1].stop == row
            runs.append(slice(runs.pop().start if follows else row, row + 1))
    return runs


def _sum(length: int, added: Sequence[int]) -> int:
    return length + len(added)
