"""Tries that grow where the next token is likeliest."""

import random
from collections.abc import Sequence

import pytest

from polydraft.draft.trie import WIDTH, Limits, TokenTrie, grow, trie_ladder
from polydraft.ngrams import GramMemory, Way

Path = tuple[int, ...]


class Oracle(GramMemory):
    """Says at every path what it was told to say there."""

    def __init__(self, told: dict[Path, list[Way]]) -> None:
        self.told, self.asked = told, list[Path]()

    def read(self, tokens: Sequence[int]) -> None: ...

    def reset(self) -> None: ...

    def end(self) -> Path:
        return ()

    def step(self, place: Path, token: int) -> Path:
        return (*place, token)

    def ways(self, place: Path, width: int) -> list[Way]:
        self.asked.append(place)
        return self.told.get(place, [])[:width]


def limits(nodes: int = 64, depth: int = 12, width: int = 8, least: float = 0.0) -> Limits:
    return Limits(nodes=nodes, depth=depth, width=width, least=least, ladder=trie_ladder(nodes))


def paths_of(trie: TokenTrie) -> list[Path]:
    paths: list[Path] = [()]
    for node in range(1, len(trie)):
        paths.append((*paths[trie.parents[node]], trie.tokens[node]))
    return paths[1:]


def random_oracle(seed: int, depth: int) -> tuple[Oracle, dict[Path, float]]:
    """Make an oracle with ways of chances up to 0.5, and the chance of every path that it knows."""
    draw, told, chances = random.Random(seed), dict[Path, list[Way]](), {(): 1.0}
    level: list[Path] = [()]
    for _ in range(depth):
        following = []
        for path in level:
            shares = sorted((draw.uniform(0.01, 0.5) for _ in range(draw.randint(0, 3))), reverse=True)
            total = max(sum(shares), 1.0)
            told[path] = [(token, share / total) for token, share in enumerate(shares)]
            for token, share in told[path]:
                chances[*path, token] = chances[path] * share
                following.append((*path, token))
        level = following
    del chances[()]
    return Oracle(told), chances


@pytest.mark.parametrize("nodes", [1, 4, 12, 20])
def test_the_likeliest_paths_are_taken(nodes: int) -> None:
    filled = 0
    for seed in range(30):
        oracle, chances = random_oracle(seed, 5)
        taken = paths_of(grow(9, ["here"], [oracle], limits(nodes=nodes)))
        assert taken == sorted(taken, key=lambda path: -chances[path])
        assert len(taken) == min(nodes, len(chances)) == len(set(taken))
        left = [chance for path, chance in chances.items() if path not in taken]
        assert min(chances[path] for path in taken) >= max(left, default=0.0) if taken else not chances
        filled += len(taken) == nodes
    assert filled > 10


def test_what_is_unlikely_only_fills_places_that_the_pass_has_anyway() -> None:
    told: dict[Path, list[Way]] = {(): [(token, 0.25 - 0.04 * token) for token in range(5)]}
    assert len(grow(9, ["here"], [Oracle(told)], limits(least=0.26))) == 1
    # One candidate is likely enough; a round has room for four.
    assert paths_of(grow(9, ["here"], [Oracle(told)], limits(least=0.24))) == [(0,), (1,), (2,), (3,)]
    assert len(grow(9, ["here"], [Oracle(told)], limits(least=0.24, nodes=2))) == 3
    # Far too unlikely ones do not even do that.
    told[()] = [(0, 0.8), (1, 0.01)]
    assert paths_of(grow(9, ["here"], [Oracle(told)], limits(least=0.1))) == [(0,)]


def test_a_long_match_gets_a_chain_and_weak_ones_their_first_tokens() -> None:
    told: dict[Path, list[Way]] = {(5,) * depth: [(5, 0.7)] for depth in range(1, 12)}
    told[()] = [(5, 0.7), (6, 0.1), (7, 0.05)]
    told[6,] = [(1, 0.2)]
    taken = paths_of(grow(9, ["here"], [Oracle(told)], limits(nodes=8, least=0.04)))
    assert set(taken) == {(5,) * depth for depth in range(1, 8)} | {(6,)}
    assert max(map(len, paths_of(grow(9, ["here"], [Oracle(told)], limits(depth=4))))) == 4


def test_one_memory_goes_on_where_another_began() -> None:
    text, corpus = Oracle({(): [(1, 0.5), (2, 0.2)]}), Oracle({(): [(2, 0.3)], (1,): [(3, 0.6)]})
    trie = grow(9, ["text", "corpus"], [text, corpus], limits())
    assert set(paths_of(trie)) == {(1,), (1, 3), (2,)}
    assert trie.followed([1, 3]) == ["text", "corpus"]
    assert trie.followed([2]) == ["corpus"], "the credit is due to whom gave it the better chance"


def test_a_node_has_no_more_children_than_a_table_has_room_for() -> None:
    memories = [Oracle({(): [(8 * part + token, 0.1 - 0.01 * token) for token in range(8)]}) for part in range(3)]
    taken = paths_of(grow(9, ["a", "b", "c"], memories, limits()))
    assert len(taken) == WIDTH
    assert {path[0] % 8 for path in taken} == {0, 1, 2}, "the likeliest of all three"


def test_hopeless_places_are_not_looked_into() -> None:
    oracle = Oracle({(): [(token, 0.125) for token in range(8)]})
    grow(9, ["here"], [oracle], limits(nodes=8))
    assert oracle.asked == [()]
