"""Features of a tree's nodes, in rows of one tensor."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from polydraft.beam.node import Node
from polydraft.models.language_model import brought

BEFORE = 0
"""The row of what precedes the tree."""
NOWHERE = -1
"""In place of a row, for what has no features."""
_FIRST_ROWS = 512


class FeatureBank:
    """What a model has computed of each node that it has passed.

    All of it lies in one tensor, which stays where it is as long as it is large enough: recorded passes write to its rows and
    read from them, and a request hands it on to the next.
    """

    def __init__(self) -> None:
        self.values_NF: Tensor | None = None
        """Made by the first features, which show what they look like."""
        self.rows: dict[Node, int] = {}
        """Where each node's features lie."""
        self._used = 1
        self._needed = _FIRST_ROWS

    @property
    def place(self) -> tuple[int, int] | None:
        """Where the rows begin and how many there are, once there are some: what recordings rely on."""
        return None if self.values_NF is None else (self.values_NF.data_ptr(), len(self.values_NF))

    def restart(self, rows: int) -> None:
        """Hold nothing, with room for so many rows."""
        self.rows, self._used = {}, 1
        self._reserve(rows)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes that are here."""
        assert self.values_NF is not None
        return self.values_NF[[self.rows[node] for node in nodes]]

    def claim(self, nodes: Sequence[Node], size: int) -> int:
        """Give nodes rows in a row, with room for `size`, and return the first; the next claim takes what they do not fill."""
        start = self._used
        self.rows.update(zip(nodes, range(start, start + len(nodes)), strict=True))
        self._used += len(nodes)
        self._reserve(start + size)
        return start

    def _reserve(self, rows: int) -> None:
        self._needed = max(self._needed, rows)
        if self.values_NF is not None and rows > len(self.values_NF):
            kept_NF = self.values_NF
            self.values_NF = self._made(kept_NF, 2 * rows)
            self.values_NF[: len(kept_NF)] = kept_NF

    def write(self, rows_T: Tensor, features_TF: Tensor) -> None:
        """Put features into rows that were claimed."""
        if self.values_NF is None:
            self.values_NF = self._made(features_TF, self._needed)
        self.values_NF.index_copy_(0, rows_T, features_TF)

    def write_before(self, features_F: Tensor) -> None:
        """Put down the features of what precedes the tree."""
        if self.values_NF is None:
            self.values_NF = self._made(features_F[None], self._needed)
        self.values_NF[BEFORE] = features_F

    def drop(self, nodes: Sequence[Node]) -> None:
        """Forget nodes; their rows are free again after the next `keep`."""
        for node in nodes:
            self.rows.pop(node, None)

    def keep(self, alive: Collection[Node]) -> None:
        """Forget all other nodes, and move what is left together."""
        rows = [(node, row) for node, row in self.rows.items() if node in alive]
        if rows and self.values_NF is not None:
            kept_R = brought(torch.tensor([row for _, row in rows]), self.values_NF.device)
            self.values_NF[1 : 1 + len(rows)] = self.values_NF[kept_R]
        self.rows = {node: row for row, (node, _) in enumerate(rows, start=1)}
        self._used = 1 + len(rows)

    def _made(self, like_TF: Tensor, rows: int) -> Tensor:
        return torch.zeros(rows, like_TF.shape[-1], dtype=like_TF.dtype, device=like_TF.device)
