"""Replacing the `forward` of modules while one of our passes runs."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

from polydraft.errors import UsageError

Replacement = tuple[nn.Module, Callable[..., Any]]
P = TypeVar("P")


class ReplacedForwards:
    """Modules whose `forward` is replaced while any thread is inside a pass: threads may share a model."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._taken: dict[int, Replacement] = {}

    def enter(self, replacements: Sequence[Replacement]) -> None:
        """Replace the forwards of modules, unless another thread has done so."""
        with self._lock:
            self._inside += 1
            for module, forward in replacements:
                if "forward" not in module.__dict__:
                    module.__dict__["forward"] = forward
                    self._taken[id(module)] = (module, forward)

    def leave(self) -> None:
        """Restore the forwards of all modules once no thread is inside."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for module, forward in self._taken.values():
                    if module.__dict__.get("forward") is forward:
                        del module.__dict__["forward"]
                self._taken.clear()


class PassForwards(ReplacedForwards, Generic[P]):
    """Replaced forwards that can look up the pass of the thread that calls them.

    Parameters
    ----------
    kind : str
        The kind of module, for messages.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._here = kind, threading.local()

    @property
    def current(self) -> P | None:
        """The pass of this thread; None outside of one, where modules must run as usual."""
        return getattr(self._here, "current", None)

    @contextmanager
    def running(self, replacements: Sequence[Replacement], current: P) -> Iterator[None]:
        """Replace forwards while this thread runs a pass; refuse modules whose forward the owner has replaced."""
        self.enter(replacements)
        try:
            if not all(isinstance(module.__dict__.get("forward"), type(forward)) for module, forward in replacements):
                raise UsageError(f"the forward method of {self._kind} was replaced; load the model without such hooks")
            self._here.current = current
            yield
        finally:
            self._here.current = None
            self.leave()
