"""Training state on disk: whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polydraft.atomic import partial_beside
from polydraft.errors import FailureError, UsageError

_CURRENT, _FORMER = "checkpoint", "checkpoint.former"


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under a temporary name, then put it in place of the old one: a kill leaves one of the two."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_beside(folder) as partial:
            partial.mkdir()
            write(partial)
            former = folder.with_name(_FORMER)
            if folder.exists():
                shutil.rmtree(former, ignore_errors=True)
                os.replace(folder, former)
            os.replace(partial, folder)
            shutil.rmtree(former, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise FailureError(f"cannot write {folder} ({error}); what was saved before is intact") from None


def save_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Save weights, optimiser state and progress."""

    def write(partial: Path) -> None:
        tensors = {f"weights.{key}": value for key, value in module.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        # Tied weights share storage, which safetensors refuses: each gets memory of its own.
        save_file(
            {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}, partial / "state.safetensors"
        )
        (partial / "progress.json").write_text(json.dumps(progress))

    replace_folder(folder / _CURRENT, write)


def load_checkpoint(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore the last state and return its progress; None where there is none."""
    place = next((folder / name for name in (_CURRENT, _FORMER) if (folder / name / "progress.json").exists()), None)
    if place is None:
        return None
    try:
        tensors = load_file(place / "state.safetensors")
        progress: dict[str, Any] = json.loads((place / "progress.json").read_text())
        int(progress["step"])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise FailureError(f"cannot read the checkpoint {place} ({error}); remove it to train from the start") from None
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    try:
        module.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(
            f"the checkpoint in {folder} is of another size of draft; use the same sizes, or another --out"
        ) from None
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            states.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress
