"""Forms of operations by Triton, which register themselves when they are imported."""

from polydraft.backends.triton import attention, head, layers, slots

__all__ = ["attention", "head", "layers", "slots"]
