"""The body of a Llama-shaped model or a feature head, each pass of which is one call of compiled code."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.backends.native.arguments import FORMATS, Body, Layer, Pass, Weight, working_memory
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


@dataclass(eq=False, kw_only=True)
class Rows:
    """A batch's cache: B rows of S slots."""

    lengths_B: Tensor
    """Committed tokens per row."""
    slot_positions_BS: Tensor
    keys_LBHSC: Tensor
    values_LBHSC: Tensor
    window: int | None = None
    """How many positions back attention reaches; None for all."""
    max_positions: int | None = None


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

    def ready(self, sure: bool = False) -> bool:
        """Whether the weights still have the same dtypes, shapes and strides; their addresses may have changed.

        The check takes longer than a small pass, so callers pass `sure` once it has succeeded for the current text.
        """
        if sure and self._body is not None:
            return True
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            if [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self._tensors] != self._like:
                return False
            self._body, self._addresses = self._laid_out(), addresses
            self._held = [tensor.detach() for tensor in self._tensors]
        return True

    def __call__(
        self, tokens_BT: Tensor, block: Block, rows: Rows, taps: Sequence[int] = (), features_BTF: Tensor | None = None
    ) -> Tensor:
        """Store keys, values and positions of a block of uncommitted tokens and return their last hidden states.

        Parameters
        ----------
        taps : sequence of int
            Layers, counted from 1, whose outputs are appended to the hidden states.
        features_BTF : Tensor, optional
            For feature heads: the features before each token.
        """
        shape = (*tokens_BT.shape, self.hidden_size * (1 + len(set(taps))))
        output_BTF = torch.empty(shape, dtype=self.dtype)
        self._pass(tokens_BT, block, rows, taps, features_BTF, output_BTF)
        return output_BTF

    def store(self, tokens_BT: Tensor, block: Block, rows: Rows, features_BTF: Tensor | None = None) -> None:
        """Store keys, values and positions only; the last layer computes nothing else."""
        self._pass(tokens_BT, block, rows, (), features_BTF, None)

    def _pass(
        self,
        tokens_BT: Tensor,
        block: Block,
        rows: Rows,
        taps: Sequence[int],
        features_BTF: Tensor | None,
        output_BTF: Tensor | None,
    ) -> None:
        assert self._body is not None, "ready() comes first"
        batch_size, size = tokens_BT.shape
        keys, values, positions_BS = rows.keys_LBHSC, rows.values_LBHSC, rows.slot_positions_BS
        visible_BTU, depths_BT, chosen_BT, capacity = block.visible_BTU, block.depths_BT, block.places_BT, keys.shape[3]
        row = keys[0, 0].numel()
        assert keys[0].is_contiguous() and values[0].is_contiguous() and keys.stride() == values.stride()
        assert keys.dtype == self.dtype and keys.shape[1] == batch_size and keys.stride(0) % row == 0
        assert positions_BS.stride(1) == 1 and positions_BS.shape[1] >= capacity and visible_BTU.dtype == torch.bool
        if len(self._cosines) < capacity:
            self._cosines, self._sines = (part.contiguous() for part in self._weights.angles(max(2 * capacity, 512)))
        taps = sorted(set(taps))
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
            rows.lengths_B.data_ptr(), positions_BS.data_ptr(), visible_BTU.data_ptr(),
            self._cosines.data_ptr(), self._sines.data_ptr(), None if features_BTF is None else features_BTF.data_ptr(),
            keys.data_ptr(), values.data_ptr(), None if output_BTF is None else output_BTF.data_ptr(),
            ctypes.addressof(listed), None,
            batch_size, size, block.start, visible_BTU.shape[2], capacity, min(rows.max_positions or capacity, capacity) - 1,
            *depths_BT.stride(), *visible_BTU.stride(),
            positions_BS.stride(0), self.hidden_size * (1 + len(taps)), len(taps), rows.window or 0, torch.get_num_threads(),
            keys.stride(0) // row,
        )  # fmt: skip
        one.memory = working_memory(self._library.polydraft_memory(self._body, one))
        placed = self._library.polydraft_pass(self._body, one)
        assert placed, (rows.lengths_B.tolist(), block.stop, capacity)

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
