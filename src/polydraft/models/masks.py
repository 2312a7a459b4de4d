"""Attention masks as Hugging Face models take them: one for the whole model, or one per kind of layer."""

from typing import Any

import torch
from torch import Tensor

from polydraft.models.families import CHUNKED, FULL, SLIDING, WHOLE_KINDS, attention_kinds, chunk_size
from polydraft.models.odd.positions import PatchedPositions


class Masks:
    """Builds the masks of one model.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The language part's configuration.
    window : int, optional
        Tokens that sliding layers see.
    positions : PatchedPositions, optional
        Passes positions to the model, and may pass masks too.
    recurrent : bool
        Whether some layers are recurrent.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype, window: int | None, positions: PatchedPositions | None, recurrent: bool
    ) -> None:
        self.kinds = attention_kinds(config)
        """Kinds of attention, each with its own mask."""
        self._window, self._chunk, self._dtype = window, chunk_size(config), dtype
        self._positions, self._recurrent = positions, recurrent
        self._additive = config._attn_implementation == "eager"

    @property
    def all_visible(self) -> bool:
        """Whether tokens always see their whole text, so that a pass over one token needs no mask."""
        return self._window is None and self._chunk is None and self._positions is None

    def __call__(self, visible_BTS: Tensor, positions_BT: Tensor, slot_positions_BS: Tensor) -> Any:
        """Return the mask that this model takes: a tensor, or one per kind of layer."""
        if self._positions is not None and self._positions.brings_masks:
            return self._positions.biased(visible_BTS, slot_positions_BS, self._dtype)
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            seen_BTS = visible_BTS
            if kind not in WHOLE_KINDS:
                seen_BTS = visible_BTS & self._near(kind, positions_BT[:, :, None], slot_positions_BS[:, None, :])
            masks[kind] = self._formatted(seen_BTS)
        if len(masks) == 1:
            return masks[self.kinds[0]]
        if not self._recurrent:
            return masks
        # Some models look masks up by kind of layer, some by kind of mask.
        wanted = {FULL: masks.get("hybrid"), SLIDING: masks.get("hybrid_sliding"), "conv": None, "linear_attention": None}
        return wanted | masks

    def _near(self, kind: str, position_BT1: Tensor, slot_position_B1S: Tensor) -> Tensor:
        if kind == CHUNKED:
            assert self._chunk is not None
            return position_BT1 // self._chunk == slot_position_B1S // self._chunk
        assert self._window is not None
        return position_BT1 - slot_position_B1S < self._window

    def _formatted(self, visible_BTS: Tensor) -> Tensor:
        mask_B1TS = visible_BTS[:, None]
        if not self._additive:
            return mask_B1TS
        return torch.zeros_like(mask_B1TS, dtype=self._dtype).masked_fill_(~mask_B1TS, torch.finfo(self._dtype).min)
