"""The frame of a page, its text and tables, and the token view, which a script draws from embedded data."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from polydraft.lab.bench import BASELINE
from polydraft.lab.bench.report import values
from polydraft.lab.svg import escape

Figures = Mapping[str, Any]

TARGET = "target"
STYLES = 6
"""Number of sources with their own colour and underline (`.source-0` … in style.css); further sources share the last."""
_EXPLAINED = {TARGET: "no draft proposed it", "model": "from the draft model"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Makes the browser refuse any request that the page might make."""


def page(title: str, body: str, *, before: str = "", script: str = "") -> str:
    """Return a whole HTML page: `before` goes before the main part `body`, and `script` names a file of this package."""
    ending = f"<script>\n{_file(script)}</script>\n" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_file("style.css")}</style>
</head>
<body>
{before}<main>
{body}
</main>
{ending}</body>
</html>
"""


def _file(name: str) -> str:
    return (files("polydraft.lab.bench.report") / name).read_text(encoding="utf-8")


def header(results: Figures) -> str:
    """Return the title, the models and machine, and the findings."""
    settings, machine = results.get("settings") or {}, results.get("machine") or {}
    place = machine.get("gpu") or machine.get("cpu")
    facts = [
        ("target", settings.get("target")),
        ("draft", settings.get("draft")),
        ("temperature", settings.get("temperature")),
        ("dtype", settings.get("dtype")),
        ("machine", place),
        ("measured", str(results.get("created") or "")[:16].replace("T", " ") or None),
    ]
    if settings.get("inflated"):
        facts.insert(1, ("target's kind", settings["inflated"]))
    items = "".join(f"<div><dt>{name}</dt><dd>{values.plain(value)}</dd></div>" for name, value in facts)
    found = "".join(f"<li>{finding}</li>" for finding in findings(results))
    return f"""<header><p class="kicker">polydraft bench</p>
<h1><span class="name">{values.plain(settings.get("target"))}</span> <span class="muted">drafted by</span>
<span class="name">{values.plain(settings.get("draft"))}</span></h1>
<dl class="facts">{items}</dl><ul class="findings">{found}</ul></header>"""


def findings(results: Figures) -> list[str]:
    """Return the best speed-up, the check of greedy texts and the failures, in a sentence each."""
    methods = results["methods"]
    rated = {
        name: value
        for name, f in methods.items()
        if name != BASELINE and (value := values.finite(f.get("speedup"))) is not None
    }
    found = []
    if rated:
        best = max(rated, key=rated.__getitem__)
        verdict = values.speedup_verdict(methods[best])
        says = {
            "faster": "faster than plain decoding beyond noise",
            "slower": "slower than plain decoding, as are all others",
            "noise": "which noise alone could explain: no method is clearly faster than plain decoding",
            "unknown": "over plain decoding; there are too few prompts for an interval",
        }[verdict]
        bounds = values.interval(methods[best])
        spread = f" (95\N{NO-BREAK SPACE}% interval {bounds[0]:.2f}–{bounds[1]:.2f})" if bounds else ""
        found.append(f"Best: <code>{escape(best)}</code> at <strong>{rated[best]:.2f}×</strong>{spread}, {says}.")
    checked = [f for name, f in methods.items() if name != BASELINE and values.finite(f.get("identical")) is not None]
    if checked:
        wrong = sum(int(values.finite(f.get("differences")) or 0) for f in checked)
        ties = sum(int(values.finite(f.get("near_tie_differences")) or 0) for f in checked)
        tied = f"; {ties} differ{'s' if ties == 1 else ''} at a near-tie of logits" if ties else ""
        found.append(
            f'<span class="bad">✗</span> {wrong} texts differ from plain decoding beyond near-ties{tied}.'
            if wrong
            else f'<span class="good">✓</span> No text differs from plain decoding beyond near-ties{tied}.'
        )
    elif (values.finite((results.get("settings") or {}).get("temperature")) or 0) > 0:
        found.append("Texts are sampled, so they are not compared one by one.")
    failed = [name for name, f in methods.items() if f.get("status") == "failed"]
    if failed:
        found.append(f'<span class="bad">✗</span> Failed: {values.names(failed)}.')
    return found


def identity(name: str, figures: Figures) -> str:
    """Return how many texts equal the baseline's, and how the others differ."""
    same, prompts = values.finite(figures.get("identical")), values.finite(figures.get("prompts"))
    if name == BASELINE:
        return '<span class="muted">baseline</span>'
    if same is None:
        return values.DASH
    ties = int(values.finite(figures.get("near_tie_differences")) or 0)
    wrong = int(values.finite(figures.get("differences")) or 0)
    mark = '<span class="bad">✗</span>' if wrong else '<span class="good">✓</span>'
    of = f"/{prompts:.0f}" if prompts is not None else ""
    extra = [f"{ties} near-tie{'s' if ties > 1 else ''}"] * bool(ties) + [f"{wrong} different"] * bool(wrong)
    return f"{mark} {same:.0f}{of}" + "".join(f'<span class="spread">{text}</span>' for text in extra)


