"""Candidate continuations merged into one tree a row, on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from polydraft.models.language_model import brought
from polydraft.trees import DraftTree

WIDTH = 8
"""Most children of a node: a fixed number, so that shapes do not change from round to round."""
STEPS = (0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64)
"""Numbers of candidates that a round may have; a pass costs by its tokens, and each size may be prepared once."""
FEW_STEPS = (0, 8, 24, 64)
"""The same where tokens cost little and preparing much: on a GPU, which records a round of every size."""


class TokenTrie:
    """Continuations of one text: those with a common beginning share its nodes.

    Parameters
    ----------
    root : int
        The pending token.
    shared : bool
        Whether common beginnings are shared. If not every continuation is a chain of its own, as the Self-Draft paper
        verifies them.
    """

    def __init__(self, root: int, shared: bool = True) -> None:
        self.tokens, self.parents, self.depths, self.ranks = [root], [0], [0], [0]
        self.sources = [""]
        """Who proposed each node first."""
        self._children: list[dict[int, int]] = [{}]
        self._count = [0]
        self._shared = shared

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[int], source: str, limit: int) -> None:
        """Add a continuation, as far as the trie may grow to `limit` nodes, the root included."""
        node = 0
        for token in tokens:
            child = self._children[node].get(token) if self._shared else None
            if child is None:
                if len(self.tokens) >= limit or (self._shared and self._count[node] >= WIDTH):
                    return
                child = self.child(node, token, source)
            node = child

    def child(self, node: int, token: int, source: str) -> int:
        """Add a new child to a node; return its number."""
        child, rank = len(self.tokens), self._count[node]
        self._count[node] = rank + 1
        self._children[node][token] = child
        self._children.append({})
        self._count.append(0)
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.ranks.append(rank)
        self.sources.append(source)
        return child

    def followed(self, tokens: Sequence[int]) -> list[str]:
        """Say who proposed each token of a path, as far as the trie holds it."""
        sources, reached = [], [0]
        for token in tokens:
            if self._shared:
                reached = [child for node in reached if (child := self._children[node].get(token)) is not None]
            else:  # chains that begin alike
                places = enumerate(zip(self.parents, self.tokens, strict=True))
                reached = [node for node, (parent, other) in places if node and parent in reached and other == token]
            if not reached:
                break
            sources.append(self.sources[reached[0]])
        return sources


def rounded(count: int, limit: int, steps: Sequence[int] = STEPS) -> int:
    """Return the size of a round that has room for `count` candidates, at most `limit`."""
    return min(next((step for step in steps if step >= count), -(-count // 16) * 16), limit)


def as_draft_tree(tries: Sequence[TokenTrie], size: int, depth: int, device: torch.device) -> DraftTree:
    """Turn tries into a tree a row, padded to `size` nodes.

    Padding is children of the root that no table names: a walk never gets there.

    Parameters
    ----------
    tries : sequence of TokenTrie
        One a row.
    size : int
        Nodes, the root included.
    depth : int
        As a static number; no trie is deeper.
    device : torch.device
    """
    batch_size = len(tries)
    width = max(WIDTH, *(max(trie.ranks) + 1 for trie in tries))
    # Tokens, depths and child table in one array, for one copy to the device.
    packed_BNX = np.zeros((batch_size, size, 2 + width), dtype=np.int64)
    ancestors_BNN = np.zeros((batch_size, size, size), dtype=np.bool_)
    packed_BNX[:, 1:, 1] = 1
    nodes_N = np.arange(size)
    ancestors_BNN[:, nodes_N, nodes_N] = True
    ancestors_BNN[:, :, 0] = True
    for row, trie in enumerate(tries):
        count = len(trie)
        packed_NX, ancestors_NN = packed_BNX[row], ancestors_BNN[row]
        packed_NX[:count, 0] = trie.tokens
        if count == 1:
            continue
        packed_NX[:count, 1] = trie.depths
        parents_N = np.array(trie.parents)
        packed_NX[parents_N[1:], 2 + np.array(trie.ranks[1:])] = nodes_N[1:count]
        above_N = parents_N
        for _ in range(max(trie.depths) - 1):
            ancestors_NN[nodes_N[:count], above_N] = True
            above_N = parents_N[above_N]
    packed, ancestors = (brought(torch.from_numpy(array), device) for array in (packed_BNX, ancestors_BNN))
    reach = max(max(trie.depths) for trie in tries)
    return DraftTree(packed[..., 0], packed[..., 1], ancestors, packed[..., 2:], depth, reach=reach)
