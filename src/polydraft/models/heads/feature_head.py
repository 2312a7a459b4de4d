"""A draft that reads the target's hidden states: one transformer layer under the target's own output head.

References
----------
.. [1] Li et al. 2024, EAGLE, arXiv:2401.15077 (drafting in feature space).
.. [2] Li et al. 2025, EAGLE-3, arXiv:2503.01840 (several layers as input, training on the head's own outputs).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.devices import is_host
from polydraft.models.heads.head import Head
from polydraft.models.products import Product, by_rows, fast_product
from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.heads.head_context import HeadContext


class TapNorm(StrEnum):
    """What is normed of the features that a head reads, before they are fused."""

    NONE = "none"
    EACH = "each"
    """The output of each layer by itself."""
    ALL = "all"
    """All of them side by side, as one vector."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes and form of a feature head; what has a default is so in heads that `polydraft train head` makes."""

    hidden_size: int
    """The target's hidden size."""
    taps: tuple[int, ...] = ()
    """Layers of the target, counted from 1, whose outputs the head reads besides the last hidden states."""
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_size: int
    window: int
    """Tokens that attention reaches back; as many as training showed it."""
    rope_theta: float = 10_000.0
    rope_frequencies: tuple[float, ...] = ()
    """Radians per position of each pair of channels, where `rope_theta` alone does not say them."""
    rope_gain: float = 1.0
    """Factor of turned queries and keys."""
    norm_epsilon: float = 1e-5
    reads_last: bool = True
    """Whether the head reads the target's last hidden states; if not, the outputs of `taps` only."""
    tap_norm: TapNorm = TapNorm.NONE
    joins: bool = True
    """Whether features and token become one vector below attention; if not, queries, keys and values read both (EAGLE-3)."""
    normed_residual: bool = False
    """Where features and token are not joined: whether features pass by attention normed."""
    normed_output: bool = True
    """Whether a head's outputs stand in for features after the last norm; if not, before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    """Whether each head's queries and keys are normed (Qwen3)."""


