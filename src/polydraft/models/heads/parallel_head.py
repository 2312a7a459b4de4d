"""Heads that draft several levels in one pass: P-EAGLE and DFlash.

They append a mask token for each future position to the text. The output at a position gives a distribution that depends on the
text alone, not on the tokens in between, so all nodes of a level share it.

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
    """Sizes and form of a head that drafts several levels in one pass."""

    depths: int
    """Levels drafted by a pass."""
    mask_token: int
    """Replaces tokens that are not known yet."""
    layer_windows: tuple[int, ...]
    """How many positions each layer reaches back."""
    root_drafts: bool = True
    """Whether the output at the last token drafts the first level; if not, the output at the first mask does."""
    causal_windows: bool = False
    """Whether, in layers with a window, a place sees only the places before it (DFlash)."""


class ParallelHead(FeatureHead):
    """A feature head of one or several layers that passes the last token and the mask tokens after it together."""

    shape: ParallelShape
    lacks = "does not read candidates"

    def __init__(self, shape: ParallelShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self.depths, self.windows = shape.depths, shape.layer_windows
        self.upper = nn.ModuleList(HeadLayer(shape) for _ in shape.layer_windows[1:])

    @property
    def all_layers(self) -> Sequence[HeadLayer]:
        """Its layers; the lowest is the head itself."""
        return (self, *self.upper)

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> "ParallelContext":
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""


class PEagleHead(ParallelHead):
    """An EAGLE-3 layer with more layers above it, and learned features for future positions [1]_."""

    def __init__(self, shape: ParallelShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self.mask_F = nn.Parameter(torch.zeros(len(shape.taps) * shape.hidden_size))

    @property
    def fused_mask_H(self) -> Tensor:
        """Replaces fused features that are not known yet; computed once."""
        made = self.kept.get("mask")
        if not isinstance(made, Tensor):
            # Fusing drops the target's last hidden states, which come first.
            made = self.kept["mask"] = self.fused(functional.pad(self.mask_F, (self.shape.hidden_size, 0))[None])[0]
        return made

    def start(self, batch_size: int, capacity: int) -> "PEagleContext":
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""
        return PEagleContext(self, batch_size, capacity)


class DFlashHead(ParallelHead):
    """Layers that read only tokens; the target's features of the text provide additional keys and values to each [2]_."""

    side_by_side = 1

    def fused(self, features_RF: Tensor) -> Tensor:
        """Project the target's features into the space of the layers' inputs."""
        return self.feature_norm(super().fused(features_RF))  # type: ignore[no-any-return]  # torch: modules return anything

    def entry(self, fused_BTH: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the input of the lowest layer, both from the tokens alone."""
        embedded_BTH = functional.embedding(tokens_BT, self.tables[0]).to(fused_BTH.dtype)
        return embedded_BTH, self.token_norm(embedded_BTH)

    def start(self, batch_size: int, capacity: int) -> "DFlashContext":
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""
        return DFlashContext(self, batch_size, capacity)


class ParallelContext(HeadContext):
    """Keys and values of a batch's entries, in all layers."""

    _head: ParallelHead

    @abstractmethod
    def draft(self, tokens_BW: Tensor, fused_BWH: Tensor, fresh_B: Tensor) -> Tensor:
        """Read the first `fresh_B` entries of each row and return the outputs of all levels `[B, D, H]`.

        The entries stay uncommitted.
        """

    def _ahead(self, fresh_B: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        """Return depths and visibility of `count` places that follow the first `fresh_B` of `width` entries and see them."""
        place_U, fresh_B1 = torch.arange(width + count, device=self.device), fresh_B.clamp(min=1)[:, None]
        seen_BU = (place_U < fresh_B1) | (place_U >= width)
        return fresh_B1 + place_U[:count], seen_BU[:, None].expand(-1, count, -1)

    def _masks(self, rows: int, count: int) -> Tensor:
        return torch.full((rows, count), self._head.shape.mask_token, device=self.device)


class PEagleContext(ParallelContext):
    """Entries of a P-EAGLE head: those of the text, then a causal chain of places."""

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
    """Entries of a DFlash head: the features of all tokens but the last, then a block of places that all see each other.

    The block begins with the last token, whose features are not known yet.
    """

    _head: DFlashHead

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Store the keys and values of the next entries: every layer projects the same features."""
        positions_BT = self._aim_behind(tokens_BT.shape[1])
        angles_BT3C = self._angles_P3C[positions_BT]
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
        """Restrict what places see to a window before the block and, if windows are causal, to earlier places."""
        if window == ENDLESS:
            return visible_BTS
        position_B1S = self.positions_BS[:, None, : visible_BTS.shape[2]]
        near_BTS = position_B1S >= positions_BT[:, :1, None] - window
        if self._head.shape.causal_windows:
            near_BTS = near_BTS & (position_B1S <= positions_BT[:, :, None])
        return visible_BTS & near_BTS
