"""A paper: what to run for its tables and figures, and the tables to make of what was measured.

What it claims, where each piece of it lives and which test proves it stands on its page in docs/papers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.lab.charts import Drawing
from polydraft.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark: methods on one set of prompts at one temperature."""

    name: str
    """Name of its folder."""
    prompts: str
    """Which set, if `--prompts` is a folder of several."""
    temperature: float
    methods: tuple[str, ...]
    timed: bool = False
    """Whether speed counts: few texts, one at a time, on a GPU with a target of 7B's size. Otherwise acceptance is counted."""
    seeds: bool = False
    """Whether texts are drawn with several seeds, because their quality is compared."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the benchmark; those that the user gives take precedence."""


@dataclass(frozen=True, kw_only=True)
class DistributionRun:
    """One `polydraft analyze`: schemes against their optima on the distributions of two models."""

    name: str
    prompts: str
    categories: tuple[str, ...] = ()
    """Categories of the set to use; all if empty."""
    temperatures: tuple[float, ...]
    drafts: tuple[int, ...]
    schemes: tuple[str, ...]
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a reproduction measures; options that the user gives take precedence."""

    prompts: int
    tokens: int
    batch: int
    timed_prompts: int
    timed_tokens: int
    positions: int
    """Of one `DistributionRun`, for each temperature."""
    seeds: int = 1
    """Of runs whose texts are compared."""
    energy_seconds: float = 0.0
    """Of one reading of a timed method's energy."""


SIZES = {
    "smoke": Size(prompts=2, tokens=4, batch=2, timed_prompts=1, timed_tokens=4, positions=4),
    "page": Size(prompts=60, tokens=48, batch=64, timed_prompts=6, timed_tokens=48, positions=256, seeds=5, energy_seconds=3.0),
}
"""`smoke` tries everything in a minute or a few; `page` is what the pages in docs/papers show."""
LARGE_TARGET = "inflated:7b"
"""Target of timed runs on a GPU: the bundled model's texts at the cost of 7B parameters."""


class Results(dict[str, dict[str, Any]]):
    """What was measured, by run: `settings`, and `methods` or, of a `DistributionRun`, `rows`. Other runs are missing."""

    def figures(self, run: str, method: str) -> dict[str, Any]:
        """Return all figures of a method; none where it was not measured."""
        found: dict[str, Any] = self.get(run, {}).get("methods", {}).get(method, {})
        return found

    def get_figure(self, run: str, method: str, key: str, category: str | None = None) -> float | None:
        """Return a figure, overall or of one category; None where it was not measured."""
        figures = self.figures(run, method)
        value = (figures if category is None else figures.get("categories", {}).get(category, {})).get(key)
        return None if value is None else float(value)

    def text(self, run: str, method: str, key: str, unit: str = "", digits: int = 2) -> str:
        """Write a figure for a table; a dash where there is none."""
        return text_of(self.get_figure(run, method, key), unit, digits)

    def about(self, *runs: str) -> str:
        """Say which models, machine and prompts runs used; runs that differ in prompts alone share a sentence."""
        said: dict[str, list[str]] = {}
        for name in runs:
            settings = self.get(name, {}).get("settings")
            if settings:
                how = f"target {settings['target']}, draft {settings['draft']}, {settings['dtype']} on {settings['machine']}"
                how += f", {settings['max_new_tokens']} new tokens"
                how += f", {settings['repeat']} seeds" if settings.get("repeat", 1) > 1 else ""
                how += f", corpus cache {settings['corpus']}" if "corpus" in settings else ""
                what = f"{settings['prompts']} prompts of {settings['source']}"
                if what not in (places := said.setdefault(how, [])):
                    places.append(what)
        return "; ".join(f"{how}, {', '.join(places)}" for how, places in said.items()) or "not measured"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One table or figure: what we measured, and beside it what was published."""

    key: str
    """Its mark on the paper's page."""
    title: str
    runs: tuple[str, ...]
    """Runs that it is made of."""
    columns: Sequence[str]
    ours: Sequence[Sequence[str]]
    published_note: str = ""
    """The models and the machine of the published figures."""
    published_columns: Sequence[str] = ("claim",)
    published: Sequence[Sequence[str]] = ()
    """Figures, or claims where the paper prints none; nothing where another table has them."""
    remark: str = ""
    """What our figures say of the paper's claim."""
    drawings: Sequence[Drawing] = ()
    """Our figures as the paper draws its own."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What to run, and the tables to make of it."""

    title: str
    runs: tuple[Run | DistributionRun, ...]
    tables: Callable[[Results], list[Comparison]]
    contest: tuple[tuple[str, str, str], ...] = ()
    """Its methods in the table of all papers: label, timed run and method."""
    orderings: Callable[[Results], list[list[str]]] = lambda results: []
    """What it says is better than what, what was measured, and whether that holds."""


PAPERS: Registry[Paper] = Registry("paper")
UNKNOWN = "not measured"


def text_of(value: float | None, unit: str = "", digits: int = 2) -> str:
    """Write a figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def ordering(claim: str, *figures: tuple[str, float | None], digits: int = 3) -> list[str]:
    """Say whether figures fall in the order that a paper reports."""
    found = ", ".join(f"{name} {text_of(value, digits=digits)}" for name, value in figures)
    known = [value for _, value in figures if value is not None]
    if len(known) < len(figures):
        return [claim, found, UNKNOWN]
    return [claim, found, "yes" if known == sorted(known, reverse=True) else "**no**"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a Markdown table."""
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
