"""The body of a Llama-shaped model or a feature head, each pass of which is one call of compiled code."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.backends.native.arguments import FORMATS, Body, Layer, Pass, Weight, working_memory
from polydraft.models.heads.head_context import HeadContext
from polydraft.models.hf_context import HFContext
from polydraft.models.packed import PackedEmbedding
from polydraft.trees import Block

Angles = Callable[[int], tuple[Tensor, Tensor]]
"""Number of positions → cosines and sines of each, for both halves of the channels, in float32."""


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
    embedding: Tensor | PackedEmbedding
    """Token embeddings `[V, F]`."""
    queries: int
    """Query heads."""
    keys: int
    """Heads of keys and values."""
    channels: int
    """Channels per head."""
    scale: float
    """Factor of attention scores."""
    epsilon: float
    """Epsilon of the norms."""
    angles: Angles
    feature_norm: Tensor | None = None
    """Only in feature heads: norms of features and tokens, and the weight that joins the two."""
    token_norm: Tensor | None = None
    join: Weight | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose addresses the compiled code gets."""
        found = [self.final_norm, *([self.embedding] if isinstance(self.embedding, Tensor) else [])]
        for layer in self.layers:
            found += [layer.attention_norm, layer.mlp_norm]
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                found += weight.tensors()
        found += [norm for norm in (self.feature_norm, self.token_norm) if norm is not None]
        return found + (self.join.tensors() if self.join is not None else [])


SlotContext = HFContext | HeadContext
"""Contexts that keep keys and values in slots."""


