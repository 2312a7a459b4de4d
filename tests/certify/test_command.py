import json
import subprocess
import sys
from dataclasses import replace

import pytest

from polydraft.certify import find_subject
from polydraft.certify.mutants import STRUCTURAL

from .conftest import TINY


@pytest.mark.slow
def test_the_certificate_says_what_was_tried_and_what_could_escape(invoke, monkeypatch) -> None:
    # Fewer samples of the fixture would let wrong rules through, and the kit would say so.
    monkeypatch.setattr("polydraft.certify.QUICK", replace(TINY, node_samples=12_000))
    monkeypatch.setattr("polydraft.certify._kit.STRUCTURAL", STRUCTURAL[:2])
    monkeypatch.setattr("polydraft.certify._kit.SUBTLE", [])
    monkeypatch.setattr("polydraft.certify._kit.CORRECT", [])
    code, out, err = invoke("certify", "rrs-wor", "--quick")
    assert code == 0 and "error" not in err
    for check in ("enumeration", "draws", "fixture", "joint", "support", "texts", "greedy", "power"):
        assert f"passed  {check:<11}  " in out
    for words in (
        "pairs of distributions",
        "(limit 1e-09)",
        "False alarms: ",
        "Bonferroni",
        "Power: fixture detects",
        "wrong rules refused",
    ):
        assert words in out
    assert out.splitlines()[-1].startswith("CERTIFIED: ")


def test_json_is_one_object_and_nothing_else(invoke, tiny_sizes) -> None:
    code, out, _ = invoke("certify", "naive", "--quick", "--no-power", "--json")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert result["certified"] is True and result["subject"] == "naive" and result["false_alarm"] == 1e-4
    wanted = {"name", "subject", "passed", "size", "unit", "measure", "worst", "threshold", "tests", "false_alarm", "detects"}
    for check in result["checks"]:
        assert wanted <= set(check) and check["passed"] and check["size"] > 0 and check["counter_example"] is None
    fixture = next(check for check in result["checks"] if check["name"] == "fixture")
    assert 0 < fixture["detects"] < 0.2 and fixture["worst"] > fixture["threshold"]


def test_several_names_and_all_make_one_certificate(invoke, tiny_sizes, monkeypatch) -> None:
    monkeypatch.setattr("polydraft.certify.all_subjects", lambda: [find_subject("naive"), find_subject("top")])
    for arguments in (["--all"], ["naive", "top", "naive"]):
        code, out, _ = invoke("certify", *arguments, "--quick", "--no-power", "--json")
        result = json.loads(out)
        assert code == 0 and result["subject"] == ["naive", "top"]
        assert [check["subject"] for check in result["checks"]] == ["naive"] * 7 + ["top"] * 7


def test_same_seeds_same_certificate(invoke, tiny_sizes) -> None:
    results = [json.loads(invoke("certify", "speculative", "--quick", "--no-power", "--json")[1]) for _ in range(2)]
    for result in results:
        for check in result["checks"]:
            del check["seconds"]
    assert results[0] == results[1]


def test_help_comes_without_loading_torch() -> None:
    script = (
        "import sys; from polydraft.cli.main import run\n"
        "for words in (['certify'], ['certify', 'decoder'], ['certify', 'endpoint']):\n"
        "    assert run([*words, '--help']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "NAME..." in result.stdout and "--tree" in result.stdout and "--url" in result.stdout
