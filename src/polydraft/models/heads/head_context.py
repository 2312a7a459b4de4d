"""The context of a head: keys and values of a batch's entries, and the passes that fill them."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.devices import is_host
from polydraft.models.attention import steady_attention
from polydraft.models.blocks import Pool
from polydraft.models.cache import SlotCache
from polydraft.models.device_blocks import maps_memory
from polydraft.models.language_model import Context
from polydraft.operations import operation
from polydraft.trees import Block, causal_block

if TYPE_CHECKING:
    from polydraft.models.heads.feature_head import FeatureHead
    from polydraft.models.heads.head import Head


_FAR = 1024
"""Windows at least this wide never end inside a tree, where kernels could not apply them."""


class FastHead(ABC):
    """A feature head run by a backend, a whole pass at once."""

    @abstractmethod
    def read(
        self, context: "HeadContext", tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None
    ) -> Tensor | None:
        """Do what `HeadContext.read` does; return None if torch has to run this pass."""

    def store(self, context: "HeadContext", tokens_BT: Tensor, fused_BTH: Tensor) -> bool:
        """Do what `HeadContext.store` does; return False if torch has to."""
        return False

    def fused(self, features_RF: Tensor) -> Tensor | None:
        """Do what `FeatureHead.fused` does; return None if torch has to."""
        return None


@operation
def fast_head(head: "FeatureHead") -> FastHead | None:
    """Return what runs whole passes of a feature head; None means torch runs them."""
    return None


@operation
def take_roots(outputs_BWH: Tensor, fresh_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Commit all but the last of the first `fresh_B` entries of each row; return the last one's output, `[B, 1, H]`."""
    before_B = (fresh_B - 1).clamp(min=0)
    lengths_B += before_B
    rows_B1 = torch.arange(len(fresh_B), device=fresh_B.device)[:, None]
    return outputs_BWH[rows_B1, before_B[:, None]]


