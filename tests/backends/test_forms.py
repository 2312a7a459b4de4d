"""Every form of every operation gives what its reference gives; see `harness` for how to add cases."""

import importlib
from pathlib import Path
from typing import Any

import pytest

import interpreted
from polydraft.backends.native import kernels
from polydraft.operations import OPERATIONS, Form

from .harness import CASES, Case, forms, name_of, setting

INTERPRETED = interpreted.turn_on()
for module in sorted(Path(__file__).parent.glob("*_cases.py")):
    importlib.import_module(f"{__package__}.{module.stem}")

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")


def here(backend: str) -> None:
    """Skip what cannot run on this machine."""
    if backend == "triton" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter: pip install triton, and no GPU")
    if backend == "native" and kernels() is None:
        pytest.skip("no C compiler here")


FORMS = forms()
COMPARED = [
    pytest.param(name, form, case, id=f"{name_of(name, form)}-{case.name}", marks=pytest.mark.slow if case.slow else ())
    for name, form in FORMS
    for case in CASES.get(name, [])
    if form.backend in case.backends
]


@pytest.mark.parametrize(("name", "form", "case"), COMPARED)
def test_it_gives_what_the_reference_gives(name: str, form: Form[..., Any], case: Case) -> None:
    here(form.backend)
    if not case.check(OPERATIONS[name], form):
        pytest.skip("this form leaves the case to others")


@pytest.mark.parametrize("name", sorted({name for name, _ in FORMS}))
def test_every_operation_has_cases(name: str) -> None:
    assert CASES.get(name), f"add cases of {name}, see tests/backends/harness.py"


@pytest.mark.parametrize(("name", "form"), [pytest.param(*one, id=name_of(*one)) for one in FORMS])
def test_every_form_supports_a_case_that_runs_by_default(name: str, form: Form[..., Any]) -> None:
    here(form.backend)
    quick = [case for case in CASES[name] if not case.slow and form.backend in case.backends]
    with setting(form.backend):
        supported = any(form.supports(*case.arguments("cpu")) for case in quick)
    assert supported, f"add a case of {name} that {form.run.__name__} supports to tests/backends/*_cases.py"


def test_cases_are_of_operations_that_exist() -> None:
    assert CASES.keys() <= OPERATIONS.keys()


def test_a_wrong_form_is_caught() -> None:
    operation, wrong = OPERATIONS["draw_independent"], OPERATIONS["draw_independent"].forms[0]
    here(wrong.backend)
    broken = type(wrong)(wrong.backend, wrong.supports, lambda *inputs: wrong.run(*inputs) + 1)
    with pytest.raises(AssertionError):
        CASES["draw_independent"][0].check(operation, broken)
