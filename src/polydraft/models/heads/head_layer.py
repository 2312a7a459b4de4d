"""One transformer layer of a head: attention over entries and an MLP, computed by fast products if there are any."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.devices import is_host
from polydraft.models.products import Product, fast_product

if TYPE_CHECKING:
    from polydraft.models.heads.feature_head import HeadShape


class HeadLayer(nn.Module):
    """A transformer layer whose attention may read an input wider than the hidden states.

    Parameters
    ----------
    shape : HeadShape
    reads : int, optional
        Width of the input of queries, keys and values; by default they read the hidden states, normed by the layer.
    """

    def __init__(self, shape: "HeadShape", reads: int | None = None) -> None:
        super().__init__()
        size, queries = shape.hidden_size, shape.num_heads * shape.head_size
        keys, epsilon = shape.num_key_heads * shape.head_size, shape.norm_epsilon
        self.shape = shape
        self.attention_norm = norm_of(shape, size) if reads is None else None
        self.mlp_norm = HeadNorm(size, epsilon)
        self.qkv = nn.Linear(size if reads is None else reads, queries + 2 * keys, bias=shape.qkv_bias)
        self.query_norm = HeadNorm(shape.head_size, epsilon) if shape.query_key_norm else None
        self.key_norm = HeadNorm(shape.head_size, epsilon) if shape.query_key_norm else None
        self.attention_output = nn.Linear(queries, size, bias=shape.output_bias)
        self.gate_up = nn.Linear(size, 2 * shape.mlp_size, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.mlp_size, size, bias=shape.mlp_bias)
        self.native = True
        """Whether to use compiled code on a CPU."""
        self.int8 = False
        """Whether our kernels read the weights in int8."""
        self._products: dict[int, tuple[Tensor, Product | None]] = {}
        self.kept: dict[str, object] = {}
        """What backends have made of the head; like `_products`, of use only until the weights move."""

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.down.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""
        return self.down.weight.dtype

    def angles(self, positions_X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rotary angles (RoPE) of some positions: cosines, negative sines and sines, `[X, 3, C/2]`."""
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
        """Split a projection into queries, keys and values `[B, T, heads, C]`, norming queries and keys if the head does."""
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
        """Return queries, keys and values `[B, heads, T, C]`, rotated by their positions, whose angles may be given."""
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
        """Run attention and the MLP; `passing_BTH` is the residual stream."""
        if query_BHTC.is_cuda:  # no fused CUDA kernel takes grouped heads together with a mask
            copies = self.shape.num_heads // self.shape.num_key_heads
            key_BHSC, value_BHSC = key_BHSC.repeat_interleave(copies, dim=1), value_BHSC.repeat_interleave(copies, dim=1)
        mixed_BHTC = functional.scaled_dot_product_attention(
            query_BHTC, key_BHSC, value_BHSC, attn_mask=mask_B1TS, enable_gqa=True
        )
        return self.finished(passing_BTH, mixed_BHTC.transpose(1, 2).flatten(2))

    def finished(self, passing_BTH: Tensor, mixed_BTX: Tensor) -> Tensor:
        """Return the outputs of the layer, given the output of attention."""
        hidden_BTH = passing_BTH + self.attention_output(mixed_BTX)
        gate, up = self.gate_up(self.mlp_norm(hidden_BTH)).chunk(2, dim=-1)
        output_BTH: Tensor = hidden_BTH + self.down(functional.silu(gate) * up)
        return output_BTH

    def _multiplied(self, layer: nn.Linear, input_XF: Tensor) -> Tensor:
        """Apply a linear layer, by a fast product if there is one."""
        product = self._product(layer.weight)
        if product is None:
            output_XG: Tensor = layer(input_XF)
            return output_XG
        output_XG = product(input_XF).to(self.dtype)
        return output_XG if layer.bias is None else output_XG + layer.bias

    def _product(self, weight_GH: Tensor) -> Product | None:
        """Return the fast product with a weight, made once; None if there is none, and in training."""
        if torch.is_grad_enabled() or (is_host(self.device) and not self.native):
            return None
        weight, product = self._products.get(id(weight_GH), (None, None))
        if weight is not weight_GH:
            product = fast_product((weight_GH, None), self.int8)
            self._products[id(weight_GH)] = weight_GH, product
        return product

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_products": {}, "kept": {}}  # they hold addresses, which are of no use to a copy

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._products, self.kept = {}, {}
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class HeadNorm(nn.Module):
    """RMSNorm: divide by the root mean square, and scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm the last axis."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.epsilon)


class NoNorm(HeadNorm):
    """No norm: return vectors unchanged."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input."""
        return hidden


def norm_of(shape: "HeadShape", size: int) -> HeadNorm:
    """Return a norm, or `NoNorm` if heads of this shape have none here."""
    return HeadNorm(size, shape.norm_epsilon) if shape.normed else NoNorm()


def _turned(heads_BTHC: Tensor, angles_BT3C: Tensor) -> Tensor:
    """Rotate pairs of channels, one from each half: (x, y) becomes (x cos − y sin, y cos + x sin)."""
    halves_BTH2C = heads_BTHC.view(*heads_BTHC.shape[:-1], 2, -1)
    angles_BT13C = angles_BT3C[:, :, None].to(heads_BTHC.dtype)
    return (halves_BTH2C * angles_BT13C[..., :1, :] + halves_BTH2C.flip(-2) * angles_BT13C[..., 1:, :]).flatten(-2)
