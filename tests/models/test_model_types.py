"""Every causal type of the installed `transformers`: right or refused in one line, and docs/models.md says which."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "benchmarks" / "model_types.py", ROOT / "docs" / "models.md"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no benchmarks")


def load_script():
    spec = importlib.util.spec_from_file_location("model_types", SCRIPT)
    sys.modules["model_types"] = script = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(script)
    return script


SCRIPTED = load_script() if SCRIPT.exists() else None
TYPES = SCRIPTED.causal_types() if SCRIPTED else []


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text()


def said(page, model_type):
    return re.search(rf"^\| `{re.escape(model_type)}` \| ([^|]*) \|", page, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_does_what_the_page_says(model_type, page):
    verdict = SCRIPTED.try_type(model_type)
    assert verdict.result not in (SCRIPTED.WRONG, SCRIPTED.CRASH), verdict
    assert "\n" not in verdict.note
    if f"transformers {transformers.__version__}" in page and (row := said(page, model_type)) is not None:
        assert row[1] == verdict.result, verdict


def test_the_page_knows_no_wrong_type_and_none_that_crashes(page):
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", page, re.MULTILINE)
    assert {result for _, result in rows} <= {"works", "refused", "not built"}
    works = sum(result == "works" for name, result in rows if name in TYPES)
    built = sum(result != "not built" for name, result in rows if name in TYPES)
    assert works >= 0.9 * built
