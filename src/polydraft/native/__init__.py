"""Kernels in C for models on a CPU: products of few tokens as fast as weights are read, whole passes in one call, drawing."""

from polydraft.native.arguments import Weight, multiply, quantised
from polydraft.native.body import BodyWeights, LayerWeights, NativeBody, Rows
from polydraft.native.build import kernels, loaded
from polydraft.native.product import NativeProduct

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
