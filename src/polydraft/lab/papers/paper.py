"""A paper's experiments: what to run for its tables and figures, and how to make these from the results.

Its page in docs/papers says what it claims, where each piece is implemented and which test proves it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.lab.bench import BASELINE
from polydraft.lab.charts import Chart
from polydraft.lab.estimate import Estimate, Verdict, bounds, verdict, with_intervals
from polydraft.registry import Registry

REPEATED = f"{BASELINE},arm=2"
"""Plain decoding once more, as a second arm of every timed run: shows how much the machine's speed varies."""


def run_name(prompts: str, temperature: float) -> str:
    """Name a run by its prompts and temperature, such as ``alpaca-t0``."""
    return f"{prompts}-t{temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark: methods on one set of prompts at one temperature."""

    name: str
    """Name of its folder."""
    prompts: str
    """Name of the prompt set, if `--prompts` is a folder of several."""
    temperature: float
    methods: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Further methods, which smoke runs leave out."""
    timed: bool = False
    """True to measure speed: few texts, one at a time, and on a GPU a 7B-sized target. False to count acceptance."""
    seeds: bool = False
    """Whether to use several seeds, because the quality of texts is compared."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the benchmark; the user's options take precedence."""
    needs: tuple[str, ...] = ()
    """Files and folders that the run needs; without them it is left out."""

    @classmethod
    def of_acceptance(cls, prompts: str, temperatures: Sequence[float], methods: tuple[str, ...], **more: Any) -> "list[Run]":
        """Return one run per temperature, on one set of prompts, that counts acceptance."""
        names = {run_name(prompts, temperature): temperature for temperature in temperatures}
        return [cls(name=name, prompts=prompts, temperature=one, methods=methods, **more) for name, one in names.items()]

    @classmethod
    def of_speed(cls, temperature: float, methods: tuple[str, ...], name: str = "speed", **more: Any) -> "Run":
        """Return a run that measures speed."""
        name = run_name(name, temperature)
        return cls(name=name, prompts="spec_bench", temperature=temperature, methods=methods, timed=True, **more)

    @property
    def arms(self) -> tuple[str, ...]:
        """All methods to measure; a timed run has plain decoding twice."""
        repeated = (REPEATED,) if self.timed and BASELINE in self.methods else ()
        return (*dict.fromkeys((*self.methods, *self.more)), *repeated)


@dataclass(frozen=True, kw_only=True)
class DistributionRun:
    """One `polydraft analyze`: schemes against their optima on the distributions of two models."""

    name: str
    prompts: str
    categories: tuple[str, ...] = ()
    """Categories of the set to use; all if empty."""
    temperatures: tuple[float, ...] = (0.7,)
    drafts: tuple[int, ...] = (3,)
    schemes: tuple[str, ...]
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a reproduction measures; the user's options take precedence."""

    prompts: int
    tokens: int
    batch: int
    timed_prompts: int
    timed_tokens: int
    positions: int
    """Most positions of a `DistributionRun` per temperature."""
    answer_tokens: int
    """Most tokens of an answer in a `DistributionRun`."""
    whole: bool = True
    """Whether to measure all methods of a run, `more` included."""
    seeds: int = 1
    """Number of seeds of runs with `seeds`."""
    energy_seconds: float = 0.0
    """Length of an energy reading of a timed method."""


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
"""`smoke` tries everything within a few minutes; `page` makes the figures of the pages in docs/papers."""
LARGE_TARGET = "inflated:7b"
"""Target of timed runs on a GPU: the bundled model's texts at the cost of 7B parameters."""
LARGE_TARGET_MEANING = (
    f"`{LARGE_TARGET}` has the layers and so the cost of a Llama of 7B parameters, but computes the logits of the bundled 135M "
    "model: acceptance is that of the small pair, time and energy are those of a 7B target with a small draft."
)


