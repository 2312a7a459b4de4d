"""The memory of a batch in a feature head: keys and values of entries, and the passes that fill them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.backends.native import NativeBody, Rows
from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.models._fused import MOST_TOKENS, TreeView
from polydraft.models._fused_head import Entries, FusedHead, following
from polydraft.models._slots import Placed
from polydraft.models.cache import SlotCache
from polydraft.models.language_model import Context, steady_attention
from polydraft.models.tree_attention import obstacle
from polydraft.trees import Block, causal_block

if TYPE_CHECKING:
    from polydraft.models.heads.feature_head import FeatureHead


class HeadContext(Context):
    """Keys and values of the entries of one batch."""

    elastic = True

    def __init__(self, head: "FeatureHead", batch_size: int, capacity: int) -> None:
        super().__init__(batch_size, capacity, head.device, max_positions=None)
        self._head, self.window = head, head.shape.window
        self.cache: SlotCache = SlotCache(1, capacity)
        self._fused_BTH: Tensor | None = None
        self._parents: Tensor | None = None
        """What the pass at hand reads, see `read`."""
        self._angles_P3C = head.angles(torch.arange(capacity, device=head.device))
        """Of every position, as long as the memory."""
        runs = head.device.type == "cuda" and obstacle(head.device, head.dtype) is None
        self._fused = FusedHead(head, head.shape.norm_epsilon) if runs else None
        self._native = head.native_body()
        self._checked = False
        """Whether the native body was found in order since the last text began."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed entries."""
        super().rewind(lengths)
        self._checked = False

    def read(self, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None = None) -> Tensor:
        """Pass uncommitted entries through the head and return its outputs `[B, T, H]`.

        `parents` say which of the features each token follows, `[T]` or row by row; token t follows feature t without them.
        """
        self._fused_BTH, self._parents = fused_BWH, parents
        if self._fused is not None:  # which selects by itself
            return self.extend(tokens_BT, block)
        fused_BTH = following(fused_BWH, parents)
        self._fused_BTH, self._parents = fused_BTH, None
        if (native := self._ready()) is not None:
            return native(tokens_BT, block, self._rows(native), features_BTF=fused_BTH)
        # Where all rows are equally long the host knows every place, and a level is half as many calls.
        if self.aligned:
            with steady_attention(self.device):
                return self._read_aligned(tokens_BT, fused_BTH, block)
        return self.extend(tokens_BT, block)

    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features, taps included, into the space of the head's own outputs."""
        return self._head.fused(features_RF) if self._fused is None else self._fused.fused(features_RF)

    def take_roots(self, outputs_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Commit all entries of each row but the last, of which there are `fresh_B`; return that one's output, `[B, 1, H]`."""
        if not kernels_run(outputs_BWH):
            before_B = (fresh_B - 1).clamp(min=0)
            self.advance(before_B)
            return outputs_BWH[self._rows_B1, before_B[:, None]]
        from polydraft.backends.triton import slot_kernels as kernels

        batch_size, _, channels = outputs_BWH.shape
        assert outputs_BWH.stride(1) == channels and outputs_BWH.stride(2) == 1
        roots_B1H = outputs_BWH.new_empty(batch_size, 1, channels)
        kernels.take_roots[batch_size,](
            outputs_BWH, fresh_B, self.lengths_B, roots_B1H, channels, outputs_BWH.stride(0),
            BLOCK=power_of_two(channels), num_warps=4,
        )  # fmt: skip
        return roots_B1H

    def keep_entries(
        self, tokens_BW: Tensor, path_BW: Tensor, keep_B: Tensor, features_BNF: Tensor, kept: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Commit the root's entry, and write those that follow it over those before: tokens, features and how many count."""
        kept_tokens_BW, kept_features_BWF, fresh_B = kept
        if not kernels_run(tokens_BW):
            self.advance((keep_B > 0).long())
            kept_tokens_BW.copy_(tokens_BW)
            kept_features_BWF.copy_(features_BNF.gather(1, path_BW[..., None].expand(-1, -1, features_BNF.shape[-1])))
            fresh_B.copy_(keep_B)
            return
        from polydraft.backends.triton import slot_kernels as kernels

        tokens_BW, path_BW, width = side_by_side(tokens_BW), side_by_side(path_BW), kept_tokens_BW.shape[1]
        assert kept_tokens_BW.is_contiguous() and kept_features_BWF.is_contiguous() and features_BNF.stride(2) == 1
        assert tokens_BW.shape == path_BW.shape == kept_tokens_BW.shape, (tokens_BW.shape, kept_tokens_BW.shape)
        kernels.keep_entries[len(tokens_BW), width](
            tokens_BW, path_BW, keep_B, features_BNF, self.lengths_B, kept_tokens_BW, kept_features_BWF, fresh_B,
            width, features_BNF.shape[2], tokens_BW.stride(0), path_BW.stride(0), *features_BNF.stride()[:2],
            BLOCK=1024, num_warps=4,
        )  # fmt: skip

    def _ready(self) -> NativeBody | None:
        """Return compiled code, if there is some and it is in order."""
        native = self._native
        if native is None or torch.is_grad_enabled() or not native.ready(sure=self._checked):
            return None
        self._checked = True
        return native

    def _rows(self, native: NativeBody) -> Rows:
        keys_LBHSC, values_LBHSC = self.cache.whole(self.batch_size, self._head.dtype, *native.key_shape)
        return Rows(
            lengths_B=self.lengths_B,
            slot_positions_BS=self._positions_BS,
            keys_LBHSC=keys_LBHSC,
            values_LBHSC=values_LBHSC,
            window=self._head.shape.window,
        )

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Take in the next entries of texts whose outputs nobody wants: with one layer, keys and values are all they leave."""
        batch_size, size = tokens_BT.shape
        if (native := self._ready()) is not None:
            block = causal_block(batch_size, size, self.device)
            native.store(tokens_BT, block, self._rows(native), features_BTF=fused_BTH)
            return
        positions_BT = self.lengths_B[:, None] + torch.arange(size, device=self.device)
        self._positions_BS[self._rows_B1, positions_BT] = positions_BT
        normed_BTX = self._head.entry(fused_BTH, tokens_BT)[1]
        _, key_BHTC, value_BHTC = self._head.projected(normed_BTX, positions_BT, self._angles_P3C[positions_BT])
        self.cache.aim(positions_BT, self.lengths[0] if self.aligned else None, max(self.lengths) + size)
        self.cache.update(key_BHTC, value_BHTC, 0)

    def _read_aligned(self, tokens_BT: Tensor, fused_BTH: Tensor, block: Block) -> Tensor:
        """Do what `extend` and `_forward` do."""
        start, window = self.lengths[0], self._head.shape.window
        first, used = start + block.start, start + block.stop
        assert used <= self.capacity, (used, self.capacity)
        positions_BT = block.depths_BT + start
        self._positions_BS[:, first:used] = positions_BT
        visible_BTS = functional.pad(block.visible_BTU, (start, 0), value=True)
        if used > window:
            visible_BTS = visible_BTS & (positions_BT[:, :, None] - self._positions_BS[:, None, :used] < window)
        self.cache.aim(positions_BT, first, used)
        return self._outputs(tokens_BT.clamp(min=0), fused_BTH, positions_BT, visible_BTS)

    def _outputs(self, tokens_BT: Tensor, fused_BTH: Tensor, positions_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store entries where the cache aims, and return the head's outputs."""
        passing_BTH, normed_BTX = self._head.entry(fused_BTH, tokens_BT)
        query_BHTC, key_BHTC, value_BHTC = self._head.projected(normed_BTX, positions_BT, self._angles_P3C[positions_BT])
        key_BHSC, value_BHSC = self.cache.update(key_BHTC, value_BHTC, 0)
        return self._head.attended(passing_BTH, query_BHTC, key_BHSC, value_BHSC, visible_BTS[:, None])

    def _pass(self, placed: Placed, block: Block, used: int) -> Tensor:
        # The kernels cut off committed text only, so the window must reach over all that is not committed.
        if self._fused is None or block.size > MOST_TOKENS or self._head.shape.window < block.stop:
            return super()._pass(placed, block, used)
        assert self._fused_BTH is not None, "read() is the way in"
        view = TreeView(placed.slots_BT, self.lengths_B, block.visible_BTU, used - block.stop, placed.starts_BT)
        entries = Entries(placed.tokens_BT, self._fused_BTH, self._parents)
        return self._fused(entries, placed.positions_BT, view, self.cache, self.capacity)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        assert self._fused_BTH is not None, "read() is the way in"
        size, used = tokens_BT.shape[1], visible_BTS.shape[2]
        self.cache.aim(slots_BT, used - size if self.aligned else None, used)
        near_BTS = positions_BT[:, :, None] - self._positions_BS[:, None, :used] < self._head.shape.window
        fused_BTH = following(self._fused_BTH, self._parents)
        return self._outputs(tokens_BT, fused_BTH, positions_BT, visible_BTS & near_BTS)

    @property
    def address(self) -> int:
        """Where keys and values begin."""
        return self.cache.address

    def _move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        self.cache.move(source_BD, target_BD)

    @property
    def divisible(self) -> bool:
        """Always: a head knows what its storage looks like."""
        return True

    def _share(self, whole: Context, rows: slice) -> None:
        assert isinstance(whole, HeadContext)
        shape, like_B = self._head.shape, torch.empty(whole.batch_size, dtype=self._head.dtype, device=self.device)
        whole.cache.storage(0, like_B, shape.num_key_heads, shape.head_size)
        self.cache = whole.cache.part(rows)

    def _resize(self, rows: int, most: int) -> None:
        self.cache.resize(rows, most)

    def _swap_rows(self, first: int, second: int, used: int) -> None:
        self.cache.swap_rows(first, second, used)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        self.cache.clear(row)

    def wipe(self) -> None:
        """Forget what all rows hold."""
        self.cache.wipe()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.cache.nbytes

    def adopt(self, other: Context) -> bool:
        """Take over the keys' and values' storage of another context of the same head."""
        if not isinstance(other, HeadContext) or other._head is not self._head or other.capacity < self.capacity:
            return False
        self.reserve(other.capacity)
        return self.cache.adopt(other.cache, self.batch_size)

    def _grow(self, capacity: int) -> None:
        self.cache.grow(capacity)
        self._angles_P3C = self._head.angles(torch.arange(capacity, device=self.device))
