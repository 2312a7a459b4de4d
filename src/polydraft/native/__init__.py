"""Kernels in C for models on a CPU: products of few tokens as fast as weights are read, and whole passes in one call."""

from polydraft.native.arguments import Weight, multiply, quantised
from polydraft.native.body import BodyWeights, LayerWeights, NativeBody, Tokens
from polydraft.native.library import kernels

__all__ = ["BodyWeights", "LayerWeights", "NativeBody", "Tokens", "Weight", "kernels", "multiply", "quantised"]
