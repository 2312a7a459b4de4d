"""Triton's interpreter, in which GPU kernels run on a CPU: turned on before anybody imports Triton, where there is no GPU."""

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch


def turn_on() -> bool:
    """Let kernels be interpreted in this process; return whether they are: not where there is a GPU, or no Triton."""
    if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        return False
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.runtime import interpreter

    if getattr(interpreter, "mended", False):
        return os.environ.get("TRITON_INTERPRET") == "1"
    found: set[str] = set()
    patch_tensor, scan = interpreter._patch_lang_tensor, interpreter.ScanOps.generic_scan

    def mended_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 keeps numbers as arrays of one entry, which numpy 2.4 no longer takes for numbers.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        # At each call within a kernel Triton looks for all functions of the language again, for milliseconds. Those that its
        # own modules see stay as it found them the first time; ours see what their kernel has found.
        module = function.fn.__module__
        if module.startswith("triton") and module not in found:
            interpreter._patch_lang(function.fn)
            found.add(module)
        return function.rewrite()(*args, **kwargs)

    def quick_scan(scans: Any, inputs: Any) -> Any:
        if scans.combine_fn.fn.__name__ != "_larger":
            return scan(scans, inputs)
        return [scans.to_tensor(np.maximum.accumulate(inputs[0].handle.data, axis=scans.axis), inputs[0].dtype)]

    launch = interpreter.GridExecutor.__call__

    def quiet_launch(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # as on a GPU: lanes that nobody reads may overflow or divide by zero
            return launch(*args, **kwargs)

    interpreter.GridExecutor.__call__ = quiet_launch
    interpreter._patch_lang_tensor = mended_tensor
    interpreter.InterpretedFunction.__call__ = called
    interpreter.ScanOps.generic_scan = quick_scan
    interpreter.mended = True
    return os.environ.get("TRITON_INTERPRET") == "1"
