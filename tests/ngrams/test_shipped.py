"""The corpus cache that comes with the package."""

import json

import pytest

from polydraft.models.bundled import SHIPPED_DRAFTS
from polydraft.ngrams import GRAM_CACHES, SHIPPED_CORPORA, GramOptions, load_corpus

FILE = SHIPPED_CORPORA["smollm2-corpus"]


@pytest.mark.skipif(not FILE.is_file(), reason="this copy has no corpus cache")
def test_the_shipped_cache_is_small_and_fits_the_bundled_target():
    mark = json.loads((SHIPPED_DRAFTS["smollm2-head"] / "config.json").read_text())["tokenizer_fingerprint"]
    assert FILE.stat().st_size <= 4_000_000
    trie = load_corpus("auto", mark)
    assert trie is not None and trie.corpus_tokens > 1_000_000
    cache = GRAM_CACHES.get("corpus")(GramOptions(fingerprint=mark))
    assert not cache.is_empty
    memory = cache.open()
    memory.read(trie.gram_of(trie.level_sizes[0])[:1])  # the commonest pair of tokens
    assert memory.propose(4, 4)
