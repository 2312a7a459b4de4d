"""Triton's interpreter, in which GPU kernels run on a CPU: turned on before anybody imports Triton, where there is no GPU."""

import importlib.util
import os
import sys

import torch


def turn_on() -> None:
    """Let kernels be interpreted in this process; does nothing where there is a GPU, or no Triton."""
    if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        return
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def mended(tensor, scope):  # type: ignore[no-untyped-def]
        original(tensor, scope)
        # Triton 3.6 keeps numbers as arrays of one entry, which numpy 2.4 no longer takes for numbers.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended
