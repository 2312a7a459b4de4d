"""Models larger than one device: layers on several of them, or every layer in slices (tensor parallelism)."""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.cache import SlotCache

TENSOR_PARALLEL = "tp"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", TENSOR_PARALLEL)


def check_device_map(device_map: str | None, device: str) -> None:
    """Refuse, before anything is loaded, what cannot be laid out."""
    if device_map is None:
        return
    if device_map not in DEVICE_MAPS:
        raise UsageError(f"unknown device map {device_map!r}; allowed: {', '.join(DEVICE_MAPS)}")
    if device != "auto":
        raise UsageError(f"--device-map {device_map} chooses the devices itself; leave out --device {device}")
    if device_map == TENSOR_PARALLEL:
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise UsageError(
                "--device-map tp needs several processes; start with: torchrun --nproc-per-node N -m polydraft ..."
            )
    elif importlib.util.find_spec("accelerate") is None:
        raise UsageError(f"--device-map {device_map} needs the package accelerate; get it with: pip install accelerate")


def layout_options(device_map: str) -> dict[str, Any]:
    """Return what `from_pretrained` takes for a device map."""
    if device_map != TENSOR_PARALLEL:
        return {"device_map": device_map}
    from transformers import distributed

    options = getattr(distributed, "DistributedConfig", None)
    try:
        return {"distributed_config": options(tp_plan="auto")} if options is not None else {"tp_plan": "auto"}
    except TypeError:  # an older release, whose configuration knows of experts only
        return {"tp_plan": "auto"}


def home_device(model: Any) -> torch.device:
    """Return where a model takes its tokens: the device of its embeddings."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":  # offloaded: accelerate fetches the weights to where it computes
        device = torch.device(getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None) or "cpu")
    return device


def spread_obstacle(model: Any) -> str | None:
    """Return why a model is not all in one place, and its passes cannot be recorded or rearranged; None if it is."""
    devices = {parameter.device for parameter in model.parameters()}
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(type(part).__name__ == "DTensor" for part in model.parameters()):
        return "the model is split over several processes"
    if torch.device("meta") in devices:
        return "parts of the model are offloaded"
    if len(devices) > 1:
        return f"the model is spread over several devices ({', '.join(sorted(map(str, devices)))})"
    return None


class SpreadCache(SlotCache):
    """Keys and values that stay with their layers, wherever these are: one cache a layer."""

    def __init__(self, num_layers: int, capacity: int, owner: str = "this model") -> None:
        super().__init__(num_layers, capacity, owner)
        self._parts = [SlotCache(1, capacity, owner) for _ in range(num_layers)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return all that are in use."""
        part = self._parts[layer_idx]
        part.aim(self._slots_BT.to(key_states.device), self._first_slot, self._used)
        return part.update(key_states, value_states, 0)

    def take(self, other: SlotCache, rows: Tensor, source_BD: Tensor, own_rows: Tensor, target_BD: Tensor) -> None:
        """Copy slots from the rows of another such cache."""
        assert isinstance(other, SpreadCache)
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            if mine.keys_LBHSC is not None:
                mine.take(theirs, *(index.to(mine.keys_LBHSC.device) for index in (rows, source_BD, own_rows, target_BD)))

    def fill(self, other: SlotCache, copies: int, used: int) -> None:
        """Take over the first slots of another such cache, each of its rows `copies` times."""
        assert isinstance(other, SpreadCache)
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine.fill(theirs, copies, used)

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        self.capacity = capacity
        for part in self._parts:
            part.grow(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held, on all devices."""
        return sum(part.nbytes for part in self._parts)
