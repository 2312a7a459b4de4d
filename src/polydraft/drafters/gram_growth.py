"""A trie of what n-gram memories know, grown where the next token is likeliest to be the target's.

At every node all memories are asked what may follow the text and the path to the node; the likeliest token of all is added, and
so on. A long match thus gets a long chain, weak ones a few first tokens, and a path that one memory began may be continued by
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from polydraft.drafters.trie import WIDTH, TokenTrie, rounded
from polydraft.ngrams import GramMemory

_SPARE = 0.25
"""Candidates below the least chance by no more than this are kept in mind for rooms that would stay empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a trie grows."""

    nodes: int
    """Most candidates."""
    depth: int
    """Most levels."""
    width: int
    """Most tokens that each memory is asked for at a node."""
    least: float
    """Least chance that a candidate is reached and right; below it, it costs more in the pass than it yields."""


def grow(root: int, names: Sequence[str], memories: Sequence[GramMemory], limits: Limits) -> TokenTrie:
    """Grow a trie below the pending token.

    A node's chance is the product of the chances along its path. Where several memories propose the same token each may be
    right on its own, so the chance that none is are multiplied; chances of siblings never add up to more than 1.

    Parameters
    ----------
    root : int
        The pending token, which the memories have read.
    names : sequence of str
        Of the memories. A token is credited to the one that gave it the highest chance.
    memories : sequence of GramMemory
    limits : Limits
    """
    trie = TokenTrie(root)
    spare = limits.least * _SPARE
    # Falling chance; then the order in which they were found. Of each: parent, token, and who proposed it.
    waiting: list[tuple[float, int, int, int, str]] = []
    places: list[list[Any]] = [[memory.end() for memory in memories]]
    found, node, chance, room = 0, 0, 1.0, 0
    while True:
        if trie.depths[node] < limits.depth and len(trie) <= limits.nodes:
            for token, (own, name) in _ways(names, memories, places[node], limits.width):
                if chance * own >= spare:
                    found += 1
                    heappush(waiting, (-chance * own, found, node, token, name))
        if not waiting or len(trie) > limits.nodes:
            break
        negative, _, parent, token, name = heappop(waiting)
        chance = -negative
        if chance >= limits.least:
            room = rounded(len(trie), limits.nodes)
        if len(trie) > room:
            break
        node = trie.child(parent, token, name)
        places.append([memory.step(place, token) for memory, place in zip(memories, places[parent], strict=True)])
    return trie


def _ways(
    names: Sequence[str], memories: Sequence[GramMemory], places: Sequence[Any], width: int
) -> list[tuple[int, tuple[float, str]]]:
    """Put together what the memories propose at a node: the likeliest tokens, as many as a node has room for."""
    chances: dict[int, tuple[float, str]] = {}
    best: dict[int, float] = {}
    for name, memory, place in zip(names, memories, places, strict=True):
        for token, chance in memory.ways(place, width):
            known = chances.get(token)
            if known is None:
                chances[token] = chance, name
                best[token] = chance
            else:
                chances[token] = 1 - (1 - known[0]) * (1 - chance), name if chance > best[token] else known[1]
                best[token] = max(best[token], chance)
    total = sum(chance for chance, _ in chances.values())
    if total > 1:
        chances = {token: (chance / total, name) for token, (chance, name) in chances.items()}
    if len(chances) <= WIDTH:
        return list(chances.items())
    return sorted(chances.items(), key=lambda way: -way[1][0])[:WIDTH]
