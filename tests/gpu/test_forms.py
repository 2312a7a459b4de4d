"""Every Triton form of every operation against its reference, on a GPU, slow cases included."""

import importlib
from pathlib import Path

import pytest

from backends.harness import CASES, Case, form_of, forms
from polydraft.operations import OPERATIONS

for _module in sorted((Path(__file__).parents[1] / "backends").glob("*_cases.py")):
    importlib.import_module(f"backends.{_module.stem}")

pytestmark = pytest.mark.gpu
COMPARED = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name, backend in forms()
    if backend == "triton"
    for case in CASES.get(name, [])
    if backend in case.backends
]


@pytest.mark.parametrize(("name", "case"), COMPARED)
def test_it_gives_what_the_reference_gives(name: str, case: Case) -> None:
    operation = OPERATIONS[name]
    if not case.check(operation, form_of(operation, "triton"), "cuda"):
        pytest.skip("the Triton form leaves this to others")
