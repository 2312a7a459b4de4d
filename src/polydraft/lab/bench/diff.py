"""Compare two benchmarks: what changed beyond noise."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from polydraft.errors import UsageError, first_line
from polydraft.lab.bench import BASELINE, SCHEMA
from polydraft.lab.bench.report.values import finite, interval

TOKENS_PER_PASS_SHARE = 0.02
"""Smaller relative changes of tokens per pass are noise, over all prompts."""
ACCEPTANCE_STEP = 0.01
"""Smaller changes of an acceptance rate are noise, over all prompts."""
CATEGORY_FACTOR = 3.0
"""Both limits are this much larger for a category, which has about a tenth of the prompts."""
BASELINE_SHARE = 0.05
"""Relative change of the baseline's tokens/s that gets a warning."""


class Verdict(StrEnum):
    """How two figures compare."""

    BETTER = "better"
    WORSE = "worse"
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    STILL = "still differs"
    NOISE = "within noise"
    UNKNOWN = "cannot tell"
    WARNING = "warning"


_COUNTED = {Verdict.BETTER, Verdict.WORSE, Verdict.ADDED, Verdict.REMOVED, Verdict.CHANGED}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure, setting or method, before and after."""

    method: str = ""
    """Empty for a warning about the runs as a whole."""
    category: str = ""
    """Empty for all prompts."""
    what: str
    before: str
    """As text, with a dash for a missing value, as in `after`."""
    after: str
    verdict: Verdict

    @property
    def counts(self) -> bool:
        """Whether it is a change beyond noise."""
        return self.verdict in _COUNTED


def load_results(path: Path) -> dict[str, Any]:
    """Read `results.json`, given the file or its folder."""
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise UsageError(
            f"cannot read {file}: {reason}; give a results.json, or the folder of `polydraft bench --out`"
        ) from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UsageError(f"{file} is not JSON ({first_line(error)}); give a results.json of `polydraft bench`") from None
    if not isinstance(results, dict) or not isinstance(results.get("methods"), dict):
        raise UsageError(f"{file} holds no benchmark results; give a results.json of `polydraft bench`")
    if results.get("schema") != SCHEMA:
        found = results.get("schema", "none")
        raise UsageError(f"{file} has schema {found!r}; this version reads {SCHEMA}; run the benchmark again")
    return results


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Compare two results: warnings first, then methods in the order of `before`, new ones last.

    A speed-up has changed if the two 95 % intervals do not overlap. That is stricter than a test at 5 %: with equal intervals
    it takes 2.8 standard errors of the difference. Tokens per pass and acceptance have changed if they differ by more than a
    fixed threshold. Differences from plain decoding are always reported.
    """
    old, new = before["methods"], after["methods"]
    changes = [*_surroundings(before, after), *_baseline(old, new)]
    for name in [*old, *(name for name in new if name not in old)]:
        if name in old and name in new:
            changes += _method(name, old[name], new[name])
        else:
            verdict = Verdict.ADDED if name in new else Verdict.REMOVED
            text = _speedup_text(new.get(name) or old.get(name) or {})
            pair = ("–", text) if name in new else (text, "–")
            changes.append(Change(method=name, what="method", before=pair[0], after=pair[1], verdict=verdict))
    return changes


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings; their names are joined by dots."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(_flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item})
    return found


def _surroundings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Warn about differences in settings, machine and versions, which make figures hard to compare."""
    for part in ("settings", "machine", "versions"):
        old, new = _flat(before.get(part) or {}), _flat(after.get(part) or {})
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                before_text, after_text = _plain(old.get(key)), _plain(new.get(key))
                yield Change(what=f"{part}.{key}", before=before_text, after=after_text, verdict=Verdict.WARNING)


def _plain(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _baseline(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Warn if the baselines of the speed-ups differ in speed."""
    pair = [finite((methods.get(BASELINE) or {}).get("tokens_per_second")) for methods in (old, new)]
    if pair[0] and pair[1] and abs(pair[1] / pair[0] - 1) > BASELINE_SHARE:
        what = f"tokens/s of the baseline {BASELINE}"
        yield Change(what=what, before=f"{pair[0]:.1f}", after=f"{pair[1]:.1f}", verdict=Verdict.WARNING)


