"""Kernels in C for models on a CPU: products of few tokens as fast as weights are read, and whole passes in one call."""

from polydraft.native.arguments import Weight, multiply, quantised
from polydraft.native.body import BodyWeights, LayerWeights, NativeBody, Rows
from polydraft.native.build import kernels, loaded

__all__ = ["BodyWeights", "LayerWeights", "NativeBody", "Rows", "Weight", "kernels", "loaded", "multiply", "quantised"]
