"""Which run the memories of a workspace belong to, and which thread is at work on them."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from polydraft.errors import UsageError


class Owner(Protocol):
    """A run, as far as its workspace is concerned."""

    @property
    def done(self) -> bool:
        """Whether it needs the workspace no more."""


class Ownership:
    """One run at a time, one thread at a time.

    A later run may take the memories over between two rounds of an earlier one, never during a round. The earlier run is
    refused from then on: what it wrote is gone (docs/decisions/021-threads-wait-for-the-kept-memory.md).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: Callable[[], Owner | None] = lambda: None

    @contextmanager
    def taken_by(self, owner: Owner) -> Iterator[None]:
        """Let `owner` have the memories, once the round under way is over, and work on them."""
        with self._lock:
            self._owner = weakref.ref(owner)
            yield

    @contextmanager
    def held_by(self, owner: Owner) -> Iterator[None]:
        """Let `owner` work on the memories, if they are still its own."""
        with self._lock:
            if self._owner() is not owner:
                raise UsageError(
                    "a later call with keep=True has taken over the memory of this stream; finish one stream before the next, "
                    "or leave keep out"
                )
            yield

    @contextmanager
    def settled_by(self, owner: Owner) -> Iterator[bool]:
        """Keep others out while `owner` ends; gives whether the memories are still its own."""
        with self._lock:
            yield self._owner() is owner

    @property
    def idle(self) -> bool:
        """Whether no run needs the memories."""
        owner = self._owner()
        return owner is None or owner.done
