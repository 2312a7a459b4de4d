"""Where a model runs and in which number format: on one device, or spread over several by layers or slices of layers."""

import importlib.util
import os
from functools import cache
from typing import Any

import torch

from polydraft.devices import captures, cpu_facts, is_host
from polydraft.errors import UsageError
from polydraft.models.packed import PackedEmbedding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""By name; int8 means weights in int8 and everything else in float32, on CPUs only."""
TENSOR_PARALLEL = "tp"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", TENSOR_PARALLEL)


def resolve_device(name: str) -> torch.device:
    """Turn a name into a device that exists; ``"auto"`` prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, ...") from None
    if captures(device):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(f"device {name!r} is not available: torch sees {count} GPUs; use --device cpu or auto")
    elif not is_host(device):
        raise UsageError(f"device {name!r} is not supported; allowed: auto, cpu, cuda, cuda:0, ...")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a name into a dtype; ``"auto"`` is bfloat16 if the hardware has instructions for it, otherwise float32."""
    if name == "auto":
        return torch.bfloat16 if not is_host(device) or cpu_computes_bfloat16() else torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; allowed: auto, {', '.join(DTYPES)}")
    if name == "int8" and not is_host(device):
        raise UsageError(f"dtype int8 is for CPUs, not for {device}; use bfloat16, or --device cpu")
    return DTYPES[name]


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions; without them bfloat16 is many times slower than float32."""
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(" ".join(cpu_facts().values()).split())


def check_device_map(device_map: str | None, device: str) -> None:
    """Refuse a device map that cannot work, before anything is loaded."""
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


def is_follower() -> bool:
    """Whether this process only computes its slices of a shared model; another one does all input and output."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and int(os.environ.get("RANK", "0")) > 0


def is_shared() -> bool:
    """Whether several processes compute one model together."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def agreed(value: Any) -> Any:
    """Return the first process's value if several processes share a model, otherwise the value itself.

    Such processes must decide alike, so the first one decides whatever depends on times, files or requests.
    """
    if not is_shared():
        return value
    said = [value]
    torch.distributed.broadcast_object_list(said, src=0, group=_by_host())
    return said[0]


@cache
def _by_host() -> Any:
    """Return a group of all processes that exchanges messages by the CPU, whatever the backend for tensors is."""
    return torch.distributed.new_group(backend="gloo")


def layout_options(device_map: str) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a device map."""
    if device_map != TENSOR_PARALLEL:
        return {"device_map": device_map}
    from transformers import distributed

    options = getattr(distributed, "DistributedConfig", None)
    try:
        return {"distributed_config": options(tp_plan="auto")} if options is not None else {"tp_plan": "auto"}
    except TypeError:  # an older release, whose configuration is about experts only
        return {"tp_plan": "auto"}


def home_device(model: Any) -> torch.device:
    """Return the device of a model's embeddings, where it takes its tokens."""
    embeddings = model.get_input_embeddings()
    if isinstance(embeddings, PackedEmbedding):
        return embeddings.blocks_VX.device
    device: torch.device = embeddings.weight.device
    if embeddings.weight.is_meta:  # offloaded: accelerate fetches the weights to the device that computes
        device = torch.device(getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None) or "cpu")
    return device


def spread_obstacle(model: Any) -> str | None:
    """Return why a model is not in one place, so that its passes cannot be captured or replaced; None if it is."""
    devices = {parameter.device for parameter in model.parameters()}
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(type(part).__name__ == "DTensor" for part in model.parameters()):
        return "the model is split over several processes"
    if torch.device("meta") in devices:
        return "parts of the model are offloaded"
    if len(devices) > 1:
        return f"the model is spread over several devices ({', '.join(sorted(map(str, devices)))})"
    return None
