"""Candidate continuations merged into one trie per row, on the host.

A trie grows where the next token is likeliest to be the target's: at every node, all memories say what may follow the text and
the path to the node, and the likeliest token of all is added, again and again. So a long match becomes a long chain, weak
matches a few first tokens, and one memory may continue a path that another has begun.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from polydraft.devices import brought
from polydraft.draft.ladder import Ladder, Rung
from polydraft.errors import UsageError
from polydraft.ngrams import GramMemory
from polydraft.trees import DraftTree
from polydraft.verify import AUTO, NodeWalk

WIDTH = 8
"""Most children of a node: a fixed number, so that shapes do not change from round to round."""
STEPS = (0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64)
"""Numbers of candidates that a round may have, on a CPU, where a pass costs by its tokens."""
FEW_STEPS = (0, 8, 24, 64)
"""The same on a GPU, where tokens cost little, but every size needs a capture."""
_FURTHER = 16
"""Step between the sizes of larger rounds."""
_FILLING = 0.25
"""Candidates that fill up a pass need only this fraction of the usual minimum chance."""
_UNSEEN = 0.5
"""Fraction of a node's chance that its children are assumed to have before they are looked up: lookups take most of the time,
and most nodes never need one."""


def check_node_walk(drafter: str, walk: str) -> None:
    """Raise for walks over whole paths: they need the distribution that each child was drawn from, and n-grams have none.

    Without the name of a `drafter`, every walk passes.
    """
    if drafter and walk not in (AUTO, NodeWalk.name):
        raise UsageError(
            f"walk {walk!r} cannot verify n-grams, which drafter {drafter!r} proposes; allowed: auto, {NodeWalk.name}"
        )


class TokenTrie:
    """Continuations of one text, as a tree whose root is the pending token; parents come before their children."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths, self.ranks = [root], [0], [0], [0]
        self.sources = [""]
        """Who proposed each node first."""
        self.chances = [1.0]
        """The chance that each node is reached and accepted, if its memories estimate one."""
        self._count = [0]
        """How many children each node has."""

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int, source: str, chance: float = 0.0) -> int:
        """Add a new child to a node; return its number."""
        child, rank = len(self.tokens), self._count[node]
        self._count[node] = rank + 1
        self._count.append(0)
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.ranks.append(rank)
        self.sources.append(source)
        self.chances.append(chance)
        return child

    def cut(self, candidates: int) -> None:
        """Keep only the first `candidates` candidates."""
        first = 1 + candidates
        for parent in self.parents[first:]:
            self._count[parent] -= 1
        for values in (self.tokens, self.parents, self.depths, self.ranks, self.sources, self.chances, self._count):
            del values[first:]

    def followed(self, tokens: Sequence[int]) -> list[str]:
        """Return who proposed each token of a path, as far as the trie holds it."""
        sources, reached = list[str](), {0}
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            if parent in reached and 0 < depth <= len(tokens) and self.tokens[node] == tokens[depth - 1]:
                reached.add(node)
                if depth > len(sources):  # of chains that begin alike, the first counts
                    sources.append(self.sources[node])
        return sources


def trie_ladder(candidates: int, steps: Sequence[int] = STEPS) -> Ladder:
    """Return the sizes of rounds with up to this many candidates."""
    further = range(steps[-1], candidates, _FURTHER)
    return Ladder([Rung(1 + count) for count in sorted({*(min(step, candidates) for step in (*steps, *further)), candidates})])


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a trie grows."""

    nodes: int
    """Most candidates."""
    depth: int
    """Most levels."""
    width: int
    """Most tokens that each memory proposes at a node."""
    least: float
    """Smallest chance of being reached and accepted at which a candidate is worth its place in the pass."""
    ladder: Ladder | None = None
    """Sizes that a round with candidates is filled up to; without it, any number of candidates will do."""


def grow(root: int, names: Sequence[str], memories: Sequence[GramMemory], limits: Limits) -> TokenTrie:
    """Grow a trie below the pending token.

    A node's chance is the product of the chances along its path. If several memories propose a token, it has the highest of
    their chances, because most have read the same text. Chances of siblings never add up to more than 1.

    Parameters
    ----------
    root : int
        The pending token, which the memories have read.
    names : sequence of str
        Names of the memories. A token is credited to the one that gave it the highest chance.
    memories : sequence of GramMemory
    limits : Limits
    """
    trie = TokenTrie(root)
    filling = limits.least * _FILLING
    # Minus the chance, order of discovery, parent, token, and who proposed it. A token of None: look up the node's children.
    waiting: list[tuple[float, int, int, int | None, str]] = [(-1.0, 0, 0, None, "")]
    places: list[list[Any] | None] = [[memory.end() for memory in memories]]
    found, room = 0, 0
    while waiting and len(trie) <= limits.nodes:
        negative, _, node, token, name = heappop(waiting)
        if token is None:
            chance = negative if node == 0 else negative / _UNSEEN
            for following, (own, source) in _ways(names, memories, _place(trie, memories, places, node), limits.width).items():
                if -chance * own >= filling:
                    found += 1
                    heappush(waiting, (chance * own, found, node, following, source))
            continue
        if len(trie) > room:
            if -negative < limits.least * _UNSEEN:
                break
            if -negative < limits.least:  # others may be likelier: nodes whose children are unknown wait at a lower chance
                continue
            room = len(trie) if limits.ladder is None else limits.ladder.holding(1 + len(trie)).nodes - 1
        child = trie.child(node, token, name, -negative)
        places.append(None)
        if trie.depths[child] < limits.depth:
            found += 1
            heappush(waiting, (negative * _UNSEEN, found, child, None, ""))
    return trie


def _place(trie: TokenTrie, memories: Sequence[GramMemory], places: list[list[Any] | None], node: int) -> list[Any]:
    """Return the memories' places at a node; those of its parent must be known."""
    known = places[node]
    if known is None:
        before, token = places[trie.parents[node]], trie.tokens[node]
        assert before is not None
        known = places[node] = [memory.step(place, token) for memory, place in zip(memories, before, strict=True)]
    return known


def _ways(
    names: Sequence[str], memories: Sequence[GramMemory], places: Sequence[Any], width: int
) -> dict[int, tuple[float, str]]:
    """Combine what the memories propose at a node: the likeliest tokens, as many as a node has room for."""
    ways: dict[int, tuple[float, str]] = {}
    for name, memory, place in zip(names, memories, places, strict=True):
        for token, chance in memory.ways(place, width):
            known = ways.get(token)
            if known is None or chance > known[0]:
                ways[token] = chance, name
    total = sum([chance for chance, _ in ways.values()])
    if total > 1:
        ways = {token: (chance / total, name) for token, (chance, name) in ways.items()}
    return ways if len(ways) <= WIDTH else dict(sorted(ways.items(), key=lambda way: way[1][0], reverse=True)[:WIDTH])


def as_draft_tree(tries: Sequence[TokenTrie], size: int, depth: int, device: torch.device) -> DraftTree:
    """Turn tries into one tree per row, padded to `size` nodes.

    Padding nodes are below the root, but no table lists them, so no walk reaches them.

    Parameters
    ----------
    tries : sequence of TokenTrie
        One per row.
    size : int
        Nodes, root included.
    depth : int
        Depth that the tree reports, the same in every round; no trie is deeper.
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