@operation
def keep_entries(
    tokens_BW: Tensor,
    path_BW: Tensor,
    keep_B: Tensor,
    features_BNF: Tensor,
    lengths_B: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Commit the root's entry, and store those after it in `kept`: tokens, features, and how many there are."""
    kept_tokens_BW, kept_features_BWF, fresh_B = kept
    lengths_B += (keep_B > 0).long()
    kept_tokens_BW.copy_(tokens_BW)
    kept_features_BWF.copy_(features_BNF.gather(1, path_BW[..., None].expand(-1, -1, features_BNF.shape[-1])))
    fresh_B.copy_(keep_B)


def following(fused_BWH: Tensor, parents: Tensor | None) -> Tensor:
    """Return the features before each token: feature t for token t, or the one that `parents` names."""
    if parents is None:
        return fused_BWH
    if fused_BWH.shape[1] == 1:
        return fused_BWH.expand(-1, parents.shape[-1], -1)
    if parents.dim() == 1 or len(parents) == 1:
        return fused_BWH.index_select(1, parents.flatten())
    return fused_BWH.gather(1, parents[..., None].expand(-1, -1, fused_BWH.shape[-1]))


class Entries(Context):
    """The context of a head."""

    _head: "Head"

    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features, taps included, into the space of the head's own outputs."""
        return self._head.fused(features_RF)

    @property
    def divisible(self) -> bool:
        """Always: storage, if there is any, is allocated when `part` needs it."""
        return True

    def borrow(self, context: Context) -> None:
        """Set the target's context, for heads that attend to it."""

    @abstractmethod
    def read(self, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None = None) -> Tensor:
        """Pass uncommitted entries through the head and return its outputs `[B, T, H]`.

        `parents` says which of the features each token follows, `[T]` or `[B, T]`; by default token t follows feature t.
        """

    @abstractmethod
    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Read the next entries of texts without returning outputs."""


class HeadContext(Entries):
    """Keys and values of the entries of one batch."""

    elastic = True
    cache: SlotCache
    _head: "FeatureHead"

    def __init__(self, head: "FeatureHead", batch_size: int, capacity: int) -> None:
        layers = len(head.all_layers)
        super().__init__(head, SlotCache(layers, capacity), batch_size, capacity, head.device, max_positions=None)
        self._head, self.window = head, head.shape.window
        self._fused_BTH: Tensor | None = None
        """Features that the tokens of the current pass follow, see `read`."""
        self._angles_P3C = head.angles(torch.arange(capacity, device=head.device))
        """Rotary angles of every position."""
        self.fast = fast_head(head)

    def lend(self, pool: Pool) -> None:
        """Let rows take memory from a pool: on a host, or if kernels, which touch no other slots, run all passes."""
        by_kernels = type(self) is HeadContext and self.fast is not None and len(self._head.all_layers) == 1
        if is_host(self.device) or (by_kernels and self._head.shape.window >= _FAR and maps_memory(self.device)):
            self.cache.pool = pool

    def open(self) -> None:
        """Allocate storage now."""
        shape, like_B = self._head.shape, torch.empty(self.batch_size, dtype=self._head.dtype, device=self.device)
        self.cache.held(like_B, shape.num_key_heads, shape.head_size)

    def read(self, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None = None) -> Tensor:
        """Pass uncommitted entries through the head and return its outputs `[B, T, H]`."""
        if self.fast is not None:
            outputs_BTH = self.fast.read(self, tokens_BT, fused_BWH, block, parents)
            if outputs_BTH is not None:
                return outputs_BTH
        self._fused_BTH = following(fused_BWH, parents)
        # If all rows are equally long, the host knows every place, which halves the number of calls.
        if self.aligned:
            with steady_attention(self.device):
                return self._read_aligned(tokens_BT, self._fused_BTH, block)
        return self.extend(tokens_BT, block)

    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features, taps included, into the space of the head's own outputs."""
        fused_RH = None if self.fast is None else self.fast.fused(features_RF)
        return super().fused(features_RF) if fused_RH is None else fused_RH

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Read the next entries of texts without returning outputs, so that a single layer only computes keys and values."""
        if self.fast is not None and self.fast.store(self, tokens_BT, fused_BTH):
            return
        rows, size = tokens_BT.shape
        if len(self._head.all_layers) > 1:
            self.span = None  # that of rounds may be too narrow
            self.read(tokens_BT, fused_BTH, causal_block(rows, size, self.device))
            return
        positions_BT = self._aim_behind(size)
        normed_BTX = self._head.entry(fused_BTH, tokens_BT)[1]
        _, key_BHTC, value_BHTC = self._head.projected(normed_BTX, positions_BT, self._angles_P3C[positions_BT])
        self.cache.update(key_BHTC, value_BHTC, 0)

    def _aim_behind(self, size: int) -> Tensor:
        """Aim the cache at the `size` slots behind each row's committed entries; return their positions."""
        positions_BT = self.lengths_B[:, None] + torch.arange(size, device=self.device)
        self.positions_BS[self._rows_B1, positions_BT] = positions_BT
        self.cache.aim(positions_BT, self.lengths[0] if self.aligned else None, max(self.lengths) + size)
        return positions_BT

    def _read_aligned(self, tokens_BT: Tensor, fused_BTH: Tensor, block: Block) -> Tensor:
        """Do what `extend` and `_forward` do, for rows of equal length."""
        start = self.lengths[0]
        first, used = start + block.start, start + block.stop
        assert used <= self.capacity, (used, self.capacity)
        positions_BT = block.depths_BT + start
        self.positions_BS[:, first:used] = positions_BT
        visible_BTS = functional.pad(block.visible_BTU, (start, 0), value=True)
        self.cache.aim(positions_BT, first, used)
        return self._outputs(tokens_BT.clamp(min=0), fused_BTH, positions_BT, visible_BTS)

    def _outputs(self, tokens_BT: Tensor, fused_BTH: Tensor, positions_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store entries in the slots that the cache is aimed at, and return the head's outputs."""
        passing_BTH, normed_BTX = self._head.entry(fused_BTH, tokens_BT)
        angles_BT3C = self._angles_P3C[positions_BT]
        for number, layer in enumerate(self._head.all_layers):
            if number:
                assert layer.attention_norm is not None
                normed_BTX = layer.attention_norm(passing_BTH)
            query_BHTC, key_BHTC, value_BHTC = layer.projected(normed_BTX, positions_BT, angles_BT3C)
            key_BHSC, value_BHSC = self.cache.update(key_BHTC, value_BHTC, number)
            seen_BTS = self._near(self._head.windows[number], positions_BT, visible_BTS)
            passing_BTH = layer.attended(passing_BTH, query_BHTC, key_BHSC, value_BHSC, seen_BTS[:, None])
        return passing_BTH

    def _near(self, window: int, positions_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Restrict what tokens see to a window."""
        used = visible_BTS.shape[2]
        if used <= window:
            return visible_BTS
        return visible_BTS & (positions_BT[:, :, None] - self.positions_BS[:, None, :used] < window)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        assert self._fused_BTH is not None, "call read() instead of extend()"
        size, used = tokens_BT.shape[1], visible_BTS.shape[2]
        self.cache.aim(slots_BT, used - size if self.aligned else None, used)
        return self._outputs(tokens_BT, self._fused_BTH, positions_BT, visible_BTS)

    def part(self, rows: slice) -> Self:
        """Return a context of some adjacent rows that shares their storage; the host's lengths are copied."""
        self.open()
        return super().part(rows)

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        self._angles_P3C = self._head.angles(torch.arange(capacity, device=self.device))
