"""Functions compiled by `torch.compile`, once for every shape that they meet."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_MOST_SHAPES = 64
"""Of trees and batches that one function is compiled for; further ones run as they are."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a function, the same each time: compiling takes seconds."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    return torch.compile(function, dynamic=False)