class Results(dict[str, dict[str, Any]]):
    """Figures by run: its `settings`, and its `methods` or, for a `DistributionRun`, `rows`. Runs not measured are missing."""

    def figures(self, run: str, method: str) -> dict[str, Any]:
        """Return all figures of a method; empty if it was not measured."""
        return with_intervals(self.get(run, {}).get("methods", {}).get(method, {}))

    def figure(self, run: str, method: str, key: str, category: str | None = None) -> Estimate | None:
        """Return a figure, overall or of one category; None if it was not measured."""
        figures = self.figures(run, method)
        value = (figures if category is None else figures.get("categories", {}).get(category, {})).get(key)
        return value if value is None or isinstance(value, Estimate) else Estimate(value)

    def text(self, run: str, method: str, key: str, unit: str = "", digits: int = 2) -> str:
        """Write a figure with its interval for a table, or a dash if it was not measured."""
        return text_of(self.figure(run, method, key), unit, digits)

    def claim(self, claim: str, run: str, key: str, methods: Mapping[str, str | Estimate | None], **more: Any) -> list[str]:
        """Return the row of a claim about one figure of several methods, by label; see `ordering`.

        An estimate stands for itself, None for a figure that cannot be measured.
        """
        figures = [(name, self.figure(run, one, key) if isinstance(one, str) else one) for name, one in methods.items()]
        return ordering(claim, *figures, **more)

    def drift(self, *runs: str) -> str:
        """Write the speed-up of plain decoding over itself in timed runs, if that was measured."""
        found = {run: self.figure(run, REPEATED, "speedup") for run in runs}
        gains = [f"{text_of(value, '×')} in {run}" for run, value in found.items() if value is not None]
        return f"Plain decoding against itself, as a second arm: {', '.join(gains)}." if gains else ""

    def about(self, *runs: str) -> str:
        """Describe models, machine and prompts of runs; runs that differ only in prompts share a sentence."""
        described: dict[str, list[str]] = {}
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
                if what not in (places := described.setdefault(how, [])):
                    places.append(what)
        return "; ".join(f"{how}, {', '.join(places)}" for how, places in described.items()) or "not measured"

    def meaning(self, *runs: str) -> str:
        """Explain the runs' target if it needs that."""
        targets = {self.get(run, {}).get("settings", {}).get("target") for run in runs}
        return LARGE_TARGET_MEANING if LARGE_TARGET in targets else ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One table or figure of a paper: our measurements beside the published ones."""

    key: str
    """Marks its place on the paper's page."""
    title: str
    runs: tuple[str, ...]
    """Runs that it is made from."""
    columns: Sequence[str]
    ours: Sequence[Sequence[str]]
    published_note: str = ""
    """The models and the machine of the published figures."""
    published_columns: Sequence[str] = ("claim",)
    published: Sequence[Sequence[str]] = ()
    """Published figures, or claims if the paper prints no figures; empty if another table has them."""
    remark: str = ""
    """A note below the table on what our figures mean."""
    charts: Sequence[Chart] = ()
    """Our figures as the paper draws its own."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What to run for a paper, and what makes its tables and claims from the results."""

    title: str
    runs: tuple[Run | DistributionRun, ...]
    tables: tuple[Callable[[Results], Comparison], ...]
    contest: tuple[tuple[str, str, str], ...] = ()
    """Its rows in the table that compares all papers: label, timed run and method."""
    by_category: bool = False
    """Whether its tables have rows by category of prompts."""
    branches_of: tuple[str, ...] = ()
    """Methods whose winning branches its tables show."""
    claims: tuple[Callable[[Results], list[list[str]]], ...] = ()
    """Return its headline claims, as rows made by `ordering`."""

    def comparisons(self, results: Results) -> list[Comparison]:
        """Return all its tables and figures."""
        return [table(results) for table in self.tables]

    def claim_rows(self, results: Results) -> list[list[str]]:
        """Return the rows of all its claims."""
        return [row for claims in self.claims for row in claims(results)]


PAPERS: Registry[Paper] = Registry("paper")


def contest(methods: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Return `Paper.contest` for methods by label that are timed at both temperatures, 0 and 1."""
    return tuple((label, run_name("speed", one), method) for one in (0.0, 1.0) for label, method in methods.items())


def text_of(value: float | None, unit: str = "", digits: int = 2) -> str:
    """Write a figure for a table as ``2.52 [2.41, 2.63]``; None becomes a dash."""
    if value is None:
        return "–"
    ends = bounds(value)
    spread = f" [{ends[0]:z.{digits}f}, {ends[1]:z.{digits}f}]" if ends is not None and ends[0] < ends[1] else ""
    return f"{value:z.{digits}f}{unit}{spread}"  # z: no minus sign on a figure that rounds to 0


def ordering(
    claim: str,
    *figures: tuple[str, float | None],
    digits: int = 3,
    why: str = "",
    missing: str = "",
    alike: bool = False,
) -> list[str]:
    """Return the row of a claim: what the paper says, our figures (largest first, as claimed), whether it holds, and why.

    With `alike` the claim is that the figures do not differ. If one was not measured, `missing` replaces `why`: what is needed
    to measure it.
    """
    found = ", ".join(f"{name} {text_of(value, digits=digits)}" for name, value in figures)
    holds = verdict([value for _, value in figures], alike=alike)
    return [claim, found, holds, missing or why if holds == Verdict.UNKNOWN else why]


def times(factor: float, name: str, value: Estimate | None) -> tuple[str, Estimate | None]:
    """Return a figure multiplied by a factor, with its label, for a row of `ordering`."""
    return f"{factor:g} × {name}", None if value is None else value.scaled(factor)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Write a Markdown table."""
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
