"""Models in GGUF files: converted once to the number format in use, kept in the cache, and memory-mapped from there."""

from polydraft.models.gguf.folder import converted_folder, gguf_source
from polydraft.models.gguf.header import vocabulary_of
from polydraft.models.gguf.loading import load_converted, load_converted_tokenizer

__all__ = ["converted_folder", "gguf_source", "load_converted", "load_converted_tokenizer", "vocabulary_of"]
