"""Where a model runs and in which number format."""

from pathlib import Path

import torch

from polydraft.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Turn a device name into a device that exists; ``"auto"`` prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(f"device {name!r} is not there: torch sees {count} GPUs; use --device cpu or auto")
    elif device.type != "cpu":
        raise UsageError(f"device {name!r} is not supported; allowed: auto, cpu, cuda, cuda:0, ...")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype name into a dtype; ``"auto"`` is bfloat16 where the hardware computes in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_computes_bfloat16() else torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions; emulated, bfloat16 is many times slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)
