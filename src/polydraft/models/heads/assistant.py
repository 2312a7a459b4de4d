"""Gemma 4's assistants: drafts of a few layers that attend to the target's own keys and values.

An assistant has no cache. Each of its layers reads the keys and values of one layer of the target, and all candidates of a
round have the position of the last token, whatever their depth. They differ only in their input: the target's embedding of the
token and the features before it, side by side.

See docs/decisions/062-assistants-attend-to-the-target-s-memory.md.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from polydraft.models.attention import steady_attention
from polydraft.models.families import FULL
from polydraft.models.heads.head import Head
from polydraft.models.heads.head_context import Entries, following
from polydraft.models.hf_context import HFContext
from polydraft.models.language_model import Context
from polydraft.models.products import fast_linears
from polydraft.models.storage import Storage
from polydraft.trees import Block


class AssistantHead(Head):
    """An assistant as a head. Its outputs are predicted features of the target, then the assistant's own hidden states.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The assistant.
    embedding : nn.Module
        The target's.
    layers : mapping
        For each kind of attention, the layer of the target whose keys and values are read.
    native : bool
        On a CPU, run its linear layers by compiled code if possible.
    """

    vocabulary = None
    taps = ()
    lacks = "has no cache of its own"

    def __init__(self, model: Any, embedding: nn.Module, layers: Mapping[str, int], name: str, native: bool) -> None:
        super().__init__()
        self.model, self.embedding, self.layers, self.name = model, embedding, layers, name
        self.text: Any = model.config.get_text_config()
        self.num_features = int(model.config.backbone_hidden_size)
        """The target's hidden size."""
        self.hidden_size = self.num_features + int(self.text.hidden_size)
        self._linears = fast_linears(model) if native else None

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        device: torch.device = self.model.pre_projection.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""
        dtype: torch.dtype = self.model.pre_projection.weight.dtype
        return dtype

    @property
    def num_columns(self) -> int:
        """Tokens it can draft."""
        return int(self.text.vocab_size)

    def fused(self, features_RF: Tensor) -> Tensor:
        """Return the target's last hidden states in the form of outputs, padded with zeros."""
        features_RF = features_RF[..., : self.num_features].to(self.dtype)
        return nn.functional.pad(features_RF, (0, self.hidden_size - self.num_features))

    def outputs(
        self, tokens_BT: Tensor, features_BTF: Tensor, positions_BT: Tensor, masks: dict[str, Tensor], kept: dict[str, Any]
    ) -> Tensor:
        """Pass candidates through the layers, with masks, keys and values for each kind of attention."""
        pair_BTX = torch.cat([self.embedding(tokens_BT).to(self.dtype), features_BTF], dim=-1)
        with self._linears or nullcontext():
            own_BTH = self.model.model(
                inputs_embeds=self.model.pre_projection(pair_BTX),
                attention_mask=masks,
                position_ids=positions_BT,
                shared_kv_states=kept,
                use_cache=False,
            ).last_hidden_state
            return torch.cat([self.model.post_projection(own_BTH), own_BTH], dim=-1)

    def head(self, outputs_RH: Tensor) -> Tensor:
        """Apply the assistant's output head to all tokens, or only to those of the likeliest clusters."""
        own_RH, table_VH = outputs_RH[..., self.num_features :], self.model.lm_head.weight
        clusters = self.model.masked_embedding
        if clusters is None:
            with self._linears or nullcontext():
                logits_RV: Tensor = self.model.lm_head(own_RH)
            return logits_RV
        best_RK = clusters.centroids(own_RH).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        tokens_RX = clusters.token_ordering.view(clusters.num_centroids, -1)[best_RK].flatten(-2)
        known_RX = (table_VH[tokens_RX] @ own_RH[..., None])[..., 0]
        # The other tokens get a logit below all known ones of their row; transformers uses one such number for the whole batch.
        others_R1 = known_RX.amin(-1, keepdim=True) - 1
        filled_RV: Tensor = others_R1.repeat_interleave(self.num_columns, dim=-1).scatter(-1, tokens_RX, known_RX)
        return filled_RV

    def start(self, batch_size: int, capacity: int) -> "AssistantContext":
        """Return a context for `batch_size` texts, which holds only their lengths."""
        return AssistantContext(self, batch_size, capacity)


class AssistantContext(Entries):
    """The lengths of a batch's texts, and the target's context that holds them."""

    elastic = borrows = True
    _head: AssistantHead

    def __init__(self, head: AssistantHead, batch_size: int, capacity: int) -> None:
        super().__init__(head, NoStorage(), batch_size, capacity, head.device, max_positions=None)
        self._head = head
        self._target: HFContext | None = None

    def borrow(self, context: Context) -> None:
        """Attend to this context of the target from now on."""
        assert isinstance(context, HFContext), context
        self._target = context

    def read(self, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None = None) -> Tensor:
        """Return the outputs of candidates, all at the position of the last token.

        Texts with nothing to attend to, such as those of one token, get zeros.
        """
        head = self._head
        features_BTF = following(fused_BWH, parents)[..., : head.num_features]
        lengths_B, kept = self._kept(len(tokens_BT))
        slot_S = torch.arange(next(iter(kept.values()))[0].shape[2], device=self.device)
        # At least one slot, even if there is nothing to attend to: attention to no slot is undefined.
        seen_BS = slot_S < lengths_B[:, None].clamp(min=1)
        # As in transformers, the window counts the tokens before the last one that the target has read.
        near_BS = seen_BS & (slot_S >= lengths_B[:, None] - 1 - head.text.sliding_window)
        size = tokens_BT.shape[1]
        masks = {kind: (seen_BS if kind == FULL else near_BS)[:, None, None].expand(-1, -1, size, -1) for kind in head.layers}
        with steady_attention(self.device):
            outputs_BTH = head.outputs(tokens_BT.clamp(min=0), features_BTF, lengths_B[:, None].expand(-1, size), masks, kept)
        return outputs_BTH.where((lengths_B > 0)[:, None, None], 0.0)

    def _kept(self, rows: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return how many tokens of each text the target has read, and their keys and values for each kind of attention."""
        target, head = self._target, self._head
        if target is not None and (used := target.span or max(target.lengths)):
            stored = {kind: target.cache.layer(number) for kind, number in head.layers.items()}
            if found := {kind: (both[0][:, :, :used], both[1][:, :, :used]) for kind, both in stored.items() if both}:
                return target.lengths_B, found
        nothing = {}
        for kind in head.layers:
            sizes = head.text.per_layer_config[kind]
            none_BH1C = torch.zeros(rows, sizes.num_key_value_heads, 1, sizes.head_dim, dtype=head.dtype, device=self.device)
            nothing[kind] = none_BH1C, none_BH1C
        return torch.zeros(rows, dtype=torch.long, device=self.device), nothing

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        raise AssertionError("call read() instead of extend()")

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Do nothing: the target stores the texts."""


class NoStorage(Storage):
    """Storage without slots, for a context that reads the target's."""

    address = nbytes = 0

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Do nothing."""

    def grow(self, capacity: int) -> None:
        """Do nothing."""

    def part(self, rows: slice) -> Self:
        """Return itself."""
        return self
