"""N-gram caches: they propose what followed the text's last tokens before, in the text or in a corpus."""

from polydraft.models.heads.head_folder import tokenizer_fingerprint
from polydraft.ngrams.cache import GRAM_CACHES, ContinuationMemory, GramCache, GramMemory, GramOptions, Match, Way
from polydraft.ngrams.context import ContextCache
from polydraft.ngrams.corpus import SHIPPED_CORPORA, CorpusCache, load_corpus
from polydraft.ngrams.lookup import LookupCache, SuffixCache

__all__ = [
    "GRAM_CACHES",
    "SHIPPED_CORPORA",
    "ContextCache",
    "ContinuationMemory",
    "CorpusCache",
    "GramCache",
    "GramMemory",
    "GramOptions",
    "LookupCache",
    "Match",
    "SuffixCache",
    "Way",
    "load_corpus",
    "tokenizer_fingerprint",
]
