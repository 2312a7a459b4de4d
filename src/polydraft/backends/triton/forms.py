"""All forms of operations that Triton runs: importing them registers them."""

from polydraft.backends.triton import compiling, outcome

__all__ = ["compiling", "outcome"]