class NativeBody:
    """Compute the last hidden states of a body.

    Weights are read in place. Sums have a fixed order that does not depend on the number of tokens, the batch, the tree or the
    threads, so a token's features always have the same bits.
    """

    def __init__(self, library: ctypes.CDLL, weights: BodyWeights) -> None:
        self._library, self._weights = library, weights
        self._tensors = weights.tensors()
        self._like = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._tensors]
        self._addresses: list[int] = []
        self._held: list[Tensor] = []
        """Keeps the memory at these addresses alive, even if the weights' owner replaces the tensors."""
        self._cosines, self._sines = (torch.empty(0),) * 2
        self._body: Body | None = None
        self._layers: ctypes.Array[Layer] | None = None
        self.dtype = weights.final_norm.dtype
        self.hidden_size = len(weights.final_norm)
        self.key_shape = (weights.keys, weights.channels)
        """Heads of keys, and channels per head."""

    def ready(self, context: SlotContext) -> bool:
        """Whether compiled code can run a context's next pass: not in training, nor if weights have another dtype or shape.

        Only their addresses may have changed. The check takes longer than a small pass, so it is made once per text.
        """
        if torch.is_grad_enabled():
            return False
        if not context.checked or self._body is None:
            addresses = [tensor.data_ptr() for tensor in self._tensors]
            if addresses != self._addresses:
                if [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._tensors] != self._like:
                    return False
                self._body, self._addresses = self._laid_out(), addresses
                self._held = [tensor.detach() for tensor in self._tensors]
            context.checked = True
        return True

    def run(
        self,
        context: SlotContext,
        tokens_BT: Tensor,
        block: Block,
        taps: Sequence[int] = (),
        features_BTF: Tensor | None = None,
        stores_only: bool = False,
    ) -> Tensor | None:
        """Store keys, values and positions of a block of uncommitted tokens and return their last hidden states.

        Parameters
        ----------
        taps : sequence of int
            Layers, counted from 1, whose outputs are appended to the hidden states.
        features_BTF : Tensor, optional
            For feature heads: the features before each token.
        stores_only : bool
            Return nothing; the last layer then computes only keys and values.
        """
        assert self._body is not None, "ready() comes first"
        batch_size, size = tokens_BT.shape
        keys, values = context.cache.held(torch.empty(batch_size, dtype=self.dtype), *self.key_shape)
        positions_BS, lengths_B = context.positions_BS, context.lengths_B
        visible_BTU, depths_BT, chosen_BT, capacity = block.visible_BTU, block.depths_BT, block.places_BT, keys.shape[3]
        row = keys[0, 0].numel()
        assert keys[0].is_contiguous() and values[0].is_contiguous() and keys.stride() == values.stride()
        assert keys.dtype == self.dtype and keys.shape[1] == batch_size and keys.stride(0) % row == 0
        assert positions_BS.stride(1) == 1 and positions_BS.shape[1] >= capacity and visible_BTU.dtype == torch.bool
        if len(self._cosines) < capacity:
            self._cosines, self._sines = (part.contiguous() for part in self._weights.angles(max(2 * capacity, 512)))
        taps = sorted(set(taps))
        width = self.hidden_size * (1 + len(taps))
        output_BTF = None if stores_only else torch.empty(batch_size, size, width, dtype=self.dtype)
        listed = (ctypes.c_int64 * len(taps))(*taps)
        tokens_BT = tokens_BT.contiguous()
        table = self._weights.embedding
        if not isinstance(table, Tensor):  # unpack only the rows that this pass needs
            rows_RF = table.rows(tokens_BT.flatten().clamp(0, table.num_embeddings - 1))
            self._body.embedding, self._body.vocabulary = rows_RF.data_ptr(), len(rows_RF)
            tokens_BT = torch.arange(len(rows_RF))
        chosen_BT = None if chosen_BT is None else chosen_BT.expand(batch_size, size).contiguous()
        features_BTF = None if features_BTF is None else features_BTF.to(self.dtype).contiguous()
        one = Pass(
            tokens_BT.data_ptr(), depths_BT.data_ptr(), None if chosen_BT is None else chosen_BT.data_ptr(),
            lengths_B.data_ptr(), positions_BS.data_ptr(), visible_BTU.data_ptr(),
            self._cosines.data_ptr(), self._sines.data_ptr(), None if features_BTF is None else features_BTF.data_ptr(),
            keys.data_ptr(), values.data_ptr(), None if output_BTF is None else output_BTF.data_ptr(),
            ctypes.addressof(listed), None,
            batch_size, size, block.start, visible_BTU.shape[2], capacity, min(context.max_positions or capacity, capacity) - 1,
            *depths_BT.stride(), *visible_BTU.stride(),
            positions_BS.stride(0), width, len(taps), context.window or 0, torch.get_num_threads(),
            keys.stride(0) // row,
        )  # fmt: skip
        one.memory = working_memory(self._library.polydraft_memory(self._body, one))
        placed = self._library.polydraft_pass(self._body, one)
        assert placed, (lengths_B.tolist(), block.stop, capacity)
        return output_BTF

    def _laid_out(self) -> Body:
        weights = self._weights
        for norm in (weights.final_norm, weights.feature_norm, weights.token_norm):
            assert norm is None or (norm.dtype == self.dtype and norm.is_contiguous()), norm
        table = weights.embedding if isinstance(weights.embedding, Tensor) else torch.empty(0, dtype=self.dtype)
        assert table.is_contiguous() and table.dtype == self.dtype
        layers = [
            Layer(
                layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(),
                layer.qkv.matrix(), layer.output.matrix(), layer.gate_up.matrix(), layer.down.matrix(),
            )
            for layer in weights.layers
        ]  # fmt: skip
        self._layers = (Layer * len(layers))(*layers)
        body = Body(
            layers=self._layers, final_norm=weights.final_norm.data_ptr(), embedding=table.data_ptr(),
            num_layers=len(layers), hidden=self.hidden_size, queries=weights.queries, keys=weights.keys,
            channels=weights.channels, mlp=weights.layers[0].down.num_inputs, vocabulary=len(table),
            epsilon=weights.epsilon, scale=weights.scale, format=FORMATS[self.dtype],
        )  # fmt: skip
        if weights.join is not None and weights.feature_norm is not None and weights.token_norm is not None:
            body.join = weights.join.matrix()
            body.feature_norm, body.token_norm = weights.feature_norm.data_ptr(), weights.token_norm.data_ptr()
        return body
