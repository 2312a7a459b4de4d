"""Registries of things that users choose by name, and that tests loop over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from polydraft.errors import unknown_name

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Items by name. Registered items are offered, listed and tested."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, Item] = {}

    def register(self, name: str) -> Callable[[Item], Item]:
        """Return a decorator that adds its argument under `name`."""

        def add(item: Item) -> Item:
            assert name not in self._items, f"{self.kind} {name!r} is registered twice"
            self._items[name] = item
            return item

        return add

    @contextmanager
    def holding(self, name: str, item: Item) -> Iterator[None]:
        """Register an item under `name` for a block of code only, in place of one that may be there."""
        before = {name: self._items[name]} if name in self._items else {}
        self._items[name] = item
        try:
            yield
        finally:
            del self._items[name]
            self._items.update(before)

    def get(self, name: str) -> Item:
        """Return the item called `name`, or raise a `UsageError` that lists the allowed names."""
        if name not in self._items:
            raise unknown_name(self.kind, name, self._items)
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items
