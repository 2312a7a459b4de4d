"""Kernels in C for models on a CPU: products of few tokens at the speed of reading the weights, and whole passes in one call."""

from polydraft.native.arguments import Weight, multiply, quantised
from polydraft.native.body import BodyWeights, LayerWeights, NativeBody, Tokens
from polydraft.native.library import kernels

__all__ = ["BodyWeights", "LayerWeights", "NativeBody", "Tokens", "Weight", "kernels", "multiply", "quantised"]
