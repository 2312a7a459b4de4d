"""Corpus cache files: what is written is read back, and nothing else is."""

import hashlib
import json
import struct

import numpy as np
import pytest

from polydraft.errors import FailureError, UsageError
from polydraft.models.bundled import SHIPPED_DRAFTS
from polydraft.ngrams import GRAM_CACHES, SHIPPED_CORPORA, GramOptions, corpus, load_corpus
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import HEADER_SIZE, load_trie, save_trie

from .brute import gram_of
from .conftest import MARK

SHIPPED = SHIPPED_CORPORA["smollm2-corpus"]


def resealed(data: bytes) -> bytes:
    """Give changed bytes a right checksum, as someone with intent would."""
    head, rest = data[: HEADER_SIZE - 32], data[HEADER_SIZE:]
    return head + hashlib.sha256(head + rest).digest() + rest


def test_a_file_is_read_back_as_it_was(corpus_file, tmp_path):
    trie = load_trie(corpus_file)
    save_trie(trie, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == corpus_file.read_bytes()
    assert trie.fingerprint == MARK and trie.corpus_tokens == 1500 and (trie.max_prefix, trie.gram) == (3, 4)
    assert not trie.tokens_N.flags.writeable
    assert [file.name for file in tmp_path.iterdir()] == ["copy"]


def test_wide_vocabularies_take_wider_numbers(tmp_path):
    with GramCounter(200_000) as counter:
        counter.add([150_000, 70_000, 150_000, 70_000, 5])
        save_trie(counter.count(MARK, max_bytes=1000), tmp_path / "wide")
    trie = load_trie(tmp_path / "wide")
    assert gram_of(trie, trie.find([150_000, 70_000])) == [150_000, 70_000]


def test_every_truncation_is_noticed(corpus_file, tmp_path):
    data, file = corpus_file.read_bytes(), tmp_path / "cut"
    ends = {0, 1, 7, 8, 12, 40, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, len(data) // 2, len(data) - 1}
    for end in ends:
        file.write_bytes(data[:end])
        with pytest.raises(UsageError, match=r"truncated|not a corpus cache"):
            load_trie(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(UsageError, match="truncated or damaged"):
        load_trie(file)


def test_every_flipped_byte_is_noticed(corpus_file, tmp_path):
    data, file = corpus_file.read_bytes(), tmp_path / "flipped"
    for place in [*range(HEADER_SIZE + 8), *range(HEADER_SIZE + 8, len(data), 97), len(data) - 1]:
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        with pytest.raises(UsageError):
            load_trie(file)


@pytest.mark.parametrize(
    ("place", "value"),
    [(12, 3), (32, 0), (32, 2), (32, 1 << 31), (36, 0), (36, 14), (44, 3), (HEADER_SIZE, 0), (HEADER_SIZE + 4, 0)],
)
def test_contradictions_under_a_right_checksum_are_refused(corpus_file, tmp_path, place, value):
    data = bytearray(corpus_file.read_bytes())
    struct.pack_into("<I", data, place, value)
    file = tmp_path / "forged"
    file.write_bytes(resealed(bytes(data)))
    with pytest.raises(UsageError, match=r"is inconsistent|damaged"):
        load_trie(file)


def test_other_files_are_refused_in_one_line(tmp_path):
    (tmp_path / "text").write_text("Once upon a time " * 50)
    for name, message in (("text", "not a corpus cache"), ("absent", "cannot read"), (".", "cannot read")):
        with pytest.raises(UsageError, match=message) as caught:
            load_trie(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_another_version_is_refused(corpus_file, tmp_path):
    data = bytearray(corpus_file.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    (tmp_path / "new").write_bytes(resealed(bytes(data)))
    with pytest.raises(UsageError, match="version 2"):
        load_trie(tmp_path / "new")


def test_a_foreign_tokenizer_is_refused(corpus_file):
    with pytest.raises(UsageError, match="another tokenizer"):
        load_corpus(corpus_file, "f" * 16)
    assert load_corpus(corpus_file, None) is not None
    assert load_corpus("none", MARK) is None


def test_auto_takes_the_shipped_one_that_fits_or_none(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SHIPPED_CORPORA", {"ours": corpus_file, "lost": tmp_path / "lost"})
    assert load_corpus("auto", MARK).corpus_tokens == 1500
    assert load_corpus("ours", MARK) is not None
    assert load_corpus("auto", "f" * 16) is None
    assert load_corpus("auto", None) is None
    assert GRAM_CACHES.get("corpus")(GramOptions()).is_empty
    monkeypatch.setattr(corpus, "SHIPPED_CORPORA", {"lost": tmp_path / "lost"})
    assert load_corpus("auto", MARK) is None


def test_a_full_disk_leaves_nothing_behind(corpus_file, tmp_path):
    with pytest.raises(FailureError, match="cannot write"):
        save_trie(load_trie(corpus_file), tmp_path / "absent" / "file")
    assert list(tmp_path.iterdir()) == []


def test_longer_prefixes_then_higher_counts_come_first(tmp_path):
    with GramCounter(32, max_prefix=2, gram=2) as counter:
        for text in ([1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 5, 6], [9, 2, 5, 6], [9, 2, 5, 6], [8, 2, 7, 7], [8, 2, 7, 7]):
            counter.add(text)
            counter.end_text()
        save_trie(counter.count(MARK, max_bytes=10_000), tmp_path / "file")
    memory = GRAM_CACHES.get("corpus")(GramOptions(corpus=tmp_path / "file", fingerprint=MARK)).open()
    memory.read([7, 1])
    memory.read([2])
    found = [(match.prefix, list(match.tokens)) for match in memory.matches(5, 2)]
    assert found == [(2, [3, 4]), (1, [5, 6]), (1, [7, 7])]
    memory.reset()
    assert memory.matches(5, 2) == []


def test_proposals_are_likeliest_first(corpus_file):
    trie = load_trie(corpus_file)
    memory = GRAM_CACHES.get("corpus")(GramOptions(corpus=corpus_file)).open()
    for first in range(6):
        memory.reset()
        memory.read([first])
        tokens = [match.tokens[0] for match in memory.matches(3, 1)]
        assert tokens == [token for _, token, _ in trie.steps(trie.find([first]), 3)]
        assert np.all(np.diff([int(trie.weights_N[trie.find([first, token])]) for token in tokens]) <= 0)


@pytest.mark.skipif(not SHIPPED.is_file(), reason="this copy has not a corpus cache")
def test_the_shipped_cache_is_small_and_fits_the_bundled_target():
    mark = json.loads((SHIPPED_DRAFTS["smollm2-head"] / "config.json").read_text())["tokenizer_fingerprint"]
    assert SHIPPED.stat().st_size <= 4_000_000
    trie = load_corpus("auto", mark)
    assert trie is not None and trie.corpus_tokens > 1_000_000
    cache = GRAM_CACHES.get("corpus")(GramOptions(fingerprint=mark))
    assert not cache.is_empty
    memory = cache.open()
    memory.read(gram_of(trie, trie.level_sizes[0])[:1])  # the commonest pair of tokens
    assert memory.matches(4, 4)
