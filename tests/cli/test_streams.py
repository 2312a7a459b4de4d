"""Output that cannot be written, input that cannot be read, files torn by others: one line each, a code, and nothing lost."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from polydraft.cli.main import run
from polydraft.errors import FailureError
from polydraft.lab.bench._runner import Journal

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
SMALL = ("--draft", "none", "--max-new-tokens", "4")
TORN = {"torn": '{"target": "ti', "a list": "[1, 2]", "not UTF-8": b'{"\xff'}


def one_line(err: str, expected: str) -> None:
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1 and expected in err, err


@FULL
@pytest.mark.parametrize(
    "command",
    [("generate", "hello"), ("generate", "hello", "--json"), ("generate", "hello", "--beams", "2"), ("info",), ("--help",)],
    ids=" ".join,
)
def test_a_full_device_is_an_error(command: tuple[str, ...], tiny: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ("--target", tiny, *SMALL) if command[0] == "generate" else ()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run([*command, *model]) == 1
    lines = capsys.readouterr().err.splitlines(keepends=True)
    one_line(lines[-1], "No space left on device")
    assert len(lines) == 1 or command[0] == "generate"  # its figures may have been printed before


def test_a_harmless_warning_of_torch_is_not_shown(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without bfloat16 it comes with 15 lines of torch's stack."""
    monkeypatch.setattr("polydraft.cli.main._COMMANDS", {"warn": "Warn."})
    says = click.Command("warn", callback=lambda: warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", stacklevel=2))
    monkeypatch.setitem(sys.modules, "polydraft.cli.warn", SimpleNamespace(command=says))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(["warn"]) == 0
    assert capsys.readouterr().err == ""


@FULL
def test_nothing_is_said_when_the_interpreter_ends() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-m", "polydraft", "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    one_line(result.stderr, "No space left on device")


def test_a_closed_output_is_an_error() -> None:
    script = f"import os; os.close(1); os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'polydraft', '--help'])"
    result = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    one_line(result.stderr, "standard output is closed")


def test_a_closed_output_is_an_error_before_any_work(tiny: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("polydraft.cli.options.Choices.decoder", lambda choices: pytest.fail("a model was loaded"))
    assert run(["generate", "hello", "--target", tiny, "--json"]) == 1
    one_line(capsys.readouterr().err, "standard output is closed")


def test_output_that_its_encoding_lacks_is_an_error(tiny: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert run(["generate", "hello", "--target", tiny, "--draft", "none", "--max-new-tokens", "30"]) == 1
    one_line(capsys.readouterr().err, "cannot be written in ascii; set PYTHONIOENCODING=utf-8")


@pytest.mark.parametrize("command", [("generate", "-"), ("chat",)], ids=" ".join)
def test_a_closed_input_is_an_error(invoke, command: tuple[str, ...], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    code, out, err = invoke(*command, "--target", tiny, *SMALL)
    assert (code, out) == (2, "")
    one_line(err, "standard input is closed")


def test_a_prompt_from_a_pipe_must_be_text(invoke, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"b\xe4h"), "utf-8"))
    code, out, err = invoke("generate", "-", "--target", tiny, *SMALL)
    assert (code, out) == (2, "")
    one_line(err, "standard input is not valid utf-8 (at byte 1")


def test_a_line_that_is_no_text_ends_a_conversation_after_what_came_before(
    invoke, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(lines: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
        return invoke("chat", "--target", tiny, *SMALL)

    code, expected, _ = talk("grüß dich\n".encode())
    assert code == 0 and expected
    code, out, err = talk("grüß dich\n".encode() + b"b\xe4h\nhi\n")
    assert (code, out) == (2, expected)
    one_line(err, "not valid utf-8 (at byte 1")


@pytest.mark.parametrize("case", TORN)
def test_torn_settings_are_left_alone(invoke, tiny: str, tmp_path: Path, case: str) -> None:
    content = TORN[case] if isinstance(TORN[case], bytes) else TORN[case].encode()
    (tmp_path / "training").mkdir()
    for file in (tmp_path / "settings.json", tmp_path / "training" / "settings.json"):
        file.write_bytes(content)
    with pytest.raises(FailureError, match=r"cannot read .*settings.json .*; restore it, or choose another --out"):
        Journal(tmp_path, {"target": "tiny"}, resume=True)
    code, out, err = invoke("train", "head", "--target", tiny, "--out", str(tmp_path), "--resume")
    assert (code, out) == (1, "")
    one_line(err, "the settings that this was started with")
    code, out, err = invoke("bench", "merge", str(tmp_path / "out"), str(tmp_path))
    assert (code, out) == (1, "")
    one_line(err, "cannot read")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["settings.json", "training"]
    assert (tmp_path / "settings.json").read_bytes() == (tmp_path / "training" / "settings.json").read_bytes() == content


def test_a_file_that_cannot_be_written_is_named(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("polydraft.cli.info._facts", fail)
    code, _, err = invoke("info")
    assert code == 1
    one_line(err, f"cannot read or write {tmp_path} (Permission denied)")
