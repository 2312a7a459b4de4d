"""All forms of operations that Triton runs: importing them registers them; Triton itself is imported where one runs."""

from polydraft.backends.triton import compiling, draw_hybrid, follow, growth, outcome, planting, softened, verify_block

__all__ = ["compiling", "draw_hybrid", "follow", "growth", "outcome", "planting", "softened", "verify_block"]
