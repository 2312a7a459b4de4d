"""Which of torch's attention kernels passes with a mask may use."""

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch


class _WithoutPlans(AbstractContextManager[None]):
    """cuDNN's attention is off while any thread is inside; torch keeps one switch for all of them."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_WITHOUT_PLANS = _WithoutPlans()


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """Leave cuDNN's attention out, for a while: it takes 0.1 to 1.3 s to plan for every length that it has not met before.

    Once it has planned, it reads a prompt within 10 % of what the others take (docs/log/), and prompts come in all lengths.
    """
    return _WITHOUT_PLANS if device.type == "cuda" else nullcontext()
