"""Kernels in C for models on a CPU: products of few tokens as fast as weights are read, whole passes in one call, drawing."""

from polydraft.backends.native.arguments import Weight, multiply, quantised
from polydraft.backends.native.body import BodyWeights, LayerWeights, NativeBody, Rows
from polydraft.backends.native.build import kernels, loaded
from polydraft.backends.native.product import NativeProduct

__all__ = [
    "BodyWeights",
    "LayerWeights",
    "NativeBody",
    "NativeProduct",
    "Rows",
    "Weight",
    "kernels",
    "loaded",
    "multiply",
    "quantised",
]
