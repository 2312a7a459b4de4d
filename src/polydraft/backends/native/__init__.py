"""Kernels in C for models on a CPU: products of few tokens as fast as weights are read, whole passes in one call, drawing."""

from polydraft.backends.native.build import describe, kernels, loaded

__all__ = ["describe", "kernels", "loaded"]
