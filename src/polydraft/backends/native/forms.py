"""Forms of operations by compiled code, which register themselves when they are imported."""

from polydraft.backends.native import linears, models, product

__all__ = ["linears", "models", "product"]
