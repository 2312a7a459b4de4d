"""All forms of operations in C: importing them registers them."""

from polydraft.backends.native import drawing, linears, models, product, verify_block

__all__ = ["drawing", "linears", "models", "product", "verify_block"]
