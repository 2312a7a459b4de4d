"""A paper: what to run for its tables and figures, and the tables to make of what was measured.

What it claims, where each piece of it lives and which test proves it stands on its page in docs/papers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.lab.bench import BASELINE
from polydraft.lab.charts import Chart
from polydraft.lab.estimate import Estimate, Verdict, bounds, verdict, with_intervals
from polydraft.registry import Registry

REPEATED = f"{BASELINE},arm=2"
"""Plain decoding as a second arm of every timed run, which shows how much the machine's speed varies."""


def run_name(prompts: str, temperature: float) -> str:
    """Name a run by its prompts and temperature, such as ``alpaca-t0``."""
    return f"{prompts}-t{temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark: methods on one set of prompts at one temperature."""

    name: str
    """Name of its folder."""
    prompts: str
    """Which set, if `--prompts` is a folder of several."""
    temperature: float
    methods: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Further methods, which a smoke run leaves out."""
    timed: bool = False
    """Whether speed counts: few texts, one at a time, on a GPU with a target of 7B's size. Otherwise acceptance is counted."""
    seeds: bool = False
    """Whether texts are drawn with several seeds, because their quality is compared."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the benchmark; those that the user gives take precedence."""
    needs: tuple[str, ...] = ()
    """Files and folders without which the run is left out."""

    @classmethod
    def of_acceptance(cls, prompts: str, temperatures: Sequence[float], methods: tuple[str, ...], **more: Any) -> "list[Run]":
        """Return runs on one set of prompts that count acceptance."""
        names = {run_name(prompts, temperature): temperature for temperature in temperatures}
        return [cls(name=name, prompts=prompts, temperature=one, methods=methods, **more) for name, one in names.items()]

    @classmethod
    def of_speed(cls, temperature: float, methods: tuple[str, ...], name: str = "speed", **more: Any) -> "Run":
        """Return a run that measures speed."""
        name = run_name(name, temperature)
        return cls(name=name, prompts="spec_bench", temperature=temperature, methods=methods, timed=True, **more)

    @property
    def arms(self) -> tuple[str, ...]:
        """All methods to measure, with plain decoding twice if speed counts."""
        repeated = (REPEATED,) if self.timed and BASELINE in self.methods else ()
        return (*dict.fromkeys((*self.methods, *self.more)), *repeated)


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
    """Of one `DistributionRun`, for each temperature, as far as the answers are long enough."""
    answer_tokens: int
    """Most tokens of an answer there."""
    whole: bool = True
    """Whether to measure all methods of a run."""
    seeds: int = 1
    """Of runs whose texts are compared."""
    energy_seconds: float = 0.0
    """Of one reading of a timed method's energy."""


SIZES = {
    "smoke": Size(prompts=2, tokens=4, batch=2, timed_prompts=1, timed_tokens=4, positions=4, answer_tokens=4, whole=False),
    "page": Size(
        prompts=240,
        tokens=48,
        batch=64,
        timed_prompts=30,
        timed_tokens=48,
        positions=5000,
        answer_tokens=256,
        seeds=3,
        energy_seconds=3.0,
    ),
}
"""`smoke` tries everything in a minute or a few; `page` is what the pages in docs/papers show."""
LARGE_TARGET = "inflated:7b"
"""Target of timed runs on a GPU: the bundled model's texts at the cost of 7B parameters."""
MEANINGS = {
    LARGE_TARGET: f"`{LARGE_TARGET}` has the layers and so the cost of a Llama of 7B parameters, but computes the logits of "
    "the bundled 135M model: acceptance is that of the small pair, time and energy are those of a 7B target with a small draft."
}
"""Explanations of targets' names, given wherever they occur."""


