"""All forms of operations in C: importing them registers them."""

from polydraft.backends.native import drawing, verify_block

__all__ = ["drawing", "verify_block"]
