"""Embedding tables that stay quantised, as in their GGUF file: rows are dequantised when they are looked up."""

import numpy as np
import torch
from torch import Tensor, nn


class PackedEmbedding(nn.Module):
    """Replaces `torch.nn.Embedding`: the same numbers in a fraction of the memory.

    Parameters
    ----------
    blocks_VX : Tensor
        Bytes of each row.
    kind : str
        Name of their format in the package `gguf`.
    table : torch.nn.Embedding
        The table it replaces; its weight is ignored.
    """

    def __init__(self, blocks_VX: Tensor, kind: str, table: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.dtype = table.weight.dtype
        # Plain attributes, so that model.to(dtype) leaves them alone.
        self.blocks_VX, self.kind = blocks_VX, kind

    @property
    def weight(self) -> Tensor:
        """All rows, dequantised at every call."""
        return self.rows(torch.arange(self.num_embeddings))

    def rows(self, tokens_R: Tensor) -> Tensor:
        """Return the rows of some tokens, dequantised."""
        import gguf

        blocks_RX: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = self.blocks_VX[tokens_R].numpy()
        values = gguf.dequantize(blocks_RX, gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).view(len(tokens_R), self.embedding_dim).to(self.dtype)

    def forward(self, tokens_X: Tensor) -> Tensor:
        """Look up tokens of any shape."""
        return self.rows(tokens_X.flatten()).view(*tokens_X.shape, self.embedding_dim)
