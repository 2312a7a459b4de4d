"""A whole body, of a Llama-shaped model or of a feature head, whose passes are one call of compiled code each."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.native.arguments import FORMATS, Body, Layer, Pass, Weight, WorkingMemory

_MEMORY = WorkingMemory()
Angles = Callable[[int], tuple[Tensor, Tensor]]
"""Number of positions → cosines and sines of each, both halves of the channels, in float32."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: Tensor
    qkv: Weight
    output: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class BodyWeights:
    """Weights and sizes of a body."""

    layers: Sequence[LayerWeights]
    final_norm: Tensor
    embedding_VF: Tensor
    queries: int
    """Heads."""
    keys: int
    """Heads of keys and values."""
    channels: int
    """Of a head."""
    scale: float
    """Of attention's scores."""
    epsilon: float
    """Of norms."""
    angles: Angles
    feature_norm: Tensor | None = None
    """Of a feature head: norms of features and tokens, and what brings them together."""
    token_norm: Tensor | None = None
    join: Weight | None = None

    def tensors(self) -> list[Tensor]:
        """Return all that addresses come from."""
        found = [self.final_norm, self.embedding_VF]
        for layer in self.layers:
            found += [layer.attention_norm, layer.mlp_norm]
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                found += weight.tensors()
        found += [norm for norm in (self.feature_norm, self.token_norm) if norm is not None]
        return found + (self.join.tensors() if self.join is not None else [])


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """What a block of tokens is and sees; B rows, T tokens each."""

    tokens_BT: Tensor
    positions_BT: Tensor
    slots_BT: Tensor
    lengths_B: Tensor
    visible_BTU: Tensor
    """Uncommitted places that each token sees."""
    slot_positions_BS: Tensor
    used: int
    """Slots that any token may see."""
    window: int | None = None
    """Positions that attention reaches back."""
    features_BTF: Tensor | None = None
    """Of a feature head."""


class NativeBody:
    """Compute the last hidden states of a body.

    Weights are read where they are. Sums have an order of their own, which depends neither on the number of tokens nor on the
    batch, the tree or the threads: a token's features have the same bits wherever it stands.
    """

    def __init__(self, library: ctypes.CDLL, weights: BodyWeights) -> None:
        self._library, self._weights = library, weights
        self._tensors = weights.tensors()
        self._like = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._tensors]
        self._addresses: list[int] = []
        self._cosines, self._sines = (torch.empty(0),) * 2
        self._body: Body | None = None
        self._layers: ctypes.Array[Layer] | None = None
        self.dtype = weights.embedding_VF.dtype
        self.hidden_size = weights.embedding_VF.shape[1]
        self.key_shape = (weights.keys, weights.channels)
        """Heads of keys and their channels."""

    def ready(self) -> bool:
        """Whether the weights are still such as they were; their addresses may have changed."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            if [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._tensors] != self._like:
                return False
            self._body, self._addresses = self._laid_out(), addresses
        return True

    def __call__(self, block: Tokens, keys_LBHSC: Tensor, values_LBHSC: Tensor, taps: Sequence[int] = ()) -> Tensor:
        """Store keys and values, and return the last hidden states, beside them the outputs of the layers `taps`."""
        assert self._body is not None, "ready() comes first"
        batch_size, size = block.tokens_BT.shape
        capacity = keys_LBHSC.shape[3]
        taps = sorted(set(taps))
        output_BTF = torch.empty(batch_size, size, self.hidden_size * (1 + len(taps)), dtype=self.dtype)
        if len(self._cosines) < capacity:
            self._cosines, self._sines = (part.contiguous() for part in self._weights.angles(max(2 * capacity, 512)))
        tokens_BT, positions_BT, slots_BT = (
            part.contiguous() for part in (block.tokens_BT, block.positions_BT, block.slots_BT)
        )
        visible_BTU, slot_positions_BS, features_BTF = block.visible_BTU, block.slot_positions_BS, block.features_BTF
        assert keys_LBHSC.is_contiguous() and values_LBHSC.is_contiguous() and keys_LBHSC.dtype == self.dtype
        assert slot_positions_BS.stride(1) == 1 and visible_BTU.dtype == torch.bool
        if features_BTF is not None:
            features_BTF = features_BTF.to(self.dtype).contiguous()
        listed = (ctypes.c_int64 * len(taps))(*taps)
        one = Pass(
            tokens=tokens_BT.data_ptr(), angles=positions_BT.data_ptr(), slots=slots_BT.data_ptr(),
            lengths=block.lengths_B.data_ptr(), positions=positions_BT.data_ptr(),
            slot_positions=slot_positions_BS.data_ptr(), visible=visible_BTU.data_ptr(),
            cosines=self._cosines.data_ptr(), sines=self._sines.data_ptr(),
            features=None if features_BTF is None else features_BTF.data_ptr(),
            keys=keys_LBHSC.data_ptr(), values=values_LBHSC.data_ptr(), output=output_BTF.data_ptr(),
            taps=ctypes.addressof(listed), batch=batch_size, size=size, places=visible_BTU.shape[2], capacity=capacity,
            used=block.used, visible_batch=visible_BTU.stride(0), visible_token=visible_BTU.stride(1),
            visible_place=visible_BTU.stride(2), slot_stride=slot_positions_BS.stride(0), feature_stride=self.hidden_size,
            output_stride=output_BTF.shape[2], num_taps=len(taps), window=block.window or 0,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        one.memory = _MEMORY.address(self._library.polydraft_memory(self._body, one))
        self._library.polydraft_pass(self._body, one)
        return output_BTF

    def _laid_out(self) -> Body:
        weights = self._weights
        for norm in (weights.final_norm, weights.feature_norm, weights.token_norm):
            assert norm is None or (norm.dtype == self.dtype and norm.is_contiguous()), norm
        assert weights.embedding_VF.is_contiguous()
        layers = [
            Layer(
                layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(),
                layer.qkv.matrix(), layer.output.matrix(), layer.gate_up.matrix(), layer.down.matrix(),
            )
            for layer in weights.layers
        ]  # fmt: skip
        self._layers = (Layer * len(layers))(*layers)
        body = Body(
            layers=self._layers, final_norm=weights.final_norm.data_ptr(), embedding=weights.embedding_VF.data_ptr(),
            num_layers=len(layers), hidden=self.hidden_size, queries=weights.queries, keys=weights.keys,
            channels=weights.channels, mlp=weights.layers[0].down.num_inputs, vocabulary=len(weights.embedding_VF),
            epsilon=weights.epsilon, scale=weights.scale, format=FORMATS[self.dtype],
        )  # fmt: skip
        if weights.join is not None and weights.feature_norm is not None and weights.token_norm is not None:
            body.join = weights.join.matrix()
            body.feature_norm, body.token_norm = weights.feature_norm.data_ptr(), weights.token_norm.data_ptr()
        return body
