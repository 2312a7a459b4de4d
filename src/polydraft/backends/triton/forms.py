"""All forms of operations that Triton runs: importing them registers them."""

from polydraft.backends.triton import growth, planting

__all__ = ["growth", "planting"]
