"""Slow and plain: what the caches must agree with."""

import random

import numpy as np


def random_text(seed: int, size: int, vocabulary: int) -> list[int]:
    """A text in which some stretches come again."""
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < size:
        if text and draw.random() < 0.3:
            start = draw.randrange(len(text))
            text += text[start : start + draw.randint(1, 6)]
        text.append(draw.randrange(vocabulary))
    return text[:size]


def places_after(text: list[int], gram: list[int]) -> list[int]:
    """Where the text goes on after an n-gram, the last place first; the text's very end does not count."""
    size = len(gram)
    return [place for place in range(len(text) - 1, size - 1, -1) if text[place - size : place] == gram]


def longest_match(text: list[int], most: int) -> int:
    """Tokens of the longest end of the text that stands somewhere before, at most `most`."""
    return max((size for size in range(1, min(most, len(text) - 1) + 1) if places_after(text, text[-size:])), default=0)


def gram_of(trie, node):
    """The n-gram of a node of a trie."""
    tokens = [int(trie.tokens_N[node])]
    while node >= trie.level_sizes[0]:
        node = int(np.searchsorted(trie.firsts_I, node, side="right")) - 1
        tokens.append(int(trie.tokens_N[node]))
    return tokens[::-1]
