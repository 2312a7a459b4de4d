"""Models in GGUF files: read by their headers, converted once into the cache, in the format in use, and mapped from there."""

from polydraft.models.gguf.folder import converted_folder, gguf_source
from polydraft.models.gguf.header import vocabulary_of
from polydraft.models.gguf.loading import load_converted, load_converted_tokenizer

__all__ = ["converted_folder", "gguf_source", "load_converted", "load_converted_tokenizer", "vocabulary_of"]
