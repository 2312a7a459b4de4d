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
    """Which of the uncommitted places each token attends to, its own included; `U = start + T` of them, or more with
    `places_BT`."""
    places_BT: Tensor | None = None
    """The places themselves, any of the U, where a recorded pass must not know them; `start` does not count then."""

    @property
    def size(self) -> int:
        """Tokens a row."""
        return self.depths_BT.shape[1]

    @property
    def stop(self) -> int:
        """First place after all that the block may look at."""
        return self.start + self.size if self.places_BT is None else self.visible_BTU.shape[2]


@lru_cache(maxsize=16)
def causal_block(batch_size: int, size: int, device: torch.device) -> Block:
    """Return a plain sequence of `size` tokens, as a prompt is."""
    depths_BT = torch.arange(size, device=device).expand(batch_size, size)
    visible_TT = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return Block(0, depths_BT, visible_TT.expand(batch_size, size, size))
