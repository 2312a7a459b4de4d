"""A trie of what n-gram memories know, grown where the next token is likeliest to be the target's.

At every node all memories are asked what may follow the text and the path to the node; the likeliest token of all is added, and
so on. A long match thus gets a long chain, weak ones a few first tokens, and a path that one memory began may be continued by
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from polydraft.drafters.trie import STEPS, WIDTH, TokenTrie, rounded
from polydraft.ngrams import GramMemory

_SPARE = 0.25
"""Part of the least chance that candidates must have to fill places of the pass that would stay empty."""
_HOPE = 0.5
"""Part of a node's chance that its children are thought to have before they are looked for. Looking takes most of the time, and
for most nodes it does not come to it."""


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
    steps: tuple[int, ...] = STEPS
    """Numbers of candidates that a round is filled up to, once it is begun."""


def grow(root: int, names: Sequence[str], memories: Sequence[GramMemory], limits: Limits) -> TokenTrie:
    """Grow a trie below the pending token.

    A node's chance is the product of the chances along its path. Where several memories propose a token it has the highest
    of their chances, since most have read the same text; chances of siblings never add up to more than 1.

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
    # Falling chance; then the order in which they were found. Of each: parent, token, and who proposed it; no token where
    # the children of a node are yet to be found.
    waiting: list[tuple[float, int, int, int | None, str]] = [(-1.0, 0, 0, None, "")]
    places: list[list[Any] | None] = [[memory.end() for memory in memories]]
    found, room = 0, 0
    while waiting and len(trie) <= limits.nodes:
        negative, _, node, token, name = heappop(waiting)
        if token is None:
            chance = negative if node == 0 else negative / _HOPE
            for following, (own, source) in _ways(names, memories, _place(trie, memories, places, node), limits.width).items():
                if -chance * own >= spare:
                    found += 1
                    heappush(waiting, (chance * own, found, node, following, source))
            continue
        if len(trie) > room:
            if -negative < limits.least * _HOPE:
                break
            if -negative < limits.least:  # children of a node that waits at less than its chance may still be likely enough
                continue
            room = rounded(len(trie), limits.nodes, limits.steps)
        child = trie.child(node, token, name)
        places.append(None)
        if trie.depths[child] < limits.depth:
            found += 1
            heappush(waiting, (negative * _HOPE, found, child, None, ""))
    return trie


def _place(trie: TokenTrie, memories: Sequence[GramMemory], places: list[list[Any] | None], node: int) -> list[Any]:
    """Return where the memories stand at a node, whose parent has been asked before."""
    known = places[node]
    if known is None:
        before, token = places[trie.parents[node]], trie.tokens[node]
        assert before is not None
        known = places[node] = [memory.step(place, token) for memory, place in zip(memories, before, strict=True)]
    return known


def _ways(
    names: Sequence[str], memories: Sequence[GramMemory], places: Sequence[Any], width: int
) -> dict[int, tuple[float, str]]:
    """Put together what the memories propose at a node: the likeliest tokens, as many as a node has room for."""
    ways: dict[int, tuple[float, str]] = {}
    for name, memory, place in zip(names, memories, places, strict=True):
        for token, chance in memory.ways(place, width):
            known = ways.get(token)
            if known is None or chance > known[0]:
                ways[token] = chance, name
    total = sum([chance for chance, _ in ways.values()])
    if total > 1:
        ways = {token: (chance / total, name) for token, (chance, name) in ways.items()}
    return ways if len(ways) <= WIDTH else dict(sorted(ways.items(), key=_chance, reverse=True)[:WIDTH])


def _chance(way: tuple[int, tuple[float, str]]) -> float:
    return way[1][0]
