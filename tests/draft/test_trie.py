"""Continuations merged into tries, and tries turned into trees."""

import random

import torch

from polydraft.draft.ladder import Ladder
from polydraft.draft.trie import FEW_STEPS, TokenTrie, as_draft_tree, trie_ladder
from polydraft.sampling import NO_TOKEN
from small_tries import trie_of

CPU = torch.device("cpu")


def paths_of(trie: TokenTrie) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(trie)):
        paths.append((*paths[trie.parents[node]], trie.tokens[node]))
    return set(paths[1:])


def test_each_token_of_a_path_has_a_source() -> None:
    trie = trie_of(7, [[1, 2, 3], [1, 4], [8]])
    assert trie.followed([1, 4, 5]) == ["source 0", "source 1"]
    assert trie.followed([8]) == ["source 2"] and trie.followed([2]) == trie.followed([]) == []
    trie.cut(3)
    assert paths_of(trie) == {(1,), (1, 2), (1, 2, 3)} and trie.followed([1, 4]) == ["source 0"]


def test_chains_that_share_nothing_keep_their_sources() -> None:
    trie = trie_of(7, [[1, 2], [1, 3, 4]], shared=False)
    assert len(trie) == 6
    assert trie.followed([1, 3, 4]) == ["source 0", "source 1", "source 1"]


def test_rounds_have_few_sizes_and_nothing_to_propose_is_one_token() -> None:
    def rounded(count: int, ladder: Ladder) -> int:
        return ladder.holding(1 + count).nodes - 1

    few, many = trie_ladder(64, FEW_STEPS), trie_ladder(100)
    assert [rounded(count, trie_ladder(20)) for count in (0, 1, 4, 5, 12, 17, 20)] == [0, 4, 4, 8, 12, 20, 20]
    assert [rounded(count, few) for count in (0, 1, 9, 25, 64)] == [0, 8, 24, 64, 64]
    assert rounded(3, trie_ladder(2)) == 2 and rounded(65, many) == 80 and rounded(97, many) == 100


def test_trees_hold_what_the_tries_hold() -> None:
    generator = random.Random(4)
    tries = []
    for row in range(12):
        trie = trie_of(row, [[generator.randrange(3) for _ in range(generator.randrange(1, 7))] for _ in range(row)])
        trie.cut(29)
        tries.append(trie)
    tree = as_draft_tree(tries, 30, 6, CPU)
    assert tree.tokens_BN[:, 0].tolist() == list(range(12))
    for row, trie in enumerate(tries):
        reached = {(): 0}
        for path in sorted(paths_of(trie), key=len):
            node_B = torch.zeros(12, dtype=torch.long)
            node_B[row] = reached[path[:-1]]
            nodes_BK, tokens_BK = tree.children(node_B)
            place = tokens_BK[row].tolist().index(path[-1])
            node = reached[path] = int(nodes_BK[row, place])
            assert tree.depths_BN[row, node] == len(path)
            ancestors = {reached[path[:length]] for length in range(len(path) + 1)}
            assert set(tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()) == ancestors
        # Padding sees the root and itself, and no table names it.
        assert int((tree.child_table_BNK[row] > 0).sum()) == len(trie) - 1
        for node in range(len(trie), 30):
            assert tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist() == [0, node]
    assert (tree.children(torch.zeros(12, dtype=torch.long))[1][0] == NO_TOKEN).all()
