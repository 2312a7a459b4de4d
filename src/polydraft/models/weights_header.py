"""What a file of weights says of itself, before anything is made to hold them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn


def check_header(file: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse a file that does not hold tensors of exactly these names and shapes; only its header is read.

    Parameters
    ----------
    file : Path
        A safetensors file.
    expected : mapping
        Such as the state of a module on the meta device, which takes no memory however large it is.

    Raises
    ------
    ValueError
        That says which tensor is missing, not expected, or of another shape.
    OSError, SafetensorError
        If the file cannot be read.
    """
    with safe_open(file, "pt") as opened:
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    for name, tensor in expected.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if found[name] != tuple(tensor.shape):
            raise ValueError(f"{name} has the shape {list(found[name])}, where config.json asks for {list(tensor.shape)}")
    if others := sorted({*found} - {*expected}):
        raise ValueError(f"{others[0]} is not part of it")


def weightless(module: type[nn.Module], *arguments: object) -> Mapping[str, torch.Tensor]:
    """Return the state that a module made from these arguments would have, without memory for it."""
    try:
        with torch.device("meta"):
            state: Mapping[str, torch.Tensor] = module(*arguments).state_dict()
    except (RuntimeError, TypeError, OverflowError):  # torch has no such sizes
        raise ValueError("config.json asks for impossible sizes") from None
    return state
