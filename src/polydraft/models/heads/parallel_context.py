"""The memory of a batch in a head that drafts several levels by one pass, and that pass."""

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models.heads.feature_head import ENDLESS
from polydraft.models.heads.head_context import HeadContext
from polydraft.models.heads.parallel_head import DFlashHead, ParallelHead, PEagleHead
from polydraft.trees import Block


class ParallelContext(HeadContext):
    """Keys and values of the entries of one batch, in all layers."""

    _head: ParallelHead

    @abstractmethod
    def draft(self, tokens_BW: Tensor, fused_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Read the next entries of each text, the first `fresh_B` of them, and return the outputs of all levels `[B, D, H]`.

        They stay uncommitted.
        """

    def _ahead(self, fresh_B: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """Return depths and sight of `count` places that follow the first `fresh_B` of `width` entries, and see all of them."""
        place_U, fresh_B1 = torch.arange(width + count, device=self.device), fresh_B.clamp(min=1)[:, None]
        seen_BU = (place_U < fresh_B1) | (place_U >= width)
        return fresh_B1 + place_U[:count], seen_BU[:, None].expand(-1, count, -1)

    def _masks(self, rows: int, count: int) -> Tensor:
        return torch.full((rows, count), self._head.shape.mask_token, device=self.device)


class PEagleContext(ParallelContext):
    """Entries of a P-EAGLE head: those of the text, then a chain of places that see the text and each other, in order."""

    _head: PEagleHead

    def draft(self, tokens_BW: Tensor, fused_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Read entries and places in one pass."""
        (rows, width), masks = tokens_BW.shape, self._head.shape.depths - 1
        depths_BM, seen_BMU = self._ahead(fresh_B, width, masks)
        entry_BW = torch.arange(width, device=self.device).expand(rows, -1)
        visible_BTU = functional.pad(seen_BMU, (0, 0, width, 0), value=True).tril()
        block = Block(0, torch.cat([entry_BW, depths_BM], 1), visible_BTU)
        mask_BMH = self._head.fused_mask_H.to(fused_BWH.dtype).expand(rows, masks, -1)
        tokens_BT = torch.cat([tokens_BW, self._masks(rows, masks)], 1)
        outputs_BTH = self.read(tokens_BT, torch.cat([fused_BWH, mask_BMH], 1), block)
        last_B11 = (fresh_B - 1).clamp(min=0)[:, None, None]
        root_B1H = outputs_BTH.gather(1, last_B11.expand(-1, -1, outputs_BTH.shape[2]))
        return torch.cat([root_B1H, outputs_BTH[:, width:]], 1)


class DFlashContext(ParallelContext):
    """Entries of a DFlash head: the features of all tokens but the last; behind them a block of places that all see each other.

    The last token, of which there are no features yet, is the first of the block.
    """

    _head: DFlashHead

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Take in the next entries of texts: in every layer, features leave the same behind."""
        size = tokens_BT.shape[1]
        positions_BT = self.lengths_B[:, None] + torch.arange(size, device=self.device)
        self.positions_BS[self._rows_B1, positions_BT] = positions_BT
        angles_BT3C = self._angles_P3C[positions_BT]
        self.cache.aim(positions_BT, self.lengths[0] if self.aligned else None, max(self.lengths) + size)
        for number, layer in enumerate(self._head.all_layers):
            self.cache.update(*layer.projected(fused_BTH, positions_BT, angles_BT3C)[1:], number)

    def draft(self, tokens_BW: Tensor, fused_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Take in entries, then read the block."""
        (rows, width), shape = tokens_BW.shape, self._head.shape
        size = shape.depths + (not shape.root_drafts)
        self.store(tokens_BW, fused_BWH)
        root_B1 = tokens_BW.gather(1, (fresh_B - 1).clamp(min=0)[:, None])
        tokens_BT = torch.cat([root_B1, self._masks(rows, size - 1)], 1)
        outputs_BTH = self.read(tokens_BT, fused_BWH, Block(width, *self._ahead(fresh_B, width, size)))
        return outputs_BTH[:, size - shape.depths :]

    def _near(self, window: int, positions_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Narrow what places see to a window before the block, and perhaps to places before them."""
        if window == ENDLESS:
            return visible_BTS
        position_B1S = self.positions_BS[:, None, : visible_BTS.shape[2]]
        near_BTS = position_B1S >= positions_BT[:, :1, None] - window
        if self._head.shape.causal_windows:
            near_BTS = near_BTS & (position_B1S <= positions_BT[:, :, None])
        return visible_BTS & near_BTS
