"""Options as a list, for commands that have many or share them."""

from collections.abc import Callable, Sequence
from typing import Any

Decorator = Callable[[Any], Any]


def with_options(options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, in the order of the list."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
