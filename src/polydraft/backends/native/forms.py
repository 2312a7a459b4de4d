"""Imports all forms of operations in C, which registers them."""

from polydraft.backends.native import drawing, follow, linears, models, product, verify_block

__all__ = ["drawing", "follow", "linears", "models", "product", "verify_block"]
