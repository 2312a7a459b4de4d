"""Heads that draft several levels by one pass: P-EAGLE and DFlash.

Behind the text they put one place for each token to come, which holds a mask instead of what is not known yet. The output at a
place is a distribution given the text alone, whatever tokens lie between: all nodes of a level have the same.

References
----------
.. [1] Hui et al. 2026, P-EAGLE, arXiv:2602.01469.
.. [2] Chen et al. 2026, DFlash, arXiv:2602.06036.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.heads.feature_head import FeatureHead, HeadShape
from polydraft.models.heads.head_layer import HeadLayer
from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.heads.parallel_context import DFlashContext, ParallelContext, PEagleContext


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
    """A head of one or several layers whose places for tokens to come are passed together with the last token."""

    shape: ParallelShape

    def __init__(
        self,
        shape: ParallelShape,
        embedding_VH: Tensor,
        output_VH: Tensor,
        vocabulary: PartialVocabulary | None = None,
        name: str = "parallel head",
    ) -> None:
        super().__init__(shape, embedding_VH, output_VH, vocabulary, name)
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
    """An EAGLE-3 layer with others above it, and features of its own for tokens to come [1]."""

    def __init__(
        self,
        shape: ParallelShape,
        embedding_VH: Tensor,
        output_VH: Tensor,
        vocabulary: PartialVocabulary | None = None,
        name: str = "P-EAGLE head",
    ) -> None:
        super().__init__(shape, embedding_VH, output_VH, vocabulary, name)
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
        from polydraft.models.heads.parallel_context import PEagleContext  # late: it loads transformers

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
        from polydraft.models.heads.parallel_context import DFlashContext

        return DFlashContext(self, batch_size, capacity)
