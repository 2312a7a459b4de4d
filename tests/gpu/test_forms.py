"""Every Triton form of every operation against its reference, on a GPU, slow cases included."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from backends.harness import CASES, Case, forms, name_of
from polydraft.operations import OPERATIONS, Form

for _module in sorted((Path(__file__).parents[1] / "backends").glob("*_cases.py")):
    importlib.import_module(f"backends.{_module.stem}")

pytestmark = pytest.mark.gpu
COMPARED = [
    pytest.param(name, form, case, id=f"{name_of(name, form)}-{case.name}")
    for name, form in forms()
    if form.backend == "triton"
    for case in CASES.get(name, [])
    if form.backend in case.backends
]


@pytest.mark.parametrize(("name", "form", "case"), COMPARED)
def test_it_gives_what_the_reference_gives(name: str, form: Form[..., Any], case: Case) -> None:
    if not case.check(OPERATIONS[name], form, "cuda"):
        pytest.skip("this form leaves the case to others")
