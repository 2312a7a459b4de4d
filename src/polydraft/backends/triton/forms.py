"""All forms of operations that Triton runs: importing them registers them; Triton itself is imported where one runs."""

from polydraft.backends.triton import draw_hybrid, follow, softened, verify_block

__all__ = ["draw_hybrid", "follow", "softened", "verify_block"]