def _method(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    if old.get("status") != new.get("status"):
        verdict = Verdict.WORSE if new.get("status") == "failed" else Verdict.BETTER
        before, after = _plain(old.get("status")), _plain(new.get("status"))
        yield Change(method=name, what="status", before=before, after=after, verdict=verdict)
    yield from _identity(name, old, new)
    yield from _figures(name, "", old, new)
    old_parts, new_parts = old.get("categories") or {}, new.get("categories") or {}
    for category in old_parts:
        if category in new_parts:  # categories that only one has are settings, so there is a warning already
            yield from _figures(name, category, old_parts[category], new_parts[category])


def _identity(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Report differences from plain decoding if they have changed or persist."""
    counts = [[finite(side.get(key)) for key in ("near_tie_differences", "differences")] for side in (old, new)]
    if counts[0] != counts[1]:
        known = None not in counts[0] and None not in counts[1]
        pairs = [((one[1] or 0), (one[0] or 0)) for one in counts]  # real differences weigh more than near-ties
        verdict = Verdict.CHANGED if not known else Verdict.WORSE if pairs[1] > pairs[0] else Verdict.BETTER
    elif counts[1][1]:
        verdict = Verdict.STILL
    else:
        return
    yield Change(method=name, what="identity", before=_identity_text(old), after=_identity_text(new), verdict=verdict)


def _identity_text(side: Mapping[str, Any]) -> str:
    same = finite(side.get("identical"))
    if same is None:
        return "not checked"
    ties, wrong = (int(finite(side.get(key)) or 0) for key in ("near_tie_differences", "differences"))
    return f"{same:.0f}/{_plain(side.get('prompts'))} same, {ties} near-tie, {wrong} different"


def _speedup_text(side: Mapping[str, Any]) -> str:
    value, bounds = finite(side.get("speedup")), interval(side)
    if value is None:
        return "–"
    return f"{value:.2f}×" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def _figures(name: str, category: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    place = {"method": name, "category": category}
    if name != BASELINE:
        before, after = _speedup_text(old), _speedup_text(new)
        if (before, after) != ("–", "–"):
            yield Change(**place, what="speed-up", before=before, after=after, verdict=_speedup_verdict(old, new))
    factor = CATEGORY_FACTOR if category else 1.0
    for key, what, digits in (("tokens_per_pass", "tokens/pass", 2), ("acceptance_rate", "acceptance", 3)):
        first, second = finite(old.get(key)), finite(new.get(key))
        if first is None and second is None:
            continue
        before, after = ("–" if value is None else f"{value:.{digits}f}" for value in (first, second))
        if first is None or second is None:
            verdict = Verdict.UNKNOWN
        else:
            allowed = factor * (TOKENS_PER_PASS_SHARE * first if key == "tokens_per_pass" else ACCEPTANCE_STEP)
            moved = second - first
            verdict = Verdict.NOISE if abs(moved) <= allowed else Verdict.BETTER if moved > 0 else Verdict.WORSE
        yield Change(**place, what=what, before=before, after=after, verdict=verdict)


def _speedup_verdict(old: Mapping[str, Any], new: Mapping[str, Any]) -> Verdict:
    first, second = interval(old), interval(new)
    if first is None or second is None:
        return Verdict.UNKNOWN
    if second[0] > first[1]:
        return Verdict.BETTER
    return Verdict.WORSE if second[1] < first[0] else Verdict.NOISE


def format_diff(changes: Sequence[Change]) -> str:
    """Return changes as plain text: warnings, a table, and a summary.

    Figures within noise are left out, except each method's overall speed-up.
    """
    warnings = [change for change in changes if change.verdict is Verdict.WARNING]
    figures = [change for change in changes if change.verdict is not Verdict.WARNING]
    quiet = {Verdict.NOISE, Verdict.UNKNOWN}
    shown = [c for c in figures if c.verdict not in quiet or (c.what == "speed-up" and not c.category)]
    lines = [f"warning: {change.what} differs: {change.before} -> {change.after}" for change in warnings]
    lines += [""] * bool(warnings) + _table(shown)
    if hidden := len(figures) - len(shown):
        lines.append(f"({hidden} more figures within noise or not comparable)")
    lines += [""] * bool(lines) + [_summary(changes)]
    return "\n".join(lines)


def _table(rows: Sequence[Change]) -> list[str]:
    if not rows:
        return []
    cells = [("method", "prompts", "figure", "before", "after", "verdict")]
    cells += [(c.method, c.category or "all", c.what, c.before, c.after, c.verdict.value) for c in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _summary(changes: Sequence[Change]) -> str:
    count = sum(change.counts for change in changes)
    still = sum(change.verdict is Verdict.STILL for change in changes)
    summary = f"{count} change{'s' * (count != 1)}" if count else "nothing changed beyond noise"
    if still:
        summary += f"; {still} method{'s' * (still != 1)} still differ{'s' * (still == 1)} from plain decoding"
    return summary