class Results(dict[str, dict[str, Any]]):
    """What was measured, by run: `settings`, and `methods` or, of a `DistributionRun`, `rows`. Other runs are missing."""

    def figures(self, run: str, method: str) -> dict[str, Any]:
        """Return all figures of a method; none where it was not measured."""
        return with_intervals(self.get(run, {}).get("methods", {}).get(method, {}))

    def figure(self, run: str, method: str, key: str, category: str | None = None) -> Estimate | None:
        """Return a figure, overall or of one category; None where it was not measured."""
        figures = self.figures(run, method)
        value = (figures if category is None else figures.get("categories", {}).get(category, {})).get(key)
        return value if value is None or isinstance(value, Estimate) else Estimate(value)

    def text(self, run: str, method: str, key: str, unit: str = "", digits: int = 2) -> str:
        """Write a figure with its interval for a table; a dash where there is none."""
        return text_of(self.figure(run, method, key), unit, digits)

    def drift(self, *runs: str) -> str:
        """Say what plain decoding gains over itself in timed runs, if that was measured."""
        found = {run: self.figure(run, REPEATED, "speedup") for run in runs}
        said = [f"{text_of(value, '×')} in {run}" for run, value in found.items() if value is not None]
        return f"Plain decoding against itself, as a second arm: {', '.join(said)}." if said else ""

    def about(self, *runs: str) -> str:
        """Describe models, machine and prompts of runs; runs that differ only in prompts share a sentence."""
        said: dict[str, list[str]] = {}
        for name in runs:
            settings = self.get(name, {}).get("settings")
            if settings:
                how = f"target {settings['target']}, draft {settings['draft']}, {settings['dtype']} on {settings['machine']}"
                how += f", {settings['max_new_tokens']} new tokens"
                how += f", {settings['repeat']} seeds" if settings.get("repeat", 1) > 1 else ""
                how += f", corpus cache {settings['corpus']}" if "corpus" in settings else ""
                how += f", {settings['created']}" if "created" in settings else ""
                what = f"{settings['prompts']} prompts of {settings['source']}"
                what += f" with {settings['positions']} positions" if "positions" in settings else ""
                if what not in (places := said.setdefault(how, [])):
                    places.append(what)
        return "; ".join(f"{how}, {', '.join(places)}" for how, places in said.items()) or "not measured"

    def meanings(self, *runs: str) -> list[str]:
        """Explain the names of targets that need it."""
        targets = {self.get(run, {}).get("settings", {}).get("target") for run in runs}
        return [meaning for name, meaning in MEANINGS.items() if name in targets]


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
    """What our figures say about the paper's claim."""
    charts: Sequence[Chart] = ()
    """Our figures as the paper draws its own."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What to run, and the tables to make of it."""

    title: str
    runs: tuple[Run | DistributionRun, ...]
    tables: Callable[[Results], list[Comparison]]
    contest: tuple[tuple[str, str, str], ...] = ()
    """Its methods in the table of all papers: label, timed run and method."""
    by_category: bool = False
    """Whether its tables have rows by category of prompts."""
    branches_of: tuple[str, ...] = ()
    """Methods whose winning branches its tables show."""
    orderings: Callable[[Results], list[list[str]]] = lambda results: []
    """Its headline claims, all of them, as rows of `ordering`."""


PAPERS: Registry[Paper] = Registry("paper")


def text_of(value: float | None, unit: str = "", digits: int = 2) -> str:
    """Write a figure for a table, ``2.52 [2.41, 2.63]``; a dash where there is none."""
    if value is None:
        return "–"
    ends = bounds(value)
    spread = f" [{ends[0]:z.{digits}f}, {ends[1]:z.{digits}f}]" if ends is not None and ends[0] < ends[1] else ""
    return f"{value:z.{digits}f}{unit}{spread}"  # without a sign on what rounds to 0


def ordering(
    claim: str,
    *figures: tuple[str, float | None],
    digits: int = 3,
    why: str = "",
    missing: str = "",
    alike: bool = False,
) -> list[str]:
    """Return the row of a claim: what the paper says, our figures (largest first, as claimed), whether it holds, and why.

    With `alike` the claim is that the figures do not differ; `missing` says what it takes where one is not measured.
    """
    found = ", ".join(f"{name} {text_of(value, digits=digits)}" for name, value in figures)
    holds = verdict([value for _, value in figures], alike=alike)
    return [claim, found, holds, missing or why if holds == Verdict.UNKNOWN else why]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a Markdown table."""
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
