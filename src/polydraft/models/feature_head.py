"""A draft that reads the target's hidden states: one transformer layer under the target's own output head.

References
----------
.. [1] Li et al. 2024, EAGLE, arXiv:2401.15077 (drafting in feature space).
.. [2] Li et al. 2025, EAGLE-3, arXiv:2503.01840 (several layers as input, training on the head's own outputs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.language_model import Context, by_rows, steady_attention
from polydraft.models.tree_attention import obstacle
from polydraft.native import NativeBody, NativeProduct, Rows
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block

_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes of a feature head."""

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


class FeatureHead(nn.Module):
    """Predict the target's next hidden state, and by its output head the token after the next.

    Entry i of a text is the pair of the target's features f at position i and of the token at i + 1. Where the features
    are not known yet, inside a tree, the head's own output of the parent takes their place.

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
        self.fuse = nn.Linear(size * (1 + len(shape.taps)), size, bias=False) if shape.taps else None
        self.feature_norm, self.token_norm = _Norm(size), _Norm(size)
        self.join = nn.Linear(2 * size, size, bias=False)
        self.attention_norm, self.mlp_norm, self.output_norm = _Norm(size), _Norm(size), _Norm(size)
        self.qkv = nn.Linear(size, queries + 2 * keys, bias=False)
        self.attention_output = nn.Linear(queries, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * shape.mlp_size, bias=False)
        self.down = nn.Linear(shape.mlp_size, size, bias=False)
        # Tables of input and output. Not buffers: they belong to the target, and a partial head is cut out of its table again
        # on loading.
        self.tables = (embedding_VH, output_VH if vocabulary is None else output_VH[vocabulary.tokens_D])
        self.native = True
        """Whether to run by compiled code where that is possible."""
        self.int8 = False
        """Whether compiled code reads the weights in int8."""
        self._products: dict[int, tuple[Tensor, NativeProduct | None]] = {}
        self._body: tuple[NativeBody | None] | None = None

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
        if self.fuse is None:
            return features_RF
        product = self._product(self.fuse.weight)
        fused_RH: Tensor = self.fuse(features_RF) if product is None else product(features_RF).to(self.dtype)
        return fused_RH

    def entry(self, fused_BTH: Tensor, tokens_BT: Tensor) -> Tensor:
        """Join features and the tokens that follow them."""
        embedded_BTH = functional.embedding(tokens_BT, self.tables[0]).to(fused_BTH.dtype)
        joined_BTH: Tensor = self.join(torch.cat([self.feature_norm(fused_BTH), self.token_norm(embedded_BTH)], dim=-1))
        return joined_BTH

    def angles(self, positions_X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return how far the channels of some positions are turned (RoPE): cosines, sines of either sign, `[X, 3, C/2]`."""
        channels = self.shape.head_size
        exponents_C = torch.arange(0, channels, 2, device=positions_X.device, dtype=torch.float32) / channels
        angles_XC = positions_X[..., None].float() * self.shape.rope_theta**-exponents_C
        sines_XC = angles_XC.sin()
        return torch.stack([angles_XC.cos(), -sines_XC, sines_XC], dim=-2).to(dtype or self.dtype)

    def projected(
        self, joined_BTH: Tensor, positions_BT: Tensor, angles_BT3C: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, heads, T, C]`, turned by their positions; their angles may be known already."""
        shape = self.shape
        batch_size, size, _ = joined_BTH.shape
        heads_BTHC = self.qkv(self.attention_norm(joined_BTH)).view(batch_size, size, -1, shape.head_size)
        turning = shape.num_heads + shape.num_key_heads
        plain_BTHC = heads_BTHC[:, :, :turning]
        turned_BTHC = _turned(plain_BTHC, self.angles(positions_BT) if angles_BT3C is None else angles_BT3C)
        return (
            turned_BTHC[:, :, : shape.num_heads].transpose(1, 2),
            turned_BTHC[:, :, shape.num_heads :].transpose(1, 2),
            heads_BTHC[:, :, turning:].transpose(1, 2),
        )

    def attended(
        self, joined_BTH: Tensor, query_BHTC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, mask_B1TS: Tensor | None
    ) -> Tensor:
        """Return the outputs of the layer, in the space of the target's last hidden states."""
        batch_size, size, _ = joined_BTH.shape
        if query_BHTC.is_cuda:  # no fused CUDA kernel takes grouped heads together with a mask
            copies = self.shape.num_heads // self.shape.num_key_heads
            key_BHSC, value_BHSC = key_BHSC.repeat_interleave(copies, dim=1), value_BHSC.repeat_interleave(copies, dim=1)
        mixed_BHTC = functional.scaled_dot_product_attention(
            query_BHTC, key_BHSC, value_BHSC, attn_mask=mask_B1TS, enable_gqa=True
        )
        hidden_BTH = joined_BTH + self.attention_output(mixed_BHTC.transpose(1, 2).reshape(batch_size, size, -1))
        gate, up = self.gate_up(self.mlp_norm(hidden_BTH)).chunk(2, dim=-1)
        output_BTH: Tensor = self.output_norm(hidden_BTH + self.down(functional.silu(gate) * up))
        return output_BTH

    def head(self, outputs_RH: Tensor) -> Tensor:
        """Apply the target's output head, or the part of it for the draft's own vocabulary."""
        if (product := self._product(self.tables[1])) is not None:
            return product(outputs_RH)
        table_VH = self.tables[1].to(outputs_RH.dtype)
        return by_rows(lambda rows_RH: functional.linear(rows_RH, table_VH), outputs_RH)

    def _product(self, weight_GH: Tensor) -> NativeProduct | None:
        """Return products with a weight by compiled code, made once; None where there is none, and in training."""
        if not self.native or torch.is_grad_enabled() or weight_GH.device.type != "cpu":
            return None
        weight, product = self._products.get(id(weight_GH), (None, None))
        if weight is not weight_GH:
            from polydraft.models._native import native_product

            product = native_product(weight_GH, int8=self.int8)
            self._products[id(weight_GH)] = weight_GH, product
        return product

    def native_body(self) -> "NativeBody | None":
        """Return the head by compiled code, made once; None where there is none."""
        if self._body is None:
            from polydraft.models._native import native_head

            self._body = (native_head(self, _NORM_EPSILON) if self.native else None,)
        return self._body[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_products": {}, "_body": None}  # addresses are this process's and this copy's own

    def start(self, batch_size: int, capacity: int) -> "HeadContext":
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""
        return HeadContext(self, batch_size, capacity)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The target's tables move along, so that .to() leaves nothing behind.
        self.tables = (fn(self.tables[0]), fn(self.tables[1]))
        self._products, self._body = {}, None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class HeadContext(Context):
    """Keys and values of the entries of one batch."""

    elastic = True

    def __init__(self, head: FeatureHead, batch_size: int, capacity: int) -> None:
        from polydraft.models._fused import FusedHead
        from polydraft.models.cache import SlotCache  # late: they load transformers

        super().__init__(batch_size, capacity, head.device, max_positions=None)
        self._head = head
        self.cache: SlotCache = SlotCache(1, capacity)
        self._fused_BTH: Tensor | None = None
        self._angles_P3C = head.angles(torch.arange(capacity, device=head.device))
        """Of every position, as long as the memory."""
        runs = head.device.type == "cuda" and obstacle(head.device, head.dtype) is None
        self._fused = FusedHead(head, _NORM_EPSILON) if runs else None
        self._native = head.native_body()
        self._checked = False
        """Whether the native body was found in order since the last text began."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed entries."""
        super().rewind(lengths)
        self._checked = False

    def read(self, tokens_BT: Tensor, fused_BTH: Tensor, block: Block) -> Tensor:
        """Pass uncommitted entries through the head and return its outputs `[B, T, H]`."""
        self._fused_BTH = fused_BTH
        native, head = self._native, self._head
        if native is not None and not torch.is_grad_enabled() and native.ready(sure=self._checked):
            self._checked = True
            keys_LBHSC, values_LBHSC = self.cache.whole(self.batch_size, head.dtype, *native.key_shape)
            rows = Rows(
                lengths_B=self.lengths_B,
                slot_positions_BS=self._positions_BS,
                keys_LBHSC=keys_LBHSC,
                values_LBHSC=values_LBHSC,
                window=head.shape.window,
            )
            return native(tokens_BT, block, rows, features_BTF=fused_BTH)
        # Where all rows are equally long the host knows every place, and a level is half as many calls.
        if self._fused is None and self.aligned:
            with steady_attention(self.device):
                return self._read_aligned(tokens_BT, fused_BTH, block)
        return self.extend(tokens_BT, block)

    def _read_aligned(self, tokens_BT: Tensor, fused_BTH: Tensor, block: Block) -> Tensor:
        """Do what `extend` and `_forward` do."""
        start, window = self.lengths[0], self._head.shape.window
        first, used = start + block.start, start + block.stop
        assert used <= self.capacity, (used, self.capacity)
        positions_BT = block.depths_BT + start
        self._positions_BS[:, first:used] = positions_BT
        visible_BTS = functional.pad(block.visible_BTU, (start, 0), value=True)
        if used > window:
            visible_BTS = visible_BTS & (positions_BT[:, :, None] - self._positions_BS[:, None, :used] < window)
        self.cache.aim(positions_BT, first, used)
        return self._outputs(tokens_BT.clamp(min=0), fused_BTH, positions_BT, visible_BTS)

    def _outputs(self, tokens_BT: Tensor, fused_BTH: Tensor, positions_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        """Store entries where the cache aims, and return the head's outputs."""
        joined_BTH = self._head.entry(fused_BTH, tokens_BT)
        query_BHTC, key_BHTC, value_BHTC = self._head.projected(joined_BTH, positions_BT, self._angles_P3C[positions_BT])
        key_BHSC, value_BHSC = self.cache.update(key_BHTC, value_BHTC, 0)
        return self._head.attended(joined_BTH, query_BHTC, key_BHSC, value_BHSC, visible_BTS[:, None])

    def _pass(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, block: Block, used: int) -> Tensor:
        from polydraft.models._fused import MOST_TOKENS, TreeView

        window = self._head.shape.window
        # The kernels cut off committed text only, so the window must reach over all that is not committed.
        if self._fused is None or block.size > MOST_TOKENS or window < block.stop:
            return super()._pass(tokens_BT, positions_BT, slots_BT, block, used)
        assert self._fused_BTH is not None, "read() is the way in"
        starts_BT = (positions_BT - window + 1).clamp(min=0)
        view = TreeView(slots_BT, self.lengths_B, block.visible_BTU, used - block.stop, starts_BT)
        return self._fused(self._fused_BTH, tokens_BT, positions_BT, view, self.cache, self.capacity)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        assert self._fused_BTH is not None, "read() is the way in"
        size, used = tokens_BT.shape[1], visible_BTS.shape[2]
        self.cache.aim(slots_BT, used - size if self.aligned else None, used)
        near_BTS = positions_BT[:, :, None] - self._positions_BS[:, None, :used] < self._head.shape.window
        return self._outputs(tokens_BT, self._fused_BTH, positions_BT, visible_BTS & near_BTS)

    @property
    def address(self) -> int:
        """Where keys and values begin."""
        return self.cache.address

    def _move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        self.cache.move(source_BD, target_BD)

    @property
    def divisible(self) -> bool:
        """Always: a head knows what its storage looks like."""
        return True

    def _share(self, whole: Context, rows: slice) -> None:
        assert isinstance(whole, HeadContext)
        shape, like_B = self._head.shape, torch.empty(whole.batch_size, dtype=self._head.dtype, device=self.device)
        whole.cache.storage(0, like_B, shape.num_key_heads, shape.head_size)
        self.cache = whole.cache.part(rows)

    def _resize(self, rows: int, most: int) -> None:
        self.cache.resize(rows, most)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        self.cache.clear(row)

    def _grow(self, capacity: int) -> None:
        self.cache.grow(capacity)
        self._angles_P3C = self._head.angles(torch.arange(capacity, device=self.device))


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), _NORM_EPSILON)


def _turned(heads_BTHC: Tensor, angles_BT3C: Tensor) -> Tensor:
    """Rotate pairs of channels, one of either half: (x, y) becomes (x cos − y sin, y cos + x sin)."""
    halves_BTH2C = heads_BTHC.view(*heads_BTHC.shape[:-1], 2, -1)
    angles_BT13C = angles_BT3C[:, :, None].to(heads_BTHC.dtype)
    return (halves_BTH2C * angles_BT13C[..., :1, :] + halves_BTH2C.flip(-2) * angles_BT13C[..., 1:, :]).flatten(-2)
