"""The GPU kernels compile for GPUs that are not there, down to machine code; what they compute is tested elsewhere."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polydraft

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed; pip install triton"),
]
SOURCES = Path(polydraft.__file__).parent
TESTS = Path(__file__).parents[1]
KIB = 2**10
SHARED = {80: 99 * KIB, 90: 227 * KIB}
"""Bytes that a program may have: on GPUs of 8.6 and 8.9, which run what is compiled for 8.0, less than on one of 8.0."""


def launched(what: str, capability: int, dtype: str, cache: Path) -> list[dict[str, Any]]:
    """Compile in a process where nobody has turned the interpreter on, and with nothing compiled before."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "models.kernel_launches", what, str(capability), dtype],
        cwd=TESTS,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """Return the names of all kernels in the package, without parts of others: what these call, and what has an underscore."""
    compiled: list[ast.FunctionDef] = []
    for path in SOURCES.rglob("*.py"):
        if "triton.jit" in (text := path.read_text()):
            functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            compiled += [each for each in functions if any("triton.jit" in ast.unparse(one) for one in each.decorator_list)]
    calls = [node.func for function in compiled for node in ast.walk(function) if isinstance(node, ast.Call)]
    parts = {ast.unparse(called).rpartition(".")[2] for called in calls if not ast.unparse(called).startswith("tl.")}
    return {each.name for each in compiled if each.name not in parts and not each.name.startswith("_")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_and_fits(capability, dtype, tmp_path):
    launches = launched("shapes", capability, dtype, tmp_path)
    assert {launch["kernel"] for launch in launches} == kernels()
    for launch in launches:
        assert launch["bytes"] > 0 and f"sm_{capability}" in launch["target"], launch
        assert launch["shared"] <= SHARED[capability], launch


def test_trees_of_all_sizes_share_what_is_compiled(tmp_path):
    launches = launched("trees", 90, "bfloat16", tmp_path)
    variants = {(launch["kernel"], launch["specialisation"]) for launch in launches}
    assert sorted(kernel for kernel, _ in variants) == ["attend", "join", "rotate_store"]
