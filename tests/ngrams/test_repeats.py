import pytest

from polydraft.ngrams.repeats import fresh_stretches

from .brute import random_text


def test_circles_are_left_out():
    assert list(fresh_stretches([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 7, 8], 3)) == [[9, 1, 2, 3, 1, 2], [7, 8]]
    assert list(fresh_stretches([1, 2, 1, 2, 3], 3)) == [[1, 2, 1, 2, 3]]
    assert list(fresh_stretches([], 3)) == []
    assert list(fresh_stretches([5] * 100, 4)) == [[5] * 4]


@pytest.mark.parametrize("seed", range(10))
def test_every_gram_of_the_text_is_still_there_once(seed):
    order, text = 4, random_text(seed, 200, vocabulary=3)
    grams = [tuple(text[start : start + order]) for start in range(len(text) - order + 1)]
    left = [
        tuple(stretch[start : start + order])
        for stretch in fresh_stretches(text, order)
        for start in range(len(stretch) - order + 1)
    ]
    assert set(left) <= set(grams) and len(set(left)) == len(left)
    kept = sum(map(len, fresh_stretches(text, order)))
    assert kept == len(set(grams)) + order - 1