def _status(figures: Figures) -> str:
    if figures.get("status") == "failed":
        return '<span class="bad">✗ failed</span>'
    return '<span class="good">✓ ok</span>' if figures.get("status") == "ok" else values.plain(figures.get("status"))


def _joules(figures: Figures) -> str:
    value = values.finite(figures.get("joules_per_token"))
    return values.NOT_AVAILABLE if value is None else values.number(value, 2)


def table(head: Sequence[str], rows: Iterable[str], caption: str = "") -> str:
    """Return a table of `table_row`s; on a phone each row becomes a card."""
    cells = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in head)
    return f"""<table role="table" class="headline">{caption}<thead role="rowgroup"><tr role="row">{cells}</tr></thead>
<tbody role="rowgroup">{"".join(rows)}</tbody></table>"""


def table_row(name: str, cells: Mapping[str, str], *, before: str = "", error: str = "", failed: bool = False) -> str:
    """Return a row headed by a method's or an arm's name, with cells by column."""
    written = "".join(f'<td role="cell" data-label="{label}"><span>{cell}</span></td>' for label, cell in cells.items())
    kind = ' class="failed"' if failed else ""
    return (
        f'<tr role="row"{kind}>{before}<th role="rowheader" scope="row"><code>{escape(name)}</code>{error}</th>{written}</tr>'
    )


def headline_table(methods: Mapping[str, Figures]) -> str:
    """Return the table of all methods with their main figures."""
    columns: dict[str, Callable[[str, Figures], str]] = {
        "Tokens/s": lambda name, f: values.number(f.get("tokens_per_second"), 1),
        "Speed-up": lambda name, f: '<span class="muted">1×</span>' if name == BASELINE else values.speedup(f),
        "Tokens/pass": lambda name, f: values.number(f.get("tokens_per_pass")),
        "Acceptance": lambda name, f: values.percent(f.get("acceptance_rate")),
        "Same text": identity,
        "First token": lambda name, f: values.number(f.get("first_token_seconds"), 2, " s"),
        "Peak memory": lambda name, f: values.size(f.get("peak_memory_bytes")),
        "J/token": lambda name, f: _joules(f),
        "Status": lambda name, f: _status(f),
    }
    rows = [
        table_row(
            name,
            {label: cell(name, figures) for label, cell in columns.items()},
            before=f'<td role="cell" class="index">{index}</td>',
            error=f'<span class="error">{escape(figures["error"])}</span>' if figures.get("error") else "",
            failed=figures.get("status") == "failed",
        )
        for index, (name, figures) in enumerate(methods.items(), 1)
    ]
    caption = (
        "<caption>Speed-up is over <code>ar</code>, plain decoding, with its 95\N{NO-BREAK SPACE}% interval "
        "(bootstrap over prompts, paired): ▲ faster, ▼ slower, ≈ within noise; with fewer than six prompts there is none. "
        "“Same text” counts prompts whose tokens equal those of <code>ar</code>.</caption>\n"
    )
    return table(("#", "Method", *columns), rows, caption)


