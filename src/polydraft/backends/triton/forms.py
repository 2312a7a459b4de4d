"""All forms of operations that Triton runs: importing them registers them; Triton itself is imported where one runs."""

from polydraft.backends.triton import attention, compiling, drawing, growth, head, layers, slots, verification

__all__ = ["attention", "compiling", "drawing", "growth", "head", "layers", "slots", "verification"]
