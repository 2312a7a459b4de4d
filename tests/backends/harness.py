"""Cases on which the forms of operations are compared with their references.

Every registered operation needs cases, and every form of it needs at least one that it supports: `test_forms` fails
otherwise. To add some, put a module called ``<room>_cases.py`` beside this one (all of these are imported) with a function per
operation:

>>> @cases("plant_columns")
... def _() -> Iterator[Case]:
...     yield Case("one row", lambda device: (torch.zeros(1, 2, device=device).long(), ...))
...     yield Case("many rows", lambda device: ..., slow=True)

`Case.arguments` makes the arguments anew for each run, on the device that it is given, so operations may write into them:
what the operation returns and the tensors among its arguments are compared, whole numbers exactly and others within
`tolerance`. Triton's forms run in the interpreter, slowly: keep what is not marked slow small.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polydraft import operations
from polydraft.backends.native import kernels
from polydraft.backends.triton import interpreting
from polydraft.devices import values_hidden
from polydraft.operations import Form, Operation

CASES: dict[str, list["Case"]] = {}
"""By operation."""
WITHOUT_RESULT = {"compiling_ahead"}
"""Operations that only save time later; tests/engine/test_compiling.py tests them."""


def equal(found: Any, expected: Any, tolerance: float) -> None:
    """Check that two results are the same; not a number equals itself."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.device == expected.device
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif dataclasses.is_dataclass(expected):
        equal(tuple(vars(found).values()), tuple(vars(expected).values()), tolerance)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            equal(one, other, tolerance)
    else:
        assert found is expected or found == expected


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of an operation."""

    name: str
    arguments: Callable[[str], tuple[Any, ...]]
    """From a device."""
    slow: bool = False
    tolerance: float = 0.0
    """Relative and absolute, of numbers that are not whole."""
    compare: Callable[[Any, Any, float], None] = equal
    """Of what a form and the reference return, where some of it need not be the same."""
    for_reference: Callable[..., tuple[Any, ...]] | None = None
    """Turns the arguments into those that the reference takes, e.g. in the precision that a form computes in."""
    backends: tuple[str, ...] = operations.BACKENDS
    """Whose forms are compared."""

    def check(self, operation: Operation[..., Any], form: Form[..., Any], device: str = "cpu") -> bool:
        """Compare a form with its reference; return whether the form supports these arguments."""
        with setting(form.backend, device):
            given = self.arguments(device)
            if not form.supports(*given):
                return False
            found = form.run(*given)
            taken = self.arguments(device)
            with operations.using():
                taken = taken if self.for_reference is None else self.for_reference(*taken)
                expected = operation.reference(*taken)
        self.compare(found, expected, self.tolerance)
        if self.for_reference is None:
            written = [[one for one in arguments if isinstance(one, Tensor)] for arguments in (given, taken)]
            equal(*written, self.tolerance)
        return True


def setting(backend: str, device: str = "cpu") -> AbstractContextManager[object]:
    """Return where the forms of a backend run: Triton's in its interpreter, unless there is a GPU, and without a look."""
    stack = ExitStack()
    if backend == "triton":
        stack.enter_context(values_hidden())
        if device == "cpu":
            stack.enter_context(interpreting())
    else:
        kernels()  # compiled on first use
    return stack


def cases(operation_name: str) -> Callable[[Callable[[], Iterator[Case]]], Callable[[], Iterator[Case]]]:
    """Decorate a function that yields cases of an operation."""

    def register(function: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
        CASES.setdefault(operation_name, []).extend(function())
        return function

    return register


def forms() -> list[tuple[str, Form[..., Any]]]:
    """Return all registered forms with the names of their operations."""
    found = operations.all_operations()
    return [(name, form) for name, one in found.items() if name not in WITHOUT_RESULT for form in one.forms]


def name_of(name: str, form: Form[..., Any]) -> str:
    """Return what to call a form of an operation."""
    return f"{name}-{form.backend}-{form.run.__name__}"