def facts_table(title: str, facts: Figures) -> str:
    """Return a table of names and values, one per row."""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name).replace("_", " "))}</th><td>{values.plain(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table class="facts-table"><caption>{title}</caption><tbody>{rows}</tbody></table>' if rows else ""


def provenance(results: Figures) -> str:
    """Return how it was measured: settings, machine, versions and command."""
    machine = dict(results.get("machine") or {})
    if "memory_bytes" in machine:
        memory = machine.pop("memory_bytes")
        machine["memory"] = values.size(memory) if values.finite(memory) else None
    machine["gpu"] = machine.get("gpu") or "none"
    command = results.get("command")
    written = shlex.join(map(str, command)) if isinstance(command, list) else command
    settings = dict(results.get("settings") or {})
    prompts = settings.pop("prompts", None)
    if isinstance(prompts, Mapping):
        settings.update({f"prompts: {name}": value for name, value in prompts.items()})
    run = {"measured": results.get("created"), "git revision": results.get("git_revision"), "schema": results.get("schema")}
    return f"""<p>Times are wall-clock seconds of whole generations, prefill included, on synchronised devices. Each prompt
counts with its median seconds per token over all repeats.</p>
<pre class="command"><code>{values.plain(written)}</code></pre>
<div class="panels facts-grid">{facts_table("Settings", settings)}{facts_table("Machine", machine)}
{facts_table("Versions", results.get("versions") or {})}{facts_table("Run", run)}</div>"""


def sources_of(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sources that occur: the target, the draft model, then others in order of appearance."""
    found = dict.fromkeys(str(token.get("source", TARGET)) for sample in samples for token in sample.get("tokens") or [])
    first = [TARGET, *(name for name in ("model",) if name in found)]
    return [*first, *(name for name in found if name not in first)]


def _packed(token: Mapping[str, Any], sources: Sequence[str]) -> list[Any]:
    """Return a token's text, source and, if known, pass."""
    packed = [str(token.get("text", "")), sources.index(str(token.get("source", TARGET)))]
    turn = values.finite(token.get("pass"))
    return packed if turn is None else [*packed, int(turn)]


def embedded(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the samples as JSON, with `<`, `>` and `&` escaped so that no text can break out of its element."""
    sources = sources_of(samples)
    data = {
        "sources": sources,
        "samples": [
            {
                "method": str(sample.get("method", "")),
                "category": str(sample.get("category", "")),
                "prompt": str(sample.get("prompt", "")),
                "tokens": [_packed(token, sources) for token in sample.get("tokens") or []],
            }
            for sample in samples
        ],
    }
    written = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _options(names: Sequence[str], chosen: str) -> str:
    return "".join(
        f'<option value="{escape(name)}"{" selected" if name == chosen else ""}>{escape(name)}</option>' for name in names
    )


def token_view(results: Mapping[str, Any]) -> str:
    """Return the selectors, the legend, an empty element for the text, and the data from which a script fills it."""
    samples = results.get("samples") or []
    if not samples:
        return '<p class="muted">These results hold no sample texts.</p>'
    methods = list(dict.fromkeys(str(sample.get("method", "")) for sample in samples))
    categories = list(dict.fromkeys(str(sample.get("category", "")) for sample in samples))
    chosen = next((name for name in methods if name != BASELINE), methods[0])
    legend = "".join(
        f'<li><span class="token source-{min(index, STYLES - 1)}">{escape(name)}</span>: '
        f"{_EXPLAINED.get(name, 'from another drafter')}</li>"
        for index, name in enumerate(sources_of(samples))
    )
    return f"""<noscript><p class="muted">This view needs JavaScript; the script is part of this page.</p></noscript>
<div id="token-view" class="card" hidden>
<div class="selectors">
<label>Method <select id="token-method">{_options(methods, chosen)}</select></label>
<label>Prompt <select id="token-category">{_options(categories, categories[0])}</select></label>
<label class="check"><input type="checkbox" id="token-passes" checked> mark where each pass begins</label>
</div>
<ul class="legend">{legend}</ul>
<details><summary>The prompt</summary><p id="token-prompt" class="prompt"></p></details>
<p id="token-summary" class="muted"></p>
<p id="token-text" class="tokens" role="listbox" aria-label="Tokens of the sample; arrow keys go from one to the next"></p>
<p id="token-detail" class="detail" aria-live="polite">Point at a token, tap it, or use the arrow keys.</p>
</div>
<script type="application/json" id="token-data">{embedded(samples)}</script>"""
