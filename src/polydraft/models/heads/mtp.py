"""Multi-token prediction (MTP) layers of a checkpoint as a head: one layer of the target's own class.

Such a layer reads the target's last hidden states and the embedding of the next token, each normed, side by side. The rest is a
model of the target's kind with a single layer, so it runs as one: a `TokenPair` replaces its embedding, and `HFModel` handles
masks, positions and keys, whatever attention the family has.

The same layer drafts every level: its output, after its final norm, replaces the target's hidden states.

See docs/decisions/058-mtp-layers-run-as-models-of-one-layer.md.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from polydraft.models.heads.head import Head
from polydraft.models.heads.head_context import Entries, following
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.trees import Block, causal_block


class TokenPair(nn.Module):
    """Replaces a model's embedding: projects each token and the features before it to one vector.

    Parameters
    ----------
    embedding : nn.Module
        The target's, or the layer's own.
    token_norm, feature_norm : nn.Module
    join : nn.Linear
    features_first : bool
        Whether the first columns of the projection are for features, not for tokens.
    """

    def __init__(
        self, embedding: nn.Module, token_norm: nn.Module, feature_norm: nn.Module, join: nn.Linear, features_first: bool
    ) -> None:
        super().__init__()
        self.embedding, self.token_norm, self.feature_norm, self.join = embedding, token_norm, feature_norm, join
        self.features_first = features_first
        self.features_BTH: Tensor | None = None
        """Features of the current pass; None while the model is tried out."""

    @property
    def weight(self) -> Any:
        """The embedding table, whose size transformers reads."""
        return self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the vectors that the layer reads."""
        embedded_BTH = self.embedding(tokens_BT).to(self.join.weight.dtype)
        features_BTH = torch.zeros_like(embedded_BTH) if self.features_BTH is None else self.features_BTH
        pair = self.token_norm(embedded_BTH), self.feature_norm(features_BTH)
        joined_BTH: Tensor = self.join(torch.cat(pair[::-1] if self.features_first else pair, dim=-1))
        return joined_BTH


class MtpHead(Head):
    """An MTP layer as a head.

    Parameters
    ----------
    model : HFModel
        A model of one layer with a `TokenPair` as its embedding.
    """

    model: HFModel
    pair: TokenPair
    vocabulary = None
    taps = ()

    def __init__(self, model: HFModel, pair: TokenPair, name: str) -> None:
        super().__init__()
        self.name, self.hidden_size, self.pair = name, model.hidden_size, pair
        self.body, self.model = model.hf_model, model

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""
        return self.pair.join.weight.dtype

    @property
    def num_columns(self) -> int:
        """Tokens it can draft."""
        return self.model.vocab_size

    def fused(self, features_RF: Tensor) -> Tensor:
        """Return the last hidden states."""
        return features_RF[..., : self.hidden_size].to(self.dtype)

    def head(self, outputs_RH: Tensor) -> Tensor:
        """Apply the output head: the target's or the layer's own."""
        return self.model.head(outputs_RH)

    def start(self, batch_size: int, capacity: int) -> "MtpContext":
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""
        return MtpContext(self, batch_size, capacity)


class MtpContext(Entries, HFContext):
    """Keys and values of a batch's entries in an MTP layer."""

    _head: MtpHead

    def __init__(self, head: MtpHead, batch_size: int, capacity: int) -> None:
        super().__init__(head.model, batch_size, capacity)
        self._head = head

    def read(self, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None = None) -> Tensor:
        """Pass uncommitted entries through the layer and return its outputs `[B, T, H]`."""
        pair = self._head.pair
        pair.features_BTH = following(fused_BWH, parents).to(self._head.dtype)
        try:
            return self.extend(tokens_BT, block)
        finally:
            pair.features_BTH = None

    def store(self, tokens_BT: Tensor, fused_BTH: Tensor) -> None:
        """Read the next entries of texts without returning outputs."""
        self.read(tokens_BT, fused_BTH, causal_block(*tokens_BT.shape, self.device))

    def part(self, rows: slice) -> Self:
        """Return a context of some adjacent rows that shares their storage, allocated first if necessary."""
        if self.address == 0 and rows != slice(0, self.batch_size):
            # The first pass allocates: read a dummy entry.
            tokens_B1 = torch.zeros(self.batch_size, 1, dtype=torch.long, device=self.device)
            self.read(tokens_B1, torch.zeros_like(self._head.pair(tokens_B1)), causal_block(*tokens_B1.shape, self.device))
        return super().part(rows)
