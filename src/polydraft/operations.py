"""Operations: each is written once, in plain torch, and run by the first faster form that supports the case at hand.

The reference is a function that reads like the paper, decorated with `operation`. Backends (`polydraft.backends.triton`, GPU
kernels; `polydraft.backends.native`, C on a CPU) register faster forms of it with `implements`, each with one `supports` that
takes the same arguments and says whether the form can run them. A call of the operation asks the forms in the order of
`BACKENDS`, within a backend in that of its `forms.py`, and falls back on the reference. This module is the only place that
chooses, and finds the backends by name: a reference never imports its faster forms.

``POLYDRAFT_BACKENDS=reference`` in the environment runs everything on the references, ``POLYDRAFT_BACKENDS=native`` only the C
forms, and so on; `using` does the same for a block of code. Every registered form is tested against its reference by being
registered (tests/backends).
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from polydraft.errors import unknown_name

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS = ("triton", "native")
"""Names of packages in `polydraft.backends`, the first choice first."""
REFERENCE = "reference"
_VARIABLE = "POLYDRAFT_BACKENDS"


@dataclass(frozen=True, eq=False)
class Form(Generic[P, R]):
    """A faster form of an operation."""

    backend: str
    supports: Callable[P, bool]
    """Whether this form can run the operation on these arguments; it looks at shapes, devices and dtypes, never at values."""
    run: Callable[P, R]


@dataclass(eq=False)
class Operation(Generic[P, R]):
    """A function with a reference in plain torch and any number of faster forms."""

    reference: Callable[P, R]
    forms: list[Form[P, R]] = field(default_factory=list)

    def __post_init__(self) -> None:
        update_wrapper(self, self.reference)

    @property
    def name(self) -> str:
        """How tests and messages call it."""
        return self.reference.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first form that supports these arguments, else the reference."""
        form = self.chosen(*args, **kwargs)
        return self.reference(*args, **kwargs) if form is None else form.run(*args, **kwargs)

    def chosen(self, *args: P.args, **kwargs: P.kwargs) -> Form[P, R] | None:
        """Return the form that a call with these arguments runs; None for the reference."""
        _load_backends()
        for form in self.forms:
            if form.backend in _enabled and form.supports(*args, **kwargs):
                return form
        return None


OPERATIONS: dict[str, Operation[..., Any]] = {}
"""All operations by name."""


def all_operations() -> dict[str, Operation[..., Any]]:
    """Return all operations, with the forms of all backends."""
    _load_backends()
    return OPERATIONS


def operation(reference: Callable[P, R]) -> Operation[P, R]:
    """Decorate a reference in plain torch, for which backends may register faster forms."""
    made = Operation(reference)
    assert made.name not in OPERATIONS, f"two operations are called {made.name}"
    OPERATIONS[made.name] = made
    return made


def implements(
    operation: Operation[P, R], backend: str, *, supports: Callable[P, bool]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a faster form of an operation, which gives the same results wherever it `supports` the arguments."""
    assert backend in BACKENDS, backend

    def register(run: Callable[P, R]) -> Callable[P, R]:
        operation.forms.append(Form(backend, supports, run))
        operation.forms.sort(key=lambda form: BACKENDS.index(form.backend))
        return run

    return register


def _named(value: str) -> frozenset[str]:
    """Return the backends that a list such as ``triton,native`` allows; ``reference`` stands for none."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in (*BACKENDS, REFERENCE):
            raise unknown_name(f"backend in {_VARIABLE}", name, [*BACKENDS, REFERENCE])
    return frozenset(names) - {REFERENCE}


_enabled = _named(os.environ.get(_VARIABLE, ",".join(BACKENDS)))


def enabled(backend: str) -> bool:
    """Whether forms of a backend may be chosen."""
    return backend in _enabled


def native_code() -> str:
    """Say which compiled code runs models on this CPU, or why there is none; compiles it if that has not been done."""
    if not enabled("native"):
        return "none: the backend is switched off"
    return str(importlib.import_module("polydraft.backends.native").describe())


@contextmanager
def using(*backends: str) -> Iterator[None]:
    """Let only forms of these backends be chosen in a block of code; none but references without any.

    It holds for the whole process, and for what is chosen inside the block: a decoder keeps what was chosen when it was made.
    """
    global _enabled
    before = _enabled
    _enabled = _named(",".join(backends))
    try:
        yield
    finally:
        _enabled = before


@cache
def _load_backends() -> None:
    """Import the backends, once, so that they register their forms. They import what they speed up, never the reverse."""
    for name in BACKENDS:
        importlib.import_module(f"polydraft.backends.{name}.forms")
