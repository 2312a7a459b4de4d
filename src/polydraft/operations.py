"""Operations: each is written once, in plain torch, and run by the first faster form that supports its arguments.

The *reference* is a function that reads like the paper, decorated with `operation`. Backends (`polydraft.backends.triton`, GPU
kernels; `polydraft.backends.native`, C on a CPU) register faster *forms* with `implements`, each with a function `supports`,
which takes the same arguments and tells whether the form can run them. A call asks the forms in the order of `BACKENDS`, and
within a backend in the order of its `forms.py`; if none supports the arguments, the reference runs. Only this module chooses.
It finds the backends by name, so a reference never imports its faster forms.

With ``POLYDRAFT_BACKENDS=reference`` in the environment, everything runs on references, with ``POLYDRAFT_BACKENDS=native`` only
C forms are used, and so on; `using` does the same for a block of code. Tests compare every registered form with its reference
(tests/backends).
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
"""Names of packages in `polydraft.backends`, in the order of preference."""
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
        """The reference's name, for tests and messages."""
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
    """Decorate a reference in plain torch, so that backends can register faster forms of it."""
    made = Operation(reference)
    assert made.name not in OPERATIONS, f"two operations are called {made.name}"
    OPERATIONS[made.name] = made
    return made


def implements(
    operation: Operation[P, R], backend: str, *, supports: Callable[P, bool]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a faster form of an operation. It must give the same results for all arguments that it `supports`.

    Of several forms that support the arguments, the one that was registered first in the first backend runs.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)

    def register(run: Callable[P, R]) -> Callable[P, R]:
        operation.forms.append(Form(backend, supports, run))
        operation.forms.sort(key=lambda form: BACKENDS.index(form.backend))
        return run

    return register


def _named(value: str) -> frozenset[str]:
    """Return the backends in a list such as ``triton,native``; ``reference`` stands for none."""
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
    """Return which compiled code runs models on this CPU, or why there is none. It is compiled if necessary."""
    if not enabled("native"):
        return "none: the backend is switched off"
    return str(importlib.import_module("polydraft.backends.native").describe())


@contextmanager
def using(*backends: str) -> Iterator[None]:
    """Allow only forms of these backends in a block of code; without any, only references.

    This affects the whole process, and only what is chosen inside the block: a decoder keeps the choices of when it was made.
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
    """Import the backends, once, so that they register their forms. Operations never import them."""
    for name in BACKENDS:
        importlib.import_module(f"polydraft.backends.{name}.forms")
