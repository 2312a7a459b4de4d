"""Pages in docs/papers stay true: places, tests and commands exist, snippets print what they say, tables follow results."""

import ast
import contextlib
import io
import json
import pkgutil
import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from polydraft.cli.main import cli
from polydraft.draft import LOSSY_DRAFTERS
from polydraft.lab.estimate import Estimate
from polydraft.lab.papers import PAPERS, DistributionRun, Results
from polydraft.lab.papers.pages import keep, measured, read_kept, write_kept
from polydraft.lab.papers.paper import ordering
from polydraft.papers.target_init import TargetInit

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "papers"
MOST_BYTES = 200_000
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "papers.py"))
RENDERED = SCRIPT["rendered"]()

each_paper = pytest.mark.parametrize("name", list(PAPERS))


class Row(NamedTuple):
    """One line of a page's map."""

    what: str
    here: str
    test: str
    command: str


def rows_of(name: str) -> list[Row]:
    page = (PAGES / f"{name}.md").read_text()
    table = page.split("## Where each piece is")[1].split("## What we measured")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def check_command(line: str) -> None:
    """Raise where an option or a value does not exist."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "polydraft"
    node: click.Command = cli
    while isinstance(node, click.Group):
        following = node.get_command(click.Context(node), arguments[0])
        if following is None:
            break
        node, arguments = following, arguments[1:]
    node.make_context(node.name, arguments)


@each_paper
def test_every_piece_is_where_it_says_with_its_test_and_its_command(name: str) -> None:
    rows = rows_of(name)
    assert len(rows) > 10
    for row in rows:
        if row.here.startswith("not done: "):
            assert not row.test and not row.command
            continue
        pkgutil.resolve_name(row.here.strip("`"))
        file, _, test = row.test.strip("`").partition("::")
        assert test in names_in(ROOT / file), row.test
        check_command(row.command.strip("`"))


def test_wrong_rows_are_noticed() -> None:
    with pytest.raises((AttributeError, ImportError)):
        pkgutil.resolve_name("polydraft.verify.Nowhere")
    with pytest.raises(click.ClickException):
        check_command("polydraft bench --size huge")
    assert "test_nothing" not in names_in(Path(__file__))


NUMBERED = {
    "mcsd": ({"Algorithm": 2, "Table": 7, "Figure": 5}, "eq. 1"),
    "optimal": ({"Table": 3, "Figure": 3}, "eqs. 35–81"),
    "improved": ({"Table": 2, "Figure": 6}, "eq. 1"),
    "self-draft": ({"Algorithm": 1, "Table": 2, "Figure": 8}, "eqs. of D and τ"),
    "dsbd": ({"Algorithm": 1, "Table": 2, "Figure": 5}, "eqs. 5–7"),
}
"""What each paper has: how many of each kind, and its last equation that defines something."""


@each_paper
def test_every_numbered_piece_has_a_row(name: str) -> None:
    kinds, last = NUMBERED[name]
    said = " ".join(row.what for row in rows_of(name))
    assert last in said
    for kind, most in kinds.items():
        numbers: set[int] = set()
        for start in re.findall(rf"{kind}s? ((?:\d+(?: to | and |, )?)+)", said):
            for first, _, end in re.findall(r"(\d+)( to (\d+))?", start):
                numbers |= {*range(int(first), int(end or first) + 1)}
        assert {*range(1, most + 1)} <= numbers, kind


@each_paper
def test_snippets_print_what_stands_below_them(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert snippets and len(snippets) == page.count("```python")
    for snippet, expected in snippets:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet, name, "exec"), {})
        assert printed.getvalue() == expected


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.name)
def test_a_page_is_what_its_results_say(path: Path) -> None:
    assert path.read_text() == RENDERED[path], "run: python benchmarks/papers.py"


def test_no_drawing_is_left_over() -> None:
    assert {path for path in (PAGES / "plots").iterdir()} <= RENDERED.keys()


@each_paper
def test_kept_figures_are_few_and_of_the_papers_runs(name: str) -> None:
    path = PAGES / "results" / f"{name}.json"
    assert path.stat().st_size < MOST_BYTES
    results, runs = read_kept(path), {run.name: run for run in PAPERS.get(name).runs}
    assert set(results) <= set(runs)
    for run, found in results.items():
        known = runs[run]
        assert found["rows"] if isinstance(known, DistributionRun) else set(found["methods"]) <= set(known.arms), run


@each_paper
def test_what_was_not_measured_is_said_to_be_so(name: str) -> None:
    paper, page = PAPERS.get(name), (PAGES / f"{name}.md").read_text()
    results = read_kept(PAGES / "results" / f"{name}.json")
    missing = [one for one in paper.comparisons(results) if not measured(one)]
    assert page.count("**Ours**: not measured yet.") == len(missing)
    for one in missing:
        assert all(chart.file not in page for chart in one.charts)


def test_there_is_a_page_for_papers_only() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*PAPERS, "README"}


def test_commands_of_the_overview_parse() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (PAGES / "README.md").read_text(), flags=re.DOTALL)
    for line in block.splitlines():
        if line.startswith("polydraft "):
            check_command(line)


def test_a_page_needs_exactly_its_marks() -> None:
    assert (
        SCRIPT["filled"]("a\n<!-- one -->\nold\n<!-- end -->\nb\n", {"one": ["new", "x"]})
        == "a\n<!-- one -->\nnew\nx\n<!-- end -->\nb\n"
    )
    for sections in ({}, {"one": ["x"], "two": ["y"]}):
        with pytest.raises(ValueError, match="marks of the page"):
            SCRIPT["filled"]("<!-- one -->\n<!-- end -->\n", sections)


def test_figures_are_kept_without_what_nobody_reads(tmp_path: Path) -> None:
    figures = {"prompts": 2, "tokens_per_pass": 2.123456789, "acceptance_rate": 0.0, "speedup": 1.5, "acceptance_by_depth": []}
    categories = {"a": {"tokens_per_pass": 2.0, "speedup": 1.0}, "b": {"tokens_per_pass": None}}
    results = {
        "created": "2026-01-02T03:04:05+00:00",
        "settings": {
            "target": "t", "draft": "d", "dtype": "float32", "temperature": 0.0, "max_new_tokens": 8, "batch": 2,
            "prompts": {"count": 2, "source": "/somewhere/set.jsonl", "categories": {"a": 1, "b": 1}},
        },
        "machine": {"gpu": None, "threads": 2, "cpu": "a cpu"},
        "methods": {"ar": {**figures, "categories": categories, "winning_branches": [{"share": 1.0}]}},
    }  # fmt: skip
    paper = replace(PAPERS.get("self-draft"), branches_of=("ar",))
    counted, timed = (keep(results, paper, timed=one) for one in (False, True))
    few = keep(results, PAPERS.get("mcsd"), timed=False)["methods"]["ar"]
    assert not {"categories", "winning_branches"} & few.keys() and counted["methods"]["ar"]["winning_branches"] == [
        {"share": 1.0}
    ]
    assert counted["settings"]["source"] == "set" and "/somewhere" not in json.dumps(counted)
    assert counted["methods"]["ar"]["tokens_per_pass"] == 2.1235 and counted["methods"]["ar"]["acceptance_rate"] == 0
    assert "speedup" not in counted["methods"]["ar"] and timed["methods"]["ar"]["speedup"] == 1.5
    assert counted["methods"]["ar"]["categories"] == {"a": {"tokens_per_pass": 2.0}, "b": {}}
    kept = Results(one=counted, distributions={"settings": {"target": "t"}, "rows": [{"acceptance": 0.123456789}]})
    write_kept(kept, tmp_path / "kept.json")
    again = read_kept(tmp_path / "kept.json")
    assert again["one"] == counted and again["distributions"]["rows"] == [{"acceptance": 0.12346}]
    assert again.about("one") == "target t, draft d, float32 on 2 threads of a cpu, 8 new tokens, 2026-01-02, 2 prompts of set"
    assert again.about("none") == "not measured" and again.text("one", "ar", "speedup", "×") == "–"


def test_a_claim_says_what_it_takes_where_it_was_not_measured() -> None:
    known, unknown = ("ours", Estimate.exactly(2.0)), ("ours", None)
    said = {"why": "a reason", "missing": "another pair"}
    rows = [ordering("more than one", one, ("one", Estimate.exactly(1.0)), **said) for one in (known, unknown)]
    assert [row[2:] for row in rows] == [["yes", "a reason"], ["not measured", "another pair"]]
    assert ordering("more than one", unknown, why="a reason")[3] == "a reason"


def test_what_was_measured_again_replaces_its_own_runs_only(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    old, new = ({"settings": {"created": day}, "methods": {"ar": {"prompts": 1}}} for day in ("old", "new"))
    write_kept(Results({"gone": old, "speed-t0": old, "alpaca-t0": old}), before)
    write_kept(Results({"alpaca-t0": new, "alpaca-t1": new}), after)
    SCRIPT["take_over"]("mcsd", after, before)
    days = {name: run["settings"]["created"] for name, run in read_kept(before).items()}
    assert days == {"alpaca-t0": "new", "alpaca-t1": "new", "speed-t0": "old"}, "a run that no paper has is dropped"


def test_the_lossy_drafter_is_found_by_name() -> None:
    assert TargetInit.name in LOSSY_DRAFTERS
