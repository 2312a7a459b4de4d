"""What text has been seen before, and what came next: memories of n-grams, on the host."""

from polydraft.ngrams.cache import GRAM_CACHES, GramCache, GramMemory, Match
from polydraft.ngrams.context import ContextCache
from polydraft.ngrams.fingerprint import tokenizer_fingerprint
from polydraft.ngrams.lookup import LookupCache
from polydraft.ngrams.options import GramOptions
from polydraft.ngrams.suffix import SuffixCache

__all__ = [
    "GRAM_CACHES",
    "ContextCache",
    "GramCache",
    "GramMemory",
    "GramOptions",
    "LookupCache",
    "Match",
    "SuffixCache",
    "tokenizer_fingerprint",
]