class FeatureHead(Head):
    """A head of one transformer layer of our own.

    Parameters
    ----------
    embedding_VH, output_VH : Tensor
        The target's tables; they stay the target's own and are neither trained nor saved.
    vocabulary : PartialVocabulary, optional
        Draft these tokens only.
    """

    def __init__(
        self,
        shape: HeadShape,
        embedding_VH: Tensor,
        output_VH: Tensor,
        vocabulary: PartialVocabulary | None = None,
        name: str = "feature head",
    ) -> None:
        super().__init__()
        size, queries = shape.hidden_size, shape.num_heads * shape.head_size
        keys = shape.num_key_heads * shape.head_size
        self.shape, self.vocabulary, self.name = shape, vocabulary, name
        self.hidden_size, self.taps = size, shape.taps
        epsilon, read = shape.norm_epsilon, len(shape.taps) + shape.reads_last
        self.fuse = nn.Linear(size * read, size, bias=False) if shape.taps else None
        normed = {TapNorm.NONE: [], TapNorm.EACH: [size] * read, TapNorm.ALL: [size * read]}[shape.tap_norm]
        self.tap_norms = nn.ModuleList(_Norm(width, epsilon) for width in normed)
        self.feature_norm, self.token_norm = _Norm(size, epsilon), _Norm(size, epsilon)
        self.join = nn.Linear(2 * size, size, bias=False) if shape.joins else None
        self.attention_norm = _Norm(size, epsilon) if shape.joins else None
        self.mlp_norm, self.output_norm = _Norm(size, epsilon), _Norm(size, epsilon)
        self.qkv = nn.Linear(size if shape.joins else 2 * size, queries + 2 * keys, bias=shape.qkv_bias)
        self.query_norm = _Norm(shape.head_size, epsilon) if shape.query_key_norm else None
        self.key_norm = _Norm(shape.head_size, epsilon) if shape.query_key_norm else None
        self.attention_output = nn.Linear(queries, size, bias=shape.output_bias)
        self.gate_up = nn.Linear(size, 2 * shape.mlp_size, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.mlp_size, size, bias=shape.mlp_bias)
        # Tables of input and output. Not buffers: they belong to the target, and a partial head is cut out of its table again
        # on loading. A head that brings its own puts them here.
        self.tables = (embedding_VH, output_VH if vocabulary is None else output_VH[vocabulary.tokens_D])
        self.native = True
        """Whether to run by compiled code on a CPU."""
        self.int8 = False
        """Whether kernels of ours read the weights in int8."""
        self.kept: dict[str, object] = {}
        """What backends keep with the head, until its weights move."""
        self._products: dict[int, tuple[Tensor, Product | None]] = {}

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.down.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""
        return self.down.weight.dtype

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
        """Bring features and the tokens that follow them together: what passes by attention, and what it reads."""
        embedded_BTH = functional.embedding(tokens_BT, self.tables[0]).to(fused_BTH.dtype)
        normed_BTH = self.feature_norm(fused_BTH)
        pair_BTX = torch.cat([normed_BTH, self.token_norm(embedded_BTH)], dim=-1)
        if self.join is None or self.attention_norm is None:
            return normed_BTH if self.shape.normed_residual else fused_BTH, pair_BTX
        joined_BTH = self._multiplied(self.join, pair_BTX)
        return joined_BTH, self.attention_norm(joined_BTH)

    def angles(self, positions_X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return how far the channels of some positions are turned (RoPE): cosines, sines of either sign, `[X, 3, C/2]`."""
        shape, device = self.shape, positions_X.device
        if shape.rope_frequencies:
            frequencies_C = torch.tensor(shape.rope_frequencies, device=device)
        else:
            exponents_C = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
            frequencies_C = shape.rope_theta**-exponents_C
        angles_XC = positions_X[..., None].float() * frequencies_C
        sines_XC = angles_XC.sin()
        turns_X3C = torch.stack([angles_XC.cos(), -sines_XC, sines_XC], dim=-2)
        return (turns_X3C if shape.rope_gain == 1 else turns_X3C * shape.rope_gain).to(dtype or self.dtype)

    def normed_heads(self, projected_BTX: Tensor) -> Tensor:
        """Return queries, keys and values `[B, T, heads, C]`, queries and keys normed if the head norms them."""
        shape = self.shape
        heads_BTHC = projected_BTX.view(*projected_BTX.shape[:2], -1, shape.head_size)
        if self.query_norm is None or self.key_norm is None:
            return heads_BTHC
        queries, turning = shape.num_heads, shape.num_heads + shape.num_key_heads
        normed = self.query_norm(heads_BTHC[:, :, :queries]), self.key_norm(heads_BTHC[:, :, queries:turning])
        return torch.cat([*normed, heads_BTHC[:, :, turning:]], dim=2)

    def projected(
        self, normed_BTX: Tensor, positions_BT: Tensor, angles_BT3C: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, heads, T, C]`, turned by their positions; their angles may be known already."""
        shape = self.shape
        heads_BTHC = self.normed_heads(self._multiplied(self.qkv, normed_BTX))
        turning = shape.num_heads + shape.num_key_heads
        plain_BTHC = heads_BTHC[:, :, :turning]
        turned_BTHC = _turned(plain_BTHC, self.angles(positions_BT) if angles_BT3C is None else angles_BT3C)
        return (
            turned_BTHC[:, :, : shape.num_heads].transpose(1, 2),
            turned_BTHC[:, :, shape.num_heads :].transpose(1, 2),
            heads_BTHC[:, :, turning:].transpose(1, 2),
        )

    def attended(
        self, passing_BTH: Tensor, query_BHTC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, mask_B1TS: Tensor | None
    ) -> Tensor:
        """Return the outputs of the layer, which stand in for features; `passing_BTH` passed by attention."""
        if query_BHTC.is_cuda:  # no fused CUDA kernel takes grouped heads together with a mask
            copies = self.shape.num_heads // self.shape.num_key_heads
            key_BHSC, value_BHSC = key_BHSC.repeat_interleave(copies, dim=1), value_BHSC.repeat_interleave(copies, dim=1)
        mixed_BHTC = functional.scaled_dot_product_attention(
            query_BHTC, key_BHSC, value_BHSC, attn_mask=mask_B1TS, enable_gqa=True
        )
        return self.finished(passing_BTH, mixed_BHTC.transpose(1, 2).flatten(2))

    def finished(self, passing_BTH: Tensor, mixed_BTX: Tensor) -> Tensor:
        """Return the outputs of the layer, given what attention mixed."""
        hidden_BTH = passing_BTH + self.attention_output(mixed_BTX)
        gate, up = self.gate_up(self.mlp_norm(hidden_BTH)).chunk(2, dim=-1)
        output_BTH: Tensor = hidden_BTH + self.down(functional.silu(gate) * up)
        return self.output_norm(output_BTH) if self.shape.normed_output else output_BTH

    def head(self, outputs_RH: Tensor) -> Tensor:
        """Apply the target's output head, or the part of it for the draft's own vocabulary, or the head's own."""
        if not self.shape.normed_output:
            outputs_RH = self.output_norm(outputs_RH)
        if (product := self._product(self.tables[1])) is not None:
            return product(outputs_RH)
        table_VH = self.tables[1].to(outputs_RH.dtype)
        return by_rows(lambda rows_RH: functional.linear(rows_RH, table_VH), outputs_RH)

    def _multiplied(self, layer: nn.Linear, input_XF: Tensor) -> Tensor:
        """Apply a layer, by compiled code where there is some."""
        product = self._product(layer.weight)
        if product is None:
            output_XG: Tensor = layer(input_XF)
            return output_XG
        output_XG = product(input_XF).to(self.dtype)
        return output_XG if layer.bias is None else output_XG + layer.bias

    def _product(self, weight_GH: Tensor) -> Product | None:
        """Return products with a weight by compiled code, made once; None where there is none, and in training."""
        if torch.is_grad_enabled() or (is_host(self.device) and not self.native):
            return None
        weight, product = self._products.get(id(weight_GH), (None, None))
        if weight is not weight_GH:
            product = fast_product((weight_GH, None), self.int8)
            self._products[id(weight_GH)] = weight_GH, product
        return product

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_products": {}, "kept": {}}  # addresses are this process's and this copy's own

    def start(self, batch_size: int, capacity: int) -> "HeadContext":
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""
        from polydraft.models.heads.head_context import HeadContext  # late: it loads transformers

        return HeadContext(self, batch_size, capacity)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The target's tables move along, so that .to() leaves nothing behind.
        self.tables = (fn(self.tables[0]), fn(self.tables[1]))
        self._products, self.kept = {}, {}
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.epsilon)


def _turned(heads_BTHC: Tensor, angles_BT3C: Tensor) -> Tensor:
    """Rotate pairs of channels, one of either half: (x, y) becomes (x cos − y sin, y cos + x sin)."""
    halves_BTH2C = heads_BTHC.view(*heads_BTHC.shape[:-1], 2, -1)
    angles_BT13C = angles_BT3C[:, :, None].to(heads_BTHC.dtype)
    return (halves_BTH2C * angles_BT13C[..., :1, :] + halves_BTH2C.flip(-2) * angles_BT13C[..., 1:, :]).flatten(-2)
