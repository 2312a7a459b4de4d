"""Feature heads: drafts of one transformer layer that read the target's hidden states and use its output head.

References
----------
.. [1] Li et al. 2024, EAGLE, arXiv:2401.15077 (drafting in feature space).
.. [2] Li et al. 2025, EAGLE-3, arXiv:2503.01840 (several layers as input, training on the head's own outputs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.heads.head import Head
from polydraft.models.heads.head_context import HeadContext
from polydraft.models.heads.head_layer import HeadLayer, norm_of
from polydraft.models.products import by_rows
from polydraft.sampling import PartialVocabulary

ENDLESS = 2**31 - 1
"""Window of a layer that sees the whole text."""


class TapNorm(StrEnum):
    """How a head normalises the features that it reads, before they are fused."""

    NONE = "none"
    EACH = "each"
    """Each layer's output by itself."""
    ALL = "all"
    """All outputs side by side, as one vector."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes and form of a feature head; the defaults are those of heads made by `polydraft train head`."""

    hidden_size: int
    """The target's hidden size."""
    taps: tuple[int, ...] = ()
    """Layers of the target, counted from 1, whose outputs the head reads besides the last hidden states."""
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_size: int
    window: int
    """Tokens that attention reaches back: the longest text seen in training."""
    rope_theta: float = 10_000.0
    rope_frequencies: tuple[float, ...] = ()
    """Radians per position for each pair of channels, if `rope_theta` does not determine them."""
    rope_gain: float = 1.0
    """Factor of rotated queries and keys."""
    norm_epsilon: float = 1e-5
    reads_last: bool = True
    """Whether the head reads the target's last hidden states; if not, only the outputs of `taps`."""
    tap_norm: TapNorm = TapNorm.NONE
    joins: bool = True
    """Whether features and token are joined to one vector before attention; if not, attention reads both (EAGLE-3)."""
    normed: bool = True
    """Whether tokens, features, the input of attention and outputs are normed; if not, only the input of the MLP is (EAGLE)."""
    join_bias: bool = False
    normed_residual: bool = False
    """If features and token are not joined: whether the residual stream starts from normed features."""
    normed_output: bool = True
    """Whether the head's outputs replace features after the last norm; if not, before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    """Whether each head's queries and keys are normed (Qwen3)."""


class FeatureHead(HeadLayer, Head):
    """A head of one transformer layer.

    Parameters
    ----------
    embedding_VH, output_VH : Tensor
        The target's tables, which are neither trained nor saved with the head.
    vocabulary : PartialVocabulary, optional
        Draft only these tokens.
    """

    side_by_side: ClassVar[int] = 2
    """Vectors that queries, keys and values read side by side if features and token are not joined."""

    def __init__(
        self,
        shape: HeadShape,
        embedding_VH: Tensor,
        output_VH: Tensor,
        vocabulary: PartialVocabulary | None = None,
        name: str = "feature head",
    ) -> None:
        size, read = shape.hidden_size, len(shape.taps) + shape.reads_last
        fuse = nn.Linear(size * read, size, bias=False) if shape.taps else None
        join = nn.Linear(2 * size, size, bias=shape.join_bias) if shape.joins else None
        super().__init__(shape, None if shape.joins else self.side_by_side * size)
        self.vocabulary, self.name, self.fuse, self.join = vocabulary, name, fuse, join
        self.hidden_size, self.taps = size, shape.taps
        normed = {TapNorm.NONE: [], TapNorm.EACH: [size] * read, TapNorm.ALL: [size * read]}[shape.tap_norm]
        self.tap_norms = nn.ModuleList(norm_of(shape, width) for width in normed)
        self.feature_norm, self.token_norm, self.output_norm = (norm_of(shape, size) for _ in range(3))
        # Input and output tables. They are not buffers because they belong to the target; loading a head with a partial
        # vocabulary takes its rows from the target's table again. Heads with tables of their own put them here.
        self.tables = (embedding_VH, output_VH if vocabulary is None else output_VH[vocabulary.tokens_D])
        self.windows: Sequence[int] = (shape.window,)
        """How many positions each layer reaches back."""

    @property
    def all_layers(self) -> Sequence[HeadLayer]:
        """Its layers; the lowest is the head itself."""
        return (self,)

    @property
    def num_columns(self) -> int:
        """Tokens it can draft."""
        return len(self.tables[1])

    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features, taps included, into the space of the head's own outputs."""
        if not self.shape.reads_last:
            features_RF = features_RF[..., self.shape.hidden_size :]
        if self.tap_norms:
            parts = features_RF.chunk(len(self.tap_norms), dim=-1)
            features_RF = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)
        if self.fuse is None:
            return features_RF
        return self._multiplied(self.fuse, features_RF)

    def entry(self, fused_BTH: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Combine features with the tokens that follow them: return the residual stream and the input of attention."""
        embedded_BTH = functional.embedding(tokens_BT, self.tables[0]).to(fused_BTH.dtype)
        normed_BTH = self.feature_norm(fused_BTH)
        pair_BTX = torch.cat([normed_BTH, self.token_norm(embedded_BTH)], dim=-1)
        if self.join is None or self.attention_norm is None:
            return normed_BTH if self.shape.normed_residual else fused_BTH, pair_BTX
        joined_BTH = self._multiplied(self.join, pair_BTX)
        return joined_BTH, self.attention_norm(joined_BTH)

    def finished(self, passing_BTH: Tensor, mixed_BTX: Tensor) -> Tensor:
        """Return the outputs of the layer, which replace features, given the output of attention."""
        output_BTH = super().finished(passing_BTH, mixed_BTX)
        return self.output_norm(output_BTH) if self.shape.normed_output else output_BTH

    def head(self, outputs_RH: Tensor) -> Tensor:
        """Apply the output table: the target's, its rows for the draft's vocabulary, or the head's own."""
        if not self.shape.normed_output:
            outputs_RH = self.output_norm(outputs_RH)
        if (product := self._product(self.tables[1])) is not None:
            return product(outputs_RH)
        table_VH = self.tables[1].to(outputs_RH.dtype)
        return by_rows(lambda rows_RH: functional.linear(rows_RH, table_VH), outputs_RH)

    def start(self, batch_size: int, capacity: int) -> HeadContext:
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""
        return HeadContext(self, batch_size, capacity)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Move the tables, too: they are not buffers.
        self.tables = (fn(self.tables[0]), fn(self.tables[1]))
        return super()._apply(fn, recurse)
