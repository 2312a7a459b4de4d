"""Texts that are counted: files in blocks, and texts that go round in circles."""

import gzip

import pytest

from polydraft.errors import UsageError
from polydraft.train.corpus_cache import blocks_of, fresh_stretches

from .brute import random_text

TEXT = "".join(f"line {number}: früh übt sich\r\n" if number % 3 else "\n" for number in range(200)) + "x" * 500 + " end"


@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
def test_blocks_hold_the_whole_text_and_end_with_lines(tmp_path, block):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_bytes(TEXT.encode())
    packed.write_bytes(gzip.compress(TEXT.encode()))
    for file in (plain, packed):
        seen = []
        blocks = list(blocks_of(file, block, seen.append))
        assert "".join(blocks) == TEXT
        assert max(map(len, blocks)) <= 2 * block
        assert seen == sorted(seen) and seen[-1] == file.stat().st_size
    if block == 64:
        assert all(text.endswith("\n") for text in blocks if "x" not in text)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cut.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:-20], "as gzipped text"),
        ("plain.txt.gz", TEXT.encode(), "as gzipped text"),
        ("damaged.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:20] + b"\xff" * 40, "as gzipped text"),
        ("latin.txt", "früh".encode("latin-1"), "not UTF-8"),
        ("latin.txt.gz", gzip.compress("früh".encode("latin-1"), mtime=0), "not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        list(blocks_of(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path):
    for file in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(UsageError, match="no such file"):
            list(blocks_of(file))


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
