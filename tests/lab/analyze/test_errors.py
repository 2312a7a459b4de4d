"""Wrong usage is one line, before anything is loaded."""

from pathlib import Path

import pytest

USAGE = {
    "unknown scheme": (["--schemes", "rrs-war"], "unknown scheme 'rrs-war'; did you mean 'rrs-wr'"),
    "no drafts": (["--drafts", "0"], "--drafts 0 is out of range; allowed: whole numbers from 1 to 64"),
    "too many drafts": (["--drafts", "2,65"], "--drafts 65 is out of range"),
    "half a draft": (["--drafts", "2.5"], "--drafts '2.5' is not a list of whole numbers"),
    "drafts without numbers": (["--drafts", ","], "--drafts ',' is not a list"),
    "temperature zero": (["--temperature", "0"], "--temperature 0 leaves nothing to compare"),
    "temperature below zero": (["--temperature", "-1"], "--temperature -1 is out of range"),
    "temperature not finite": (["--temperature", "inf"], "--temperature inf is out of range"),
    "temperature in words": (["--temperature", "warm"], "--temperature 'warm' is not a list of numbers"),
    "draft temperature zero": (["--draft-temperature", "0"], "--draft-temperature 0 is out of range"),
    "unreadable prompts": (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
    "no prompts": (["--limit", "0"], "prompt limit 0 is out of range"),
    "no positions": (["--positions", "0"], "--positions 0 is out of range"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens 0 is out of range"),
    "no batch": (["--batch-size", "0"], "--batch-size 0 is out of range"),
    "no threads": (["--threads", "0"], "--threads 0 is out of range"),
    "sweep without a folder": (["--sweep", "drafts"], "--sweep needs --out"),
    "unknown sweep": (["--sweep", "seeds"], "'seeds' is not one of"),
    "no draft": (["--draft", "none"], "has no draft to compare with"),
    "no usual draft": (["--draft", "auto"], "has no draft to compare with"),
    "unknown draft": (["--draft", "no/such-draft"], "cannot load model 'no/such-draft'"),
    "unknown target": (["--target", "no/such-model"], "cannot load model 'no/such-model'"),
    "unknown device": (["--device", "abacus"], "unknown device 'abacus'"),
    "unknown dtype": (["--dtype", "int3"], "unknown dtype 'int3'"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(analyze, case: str) -> None:
    options, expected = USAGE[case]
    code, out, err = analyze(*options)
    assert (code, out) == (2, "") and expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(analyze, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = analyze("--out", str(tmp_path / "file"))
    assert (code, out) == (2, "") and "cannot write to" in err and "choose another --out" in err and err.count("\n") == 1


def test_distributions_that_are_not_numbers_fail_with_exit_code_1(analyze, broken: str) -> None:
    code, out, err = analyze("--draft", broken)
    assert (code, out) == (1, "") and "are not numbers" in err


def test_help_comes_without_loading_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys; from polydraft.cli.main import run\n"
        "assert run(['analyze', '--help']) == 0 and 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--paper-bound" in result.stdout
