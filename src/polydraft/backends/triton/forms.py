"""Imports all forms of operations in Triton, which registers them; Triton itself is imported when one runs."""

from polydraft.backends.triton import attention, compiling, drawing, growth, head, layers, slots, verification

__all__ = ["attention", "compiling", "drawing", "growth", "head", "layers", "slots", "verification"]
