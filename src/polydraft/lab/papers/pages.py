"""Keep the few figures that a paper's tables need, and write its tables and charts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydraft.lab.charts import Chart
from polydraft.lab.papers.paper import Comparison, Paper, Results, table
from polydraft.output import write_text

FILE = "reproduction.md"
"""Name of the file with all tables of a reproduction, in its folder."""
_KEPT = (
    "prompts",
    "tokens_per_pass",
    "acceptance_rate",
    "accepted_per_pass",
    "log_likelihood_per_token",
    "log_likelihood_by_prompt",
)
_KEPT_OF_TIME = ("tokens_per_second", "speedup", "joules_per_token", "replayed_share", "peak_memory_bytes")
_KEPT_OF_CATEGORIES = ("tokens_per_pass",)
_BRANCHES = 8
_MOST_RUNS = 6
"""A section gets the command that repeats it only if it is made from at most this many runs."""
CLAIM_COLUMNS = ("what it says", "here, 95 % interval", "holds", "why")
_INTERVALS = "In brackets: 95 % intervals over prompts."


def keep(results: Mapping[str, Any], paper: Paper, *, timed: bool) -> dict[str, Any]:
    """Return the few figures of a `results.json` that a paper's tables need, rounded; speeds are for timed runs only."""
    settings, machine = results["settings"], results["machine"]
    categories = paper.by_category and not timed and len(settings["prompts"]["categories"]) > 1
    keys = (*_KEPT, *(_KEPT_OF_TIME if timed else ()))
    methods = {}
    for name, figures in results["methods"].items():
        kept = _chosen(figures, keys)
        if name in paper.branches_of and figures.get("winning_branches"):
            kept["winning_branches"] = _rounded(figures["winning_branches"][:_BRANCHES])
        if categories:
            kept["categories"] = {
                category: _chosen(one, _KEPT_OF_CATEGORIES) for category, one in figures["categories"].items()
            }
        methods[name] = kept
    return {
        "settings": {
            **{key: settings[key] for key in ("target", "draft", "dtype", "temperature", "max_new_tokens")},
            **{key: settings[key] for key in ("top_k", "top_p", "batch", "repeat", "corpus") if key in settings},
            "machine": machine["gpu"] or f"{machine['threads']} threads of {machine['cpu']}",
            "prompts": settings["prompts"]["count"],
            "source": Path(settings["prompts"]["source"]).name.removesuffix(".jsonl"),
            "created": results["created"][:10],
        },
        "methods": methods,
    }


def _chosen(figures: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the figures under `keys` that are known, with their intervals."""
    ends = [f"{key}{end}" for key in keys for end in ("", "_low", "_high")]
    return {key: _rounded(figures[key]) for key in ends if figures.get(key) not in (None, [])}


def _rounded(value: Any) -> Any:
    """Round all numbers to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


def read_kept(path: Path) -> Results:
    """Read the figures that `write_kept` wrote."""
    return Results(json.loads(path.read_text(encoding="utf-8")))


def write_kept(results: Results, path: Path) -> None:
    """Write a paper's figures as JSON, with a line per method, so that diffs are readable."""
    lines = []
    for name, run in results.items():
        lines.append(f' {json.dumps(name)}: {{\n  "settings": {json.dumps(run["settings"], ensure_ascii=False)},')
        if "rows" in run:
            rows = ",\n   ".join(json.dumps(_rounded(row)) for row in run["rows"])
            lines.append(f'  "rows": [\n   {rows}]\n }},')
        else:
            methods = ",\n   ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run["methods"].items())
            lines.append(f'  "methods": {{\n   {methods}}}\n }},')
    write_text(path, "{\n" + "\n".join(lines).removesuffix(",") + "\n}\n")


def charts(paper: Paper, results: Results) -> list[Chart]:
    """Return a paper's charts, except those without figures."""
    return [one for comparison in paper.comparisons(results) if measured(comparison) for one in comparison.charts]


def measured(comparison: Comparison) -> list[Sequence[str]]:
    """Return the rows of our figures, except those without any; the first column is a label."""
    return [row for row in comparison.ours if "–" not in " ".join(row) or any(re.search(r"\d\.\d", cell) for cell in row[1:])]


def section(comparison: Comparison, results: Results, charts_in: str = "", name: str | None = None) -> list[str]:
    """Write a comparison in Markdown: our figures, if any, and the published ones.

    Given the paper's `name`, add the command that measures just this again.
    """
    lines = ["**Ours**: not measured yet."]
    if rows := measured(comparison):
        lines = [f"**Ours** ({results.about(*comparison.runs)})", "", *table(comparison.columns, rows)]
        notes = [results.meaning(*comparison.runs), results.drift(*comparison.runs)]
        if any(re.search(r"\d \[", cell) for row in rows for cell in row):
            notes.append(_INTERVALS)
        lines += ["", " ".join(filter(None, notes))] if any(notes) else []
        lines += [line for one in comparison.charts for line in ("", f"![{one.caption}]({charts_in}{one.file})")]
    if comparison.published:
        lines += ["", f"**Published** ({comparison.published_note})", ""]
        lines += table(comparison.published_columns, comparison.published)
    if comparison.remark and rows:
        lines += ["", comparison.remark]
    if name is not None and len(comparison.runs) <= _MOST_RUNS:
        runs = ",".join(comparison.runs)
        lines += ["", f"Again: `polydraft bench --reproduce {name} --size page --runs {runs} --prompts PROMPTS --out DIR`"]
    return lines


def reproduction(paper: Paper, results: Results) -> str:
    """Write all tables of a paper as one text."""
    lines = [
        f"# {paper.title}: measured again",
        "",
        "The paper's own figures come from other models and machines: compare the pattern, not the numbers.",
    ]
    lines += ["", "## What it says, and whether it holds", "", *claims(paper, results)]
    for comparison in paper.comparisons(results):
        lines += ["", f"## {comparison.title}", "", *section(comparison, results)]
    return "\n".join(lines) + "\n"


def claims(paper: Paper, results: Results) -> list[str]:
    """Write the table of a paper's claims."""
    return table(CLAIM_COLUMNS, paper.claim_rows(results))
