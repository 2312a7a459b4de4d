"""Tries of given paths, for tests."""

from collections.abc import Iterable, Sequence

from polydraft.draft.trie import TokenTrie


def trie_of(root: int, paths: Iterable[Sequence[int]], shared: bool = True) -> TokenTrie:
    """Make a trie of paths, each credited to a source named after its number; or chains that share no nodes."""
    trie, known = TokenTrie(root), dict[tuple[int, ...], int]()
    for number, path in enumerate(paths):
        node = 0
        for length, token in enumerate(path, start=1):
            key = tuple(path[:length])
            if not shared or key not in known:
                known[key] = trie.child(node, token, f"source {number}")
            node = known[key]
    return trie
