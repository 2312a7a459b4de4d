"""Heads that draft several levels by one pass: P-EAGLE and DFlash.

After the text they append one mask token for each future position. The output at a position is a distribution given the text
alone, not the tokens between: all nodes of a level share it.

References
----------
.. [1] Hui et al. 2026, P-EAGLE, arXiv:2602.01469.
.. [2] Chen et al. 2026, DFlash, arXiv:2602.06036.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.heads.feature_head import ENDLESS, FeatureHead, HeadShape
from polydraft.models.heads.head_context import HeadContext
from polydraft.models.heads.head_layer import HeadLayer
from polydraft.trees import Block


@dataclass(frozen=True, kw_only=True)
class ParallelShape(HeadShape):
    """Sizes and form of a head that drafts several levels by one pass."""

    depths: int
    """Levels that a pass gives."""
    mask_token: int
    """Stands in for tokens that are not known."""
    layer_windows: tuple[int, ...]
    """Positions that each layer reaches back."""
    root_drafts: bool = True
    """Whether the place of the last token gives the first level; if not, the place behind it does."""
    causal_windows: bool = False
    """Whether, in layers that do not see the whole text, a place sees only those before it (DFlash)."""


class ParallelHead(FeatureHead):
    """A feature head of one or several layers that passes the last token and the mask tokens after it together."""

    shape: ParallelShape
    lacks = "does not read candidates"

    def __init__(self, shape: ParallelShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self.depths = shape.depths
        self.upper = nn.ModuleList(HeadLayer(shape) for _ in shape.layer_windows[1:])

    @property
    def all_layers(self) -> Sequence[HeadLayer]:
        """Its layers, the lowest of which is the head itself."""
        return (self, *self.upper)

    @property
    def windows(self) -> Sequence[int]:
        """Positions that each layer reaches back."""
        return self.shape.layer_windows

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> "ParallelContext":
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""


class PEagleHead(ParallelHead):
    """An EAGLE-3 layer with others above it, and learned features for future positions [1]."""

    def __init__(self, shape: ParallelShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self.mask_F = nn.Parameter(torch.zeros(len(shape.taps) * shape.hidden_size))

    @property
    def fused_mask_H(self) -> Tensor:
        """What stands in for fused features that are not known; made once."""
        made = self.kept.get("mask")
        if not isinstance(made, Tensor):
            # Fusing leaves out the target's last hidden states, which come first.
            made = self.kept["mask"] = self.fused(functional.pad(self.mask_F, (self.shape.hidden_size, 0))[None])[0]
        return made

    def start(self, batch_size: int, capacity: int) -> "PEagleContext":
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""
        return PEagleContext(self, batch_size, capacity)


class DFlashHead(ParallelHead):
    """Layers that read tokens only; the target's features of the text are further keys and values in each of them [2]."""

    side_by_side = 1

    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features into the space of what layers read."""
        return self.feature_norm(super().fused(features_RF))  # type: ignore[no-any-return]  # torch: modules return anything

    def entry(self, fused_BTH: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return what passes by attention, and what the lowest layer reads: the tokens."""
        embedded_BTH = functional.embedding(tokens_BT, self.tables[0]).to(fused_BTH.dtype)
        return embedded_BTH, self.token_norm(embedded_BTH)

    def start(self, batch_size: int, capacity: int) -> "DFlashContext":
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""
        return DFlashContext(self, batch_size, capacity)


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
        """Store the keys and values of the next entries: every layer projects the same features."""
        size = tokens_BT.shape[1]
        positions_BT = self.lengths_B[:, None] + torch.arange(size, device=self.device)
        self.positions_BS[self._rows_B1, positions_BT] = positions_BT
        angles_BT3C = self._angles_P3C[positions_BT]
        self.cache.aim(positions_BT, self.lengths[0] if self.aligned else None, max(self.lengths) + size)
        for number, layer in enumerate(self._head.all_layers):
            self.cache.update(*layer.projected(fused_BTH, positions_BT, angles_BT3C)[1:], number)

    def draft(self, tokens_BW: Tensor, fused_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Store the entries, then read the block."""
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
