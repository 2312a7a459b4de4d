"""The token view: sample texts, every token marked by who proposed it. The page's script draws it from embedded data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polydraft.bench.report import values
from polydraft.bench.schema import BASELINE
from polydraft.svg import escape

TARGET = "target"
STYLES = 6
"""How many sources have a colour and an underline of their own (`.source-0` … in style.css); further ones share the last."""
_EXPLAINED = {TARGET: "no draft proposed it", "model": "from the draft model"}


def sources_of(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the sources that occur, the target first, then the draft model, then others in order of appearance."""
    found = dict.fromkeys(str(token.get("source", TARGET)) for sample in samples for token in sample.get("tokens") or [])
    first = [TARGET, *(name for name in ("model",) if name in found)]
    return [*first, *(name for name in found if name not in first)]


def _packed(token: Mapping[str, Any], sources: Sequence[str]) -> list[Any]:
    """Text, source and, where it is known, pass."""
    packed = [str(token.get("text", "")), sources.index(str(token.get("source", TARGET)))]
    turn = values.finite(token.get("pass"))
    return packed if turn is None else [*packed, int(turn)]


def embedded(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the samples as JSON that no text in them can break out of: `<`, `>` and `&` are written as escapes."""
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
    """Selectors, legend and an empty place for the text; the data beside it."""
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
    return f"""<noscript><p class="muted">This view needs JavaScript, which this page carries itself.</p></noscript>
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
