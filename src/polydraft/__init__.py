"""polydraft: many drafts, one target, exact output.

Public names are imported on first use, so that `polydraft --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.beam import BeamDecoder, BeamGeneration
    from polydraft.engine import Decoder, Generation, StopReason, TokenEvent
    from polydraft.errors import FailureError, PolydraftError, UsageError
    from polydraft.hf_generate import Speculate
    from polydraft.loading import load
    from polydraft.options import LoadOptions
    from polydraft.sampling import Grammar, SamplingParams

__version__ = "0.3.0"

_ROOMS = {
    "beam": ("BeamDecoder", "BeamGeneration"),
    "engine": ("Decoder", "Generation", "StopReason", "TokenEvent"),
    "errors": ("FailureError", "PolydraftError", "UsageError"),
    "hf_generate": ("Speculate",),
    "loading": ("load",),
    "options": ("LoadOptions",),
    "sampling": ("Grammar", "SamplingParams"),
}

__all__ = [
    "BeamDecoder",
    "BeamGeneration",
    "Decoder",
    "FailureError",
    "Generation",
    "Grammar",
    "LoadOptions",
    "PolydraftError",
    "SamplingParams",
    "Speculate",
    "StopReason",
    "TokenEvent",
    "UsageError",
    "load",
]


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"polydraft.{room}"), name)
    raise AttributeError(f"module 'polydraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
