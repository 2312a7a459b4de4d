"""What one model pass needs to know of the tree."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """T uncommitted tokens a row that go through a model together.

    Uncommitted tokens of a row occupy numbered places after its committed text: this block takes places `start` to
    `start + T`. Blocks of a later level of the same tree start where the earlier ones ended.
    """

    start: int
    depths_BT: Tensor
    """Position of each token relative to the first uncommitted one."""
    visible_BTU: Tensor
    """Which of the `U = start + T` uncommitted places each token attends to, its own included."""

    @property
    def size(self) -> int:
        """Tokens a row."""
        return self.depths_BT.shape[1]

    @property
    def stop(self) -> int:
        """First place after the block."""
        return self.start + self.size


@lru_cache(maxsize=16)
def causal_block(batch_size: int, size: int, device: torch.device) -> Block:
    """Return a plain sequence of `size` tokens, as a prompt is."""
    depths_BT = torch.arange(size, device=device).expand(batch_size, size)
    visible_TT = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return Block(0, depths_BT, visible_TT.expand(batch_size, size, size))
