"""Kernels in C for CPUs: products of a few tokens at the speed of reading weights, whole passes in one call, drawing."""

from polydraft.backends.native.build import describe, kernels

__all__ = ["describe", "kernels"]
