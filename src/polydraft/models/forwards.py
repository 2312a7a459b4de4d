"""Forwards that take the place of a module's own while one of our passes runs."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

Replacement = tuple[nn.Module, Callable[..., Any]]


class ReplacedForwards:
    """Modules whose `forward` is replaced while any thread is inside a pass: threads may share a model."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._taken: dict[int, Replacement] = {}

    def enter(self, replacements: Sequence[Replacement]) -> None:
        """Replace the forwards of modules, except those that are replaced already."""
        with self._lock:
            self._inside += 1
            for module, forward in replacements:
                if "forward" not in module.__dict__:  # replaced already
                    module.__dict__["forward"] = forward
                    self._taken[id(module)] = (module, forward)

    def leave(self) -> None:
        """Give all modules their own forwards back, once no thread is inside."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for module, forward in self._taken.values():
                    if module.__dict__.get("forward") is forward:
                        del module.__dict__["forward"]
                self._taken.clear()
