"""Counts are exact whatever the sizes of chunks and tables, and the file never outgrows its bytes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from covering import some_slow
from polydraft.errors import FailureError, UsageError
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import ABSENT, HEADER_SIZE, node_bytes, save_trie, weights_of

from .brute import gram_of, random_text

VOCABULARY, MAX_PREFIX, GRAM = 9, 2, 3
ORDER = MAX_PREFIX + GRAM


def texts(seed):
    return [random_text(10 * seed + number, size, vocabulary=7) for number, size in enumerate((120, 1, 0, 3, 200, 5))]


def trie_of(texts, *, max_bytes=1 << 20, min_count=1, part=50, **sizes):
    with GramCounter(VOCABULARY, max_prefix=MAX_PREFIX, gram=GRAM, **sizes) as counter:
        for text in texts:
            for start in range(0, len(text), part):
                counter.add(text[start : start + part])
            counter.end_text()
        return counter.count("0" * 16, max_bytes=max_bytes, min_count=min_count)


def brute_counts(texts, min_count):
    counts = Counter(
        tuple(text[start : start + size])
        for text in texts
        for size in range(1, ORDER + 1)
        for start in range(len(text) - size + 1)
    )
    return {gram: count for gram, count in counts.items() if count >= min_count}


def grams_of(trie):
    return {tuple(gram_of(trie, node)): int(trie.weights_N[node]) for node in range(len(trie.tokens_N))}


def same(one, other):
    return (
        one.level_sizes == other.level_sizes
        and np.array_equal(one.tokens_N, other.tokens_N)
        and np.array_equal(one.weights_N, other.weights_N)
        and np.array_equal(one.firsts_I, other.firsts_I)
    )


@pytest.mark.parametrize("seed", some_slow(range(8), range(3, 8)))
@pytest.mark.parametrize("min_count", [1, 2, 4])
def test_counts_equal_a_count_in_memory(seed, min_count):
    corpus = texts(seed)
    trie = trie_of(corpus, min_count=min_count)
    counts = brute_counts(corpus, min_count)
    assert grams_of(trie) == {gram: int(weights_of(np.array([count]))[0]) for gram, count in counts.items()}
    assert trie.corpus_tokens == sum(map(len, corpus))
    for node in range(len(trie.tokens_N)):
        assert trie.find(gram_of(trie, node)) == node


@pytest.mark.parametrize("seed", some_slow(range(2), [1]))
def test_chunks_and_tables_change_nothing(seed):
    corpus = [text[:40] for text in texts(seed)]
    whole = trie_of(corpus)
    for chunk, max_table, part in ((9, 1, 3), (1, 30, 1), (64, 40, 17), (1000, 3, 50)):
        assert same(trie_of(corpus, chunk=chunk, max_table=max_table, part=part), whole)
        fewer = trie_of(corpus, chunk=chunk, max_table=max_table, part=part, max_bytes=500, min_count=2)
        assert same(fewer, trie_of(corpus, max_bytes=500, min_count=2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_bytes", [300, 700, 1500, 4000])
def test_the_most_frequent_grams_that_fit_are_kept(seed, max_bytes, tmp_path):
    corpus = texts(seed)
    trie = trie_of(corpus, max_bytes=max_bytes)
    save_trie(trie, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size <= max_bytes
    counts = brute_counts(corpus, 1)
    sizes, room, wanted = node_bytes(VOCABULARY, ORDER), max_bytes - HEADER_SIZE - 4, []
    whole = brute_order(corpus, counts)
    for gram in whole:
        room -= sizes[len(gram) - 1]
        if room < 0:
            break
        wanted.append(gram)
    assert set(grams_of(trie)) == set(wanted)
    assert all(gram[:-1] in set(wanted) for gram in wanted if len(gram) > 1)


def brute_order(corpus, counts):
    """By falling count, then length; then by the place of the beginning among all of its length, and the last token."""
    return sorted(counts, key=lambda gram: (-counts[gram], len(gram), gram))


def test_siblings_come_by_falling_count():
    trie = trie_of([[1, 2, 1, 3, 1, 3, 1, 4, 1, 4, 1, 4]])
    steps = trie.steps(trie.find([1]), 5)
    assert [token for _, token, _ in steps] == [4, 3, 2]
    assert [cost for cost, _, _ in steps] == sorted(cost for cost, _, _ in steps)
    assert [token for _, token, _ in trie.steps(trie.find([1]), 2)] == [4, 3]


def test_no_gram_crosses_the_end_of_a_text():
    trie = trie_of([[1, 2], [3, 4]])
    assert trie.find([2, 3]) == ABSENT and trie.find([1, 2]) != ABSENT


def test_a_leaf_is_an_end():
    trie = trie_of([[0, 1, 2, 3, 4, 5, 6, 7, 8]])
    assert [token for _, token, _ in trie.steps(trie.find([0, 1, 2, 3]), 3)] == [4]
    assert trie.steps(trie.find([0, 1, 2, 3, 4]), 3) == trie.steps(trie.find([8]), 3) == []


def test_unknown_tokens_are_absent_and_foreign_ones_refused():
    trie = trie_of([[1, 2, 3]])
    assert trie.find([7]) == trie.find([100]) == trie.find([-1]) == trie.find([1, 7, 3]) == ABSENT
    with GramCounter(VOCABULARY) as counter, pytest.raises(UsageError, match="not in the vocabulary"):
        counter.add([VOCABULARY])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line():
    with GramCounter(VOCABULARY) as counter:
        counter._spilled.close()
        counter._spilled = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed by the counter)
        with pytest.raises(FailureError, match="set TMPDIR"):
            counter.add([1, 2, 3])


@pytest.mark.parametrize(("text", "options"), [([], {}), ([1, 2, 3], {"min_count": 5}), ([1, 2, 3], {"max_bytes": 10})])
def test_nothing_to_keep_is_refused(text, options):
    with pytest.raises(UsageError, match="no n-gram"):
        trie_of([text], **options)
