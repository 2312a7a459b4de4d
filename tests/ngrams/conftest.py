import pytest

from polydraft.ngrams import GramOptions
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import save_trie

from .brute import random_text

VOCABULARY = 32
MARK = "0123456789abcdef"


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """A corpus cache of texts that use the tokens below 6."""
    file = tmp_path_factory.mktemp("corpus") / "small.grams"
    with GramCounter(VOCABULARY) as counter:
        for seed in range(5):
            counter.add(random_text(100 + seed, 300, vocabulary=6))
            counter.end_text()
        save_trie(counter.count(MARK, max_bytes=1 << 20), file)
    return file


@pytest.fixture
def options(corpus_file):
    return GramOptions(corpus=corpus_file, fingerprint=MARK)
