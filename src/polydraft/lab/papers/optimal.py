"""*Towards Optimal Multi-Draft Speculative Decoding*: Tables 1 to 3, Figures 1 and 2."""

import math
from functools import partial
from typing import Any

import numpy as np

from polydraft.lab.charts import Chart, curves
from polydraft.lab.estimate import LEAST_PROMPTS, Estimate, difference
from polydraft.lab.papers.paper import PAPERS, Comparison, DistributionRun, Paper, Results, Run, ordering, run_name, text_of

_SPARSE = (
    "[[0],[1],[2],[3],[0,0],[0,1],[0,2],[1,0],[1,1],[2,0],[2,1],[3,0],[0,0,0],[0,0,1],[0,0,2],[0,1,0],[0,1,1],[0,2,0],[0,2,1],"
    "[1,0,0],[0,0,0,0],[0,0,0,1],[0,0,0,2],[0,0,0,0,0],[0,0,0,0,1]]"
)
"""EAGLE's default tree of 25 nodes."""
_TREES = {"2 drafts, 4 steps": "2x2x2x2", "4 drafts, 3 steps": "4x4x4", "EAGLE's sparse tree": _SPARSE}
_BASE = "scheme=rrs-wr,walk=node"
_SCHEMES = {
    "RRS with replacement": _BASE,
    "RRS without replacement": "scheme=rrs-wor,walk=node",
    "SpecHub": "scheme=spechub,walk=node",
    "Greedy": "scheme=greedy,walk=node",
    "K-SEQ *": "scheme=kseq,walk=node",
    "hybrid *": "scheme=hybrid,walk=node",
    "hybrid, block verification *": "scheme=hybrid,walk=block",
}
"""The paper's methods, which verify node by node; a star marks methods that are not in the paper."""
_TEMPERATURES = (0.1, 0.6, 1.0)
_COUNTED_RUNS = tuple(run_name("spec_bench", temperature) for temperature in _TEMPERATURES)
_TIMED_TEMPERATURES = (0.1, 1.0)
_TIMED_TREE = _TREES["2 drafts, 4 steps"]
_TIMED = ("RRS with replacement", "RRS without replacement", "Greedy", "hybrid, block verification *")
_DISTRIBUTIONS = {"Alpaca": "distributions-alpaca", "CNN-DailyMail": "distributions-cnn", "WMT'14": "distributions-wmt"}
_BY_TEMPERATURE, _BY_DRAFTS = "distributions-temperature", "distributions-drafts"
_DISTRIBUTION_SCHEMES = ("rrs-wr", "kseq", "race", "rrs-wor", "greedy", "hybrid")
_SWEPT_TEMPERATURES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_SWEPT_DRAFTS = (1, 2, 3, 4, 6, 8)
_SWEPT_SCHEMES = ("rrs-wr", "kseq", "rrs-wor", "greedy", "hybrid")
_PROVED = (
    "α* of distinct drafts for n ≥ 3 rests on a formula that is proved for n ≤ 2 only; all sets were tried on tiny "
    "distributions, without an exception ([theory](../theory.md))."
)
_DISTRIBUTION_ROWS = {
    "independent: RRS": ("rrs-wr", "acceptance"),
    "independent: K-SEQ": ("kseq", "acceptance"),
    "independent: `race` *": ("race", "acceptance"),
    "independent: α*": ("rrs-wr", "optimum"),
    "distinct: RRS": ("rrs-wor", "acceptance"),
    "distinct: α*": ("rrs-wor", "optimum"),
    "distinct: α* by the paper's formula": ("rrs-wor", "paper_bound"),
    "greedy: Greedy": ("greedy", "acceptance"),
    "greedy: α*": ("greedy", "optimum"),
    "top + independent: `hybrid` *": ("hybrid", "acceptance"),
    "top + independent: α* *": ("hybrid", "optimum"),
}
"""Rows of our Table 1: how drafts are drawn and verified, and the scheme and key of the figure in the analysis."""
_TABLE_1 = [
    ["independent", "RRS", "85.4 (−1.5) / 77.3 (−3.3) / 70.6 (−1.5)", "71.6 (−1.5) / 65.3 (−2.2) / 59.8 (−1.0)",
     "63.4 (−1.0) / 56.7 (−1.1) / 32.9 (−0.2)", "59.6 (−1.0) / 46.7 (−1.6) / 38.3 (−0.4)"],
    ["independent", "K-SEQ", "85.8 (−1.1) / 78.4 (−2.2) / 71.1 (−0.9)", "71.9 (−1.1) / 66.0 (−1.5) / 60.0 (−0.8)",
     "63.9 (−0.5) / 57.0 (−0.8) / 33.0 (−0.1)", "59.9 (−0.8) / 47.2 (−1.1) / 38.3 (−0.4)"],
    ["independent", "α*", "86.9 / 80.7 / 72.0", "73.0 / 67.5 / 60.8", "64.4 / 57.8 / 33.1", "60.7 / 48.3 / 38.7"],
    ["distinct", "RRS", "88.9 (−0.9) / 81.5 (−2.8) / 75.1 (−1.0)", "75.7 (−0.8) / 70.5 (−1.3) / 63.3 (−0.1)",
     "70.9 (−0.6) / 63.4 (−0.8) / 36.9 (+0.4)", "68.3 (−1.1) / 52.4 (−1.7) / 43.9 (−0.1)"],
    ["distinct", "α*", "89.9 / 84.3 / 76.0", "76.5 / 71.8 / 63.4", "71.5 / 64.2 / 36.4", "69.4 / 54.1 / 44.0"],
    ["greedy", "Greedy", "90.7 (0.0) / 84.2 (−0.1) / 77.0 (−0.0)", "78.4 (−0.1) / 73.2 (0.1) / 66.1 (0.0)",
     "72.6 (−0.2) / 65.7 (−0.1) / 39.5 (0.1)", "69.9 (−0.0) / 54.0 (0.0) / 45.5 (0.1)"],
]  # fmt: skip
_PUBLISHED = [
    ("0.1", "RRS with replacement", "0.753 – 0.784 – 0.747 –", "3.04 – 2.83 – 3.19 –"),
    ("0.1", "RRS without replacement", "0.794 1.04× 0.804 1.03× 0.768 1.04×", "3.27 1.07× 2.96 1.05× 3.42 1.07×"),
    ("0.1", "SpecHub", "0.840 1.11× – – – –", "3.63 1.19× – – – –"),
    ("0.1", "Greedy", "0.847 1.13× 0.888 1.17× 0.791 1.08×", "3.62 1.19× 3.39 1.20× 3.70 1.16×"),
    ("0.6", "RRS with replacement", "0.788 – 0.847 – 0.762 –", "3.22 – 3.11 – 3.41 –"),
    ("0.6", "RRS without replacement", "0.824 1.07× 0.886 1.07× 0.776 1.05×", "3.52 1.09× 3.39 1.09× 3.71 1.09×"),
    ("0.6", "SpecHub", "0.823 1.02× – – – –", "3.52 1.09× – – – –"),
    ("0.6", "Greedy", "0.828 1.04× 0.900 1.09× 0.783 1.01×", "3.52 1.09× 3.45 1.11× 3.66 1.07×"),
    ("1", "RRS with replacement", "0.767 – 0.835 – 0.721 –", "3.14 – 3.09 – 3.22 –"),
    ("1", "RRS without replacement", "0.764 1.00× 0.853 1.05× 0.741 1.03×", "3.22 1.02× 3.25 1.05× 3.43 1.06×"),
    ("1", "SpecHub", "0.795 1.01× – – – –", "3.35 1.07× – – – –"),
    ("1", "Greedy", "0.792 1.02× 0.878 1.08× 0.729 0.97×", "3.33 1.06× 3.34 1.08× 3.33 1.03×"),
]
"""Rows of Tables 2 and 3: temperature, method, then α and speed, τ and ratio, each for the three trees in turn."""
_TABLE_2 = [[temperature, name, *figures.split()] for temperature, name, figures, _ in _PUBLISHED]
_TABLE_3 = [[temperature, name, *figures.split()] for temperature, name, _, figures in _PUBLISHED]


def _method(tree: str, options: str) -> str:
    return f"mcsd:{tree},{options}"


_METHODS = tuple(
    _method(tree, options)
    for tree in _TREES.values()
    for name, options in _SCHEMES.items()
    if name != "SpecHub" or tree == _TREES["2 drafts, 4 steps"]  # it takes two drafts
)


def _with_ratio(results: Results, run: str, tree: str, name: str, key: str) -> tuple[Estimate | None, Estimate | None]:
    """Return a scheme's figure, and its ratio to that of RRS with replacement on the same tree; None for RRS itself."""
    options = _SCHEMES[name]
    own, base = (results.figure(run, _method(tree, one), key) for one in (options, _BASE))
    return own, own.over(base) if own and base and options != _BASE else None


def _rows(results: Results, key: str) -> list[list[str]]:
    """Return a figure for each tree, and its ratio to that of RRS with replacement."""
    rows = []
    for temperature, run in zip(_TEMPERATURES, _COUNTED_RUNS, strict=True):
        for name in _SCHEMES:
            cells = []
            for tree in _TREES.values():
                own, ratio = _with_ratio(results, run, tree, name, key)
                cells += [text_of(own, digits=3 if key == "acceptance_rate" else 2), text_of(ratio, "×")]
            rows.append([f"{temperature:g}", name, *cells])
    return rows


def _columns(figure: str, ratio: str) -> list[str]:
    return ["T", "method", *(column for tree in _TREES for column in (f"{tree}: {figure}", ratio))]


_NOTE = "MT-Bench, target Vicuna-7B-v1.3, draft EAGLE-0.24B"
_RATIO = "ratios are to RRS with replacement on the same tree"


def _acceptance(results: Results) -> Comparison:
    return Comparison(
        key="acceptance",
        title="Table 2: acceptance rate α",
        runs=_COUNTED_RUNS,
        columns=_columns("α", "ratio"),
        ours=_rows(results, "acceptance_rate"),
        published_note=f"{_NOTE}; {_RATIO}",
        published_columns=_columns("α", "speed"),
        published=_TABLE_2,
        remark="Our ratios are of α, the paper's of speed; ours of speed stand below. α counts positions that were reached, so "
        "that a method that gets deeper meets harder ones. Ratios share their prompts and so vary less than their intervals "
        "say. Methods with a star are not in the paper.",
    )


def _speed(results: Results) -> Comparison:
    rows = []
    for name in _TIMED:
        row = [name]
        for temperature in _TIMED_TEMPERATURES:
            pair = _with_ratio(results, run_name("speed", temperature), _TIMED_TREE, name, "speedup")
            row += [text_of(one, "×") for one in pair]
        rows.append(row)
    return Comparison(
        key="speed",
        title="Table 2: speed with 2 drafts and 4 steps",
        runs=tuple(run_name("speed", temperature) for temperature in _TIMED_TEMPERATURES),
        columns=["method", *(f"T={one:g}: {what}" for one in _TIMED_TEMPERATURES for what in ("speed-up", "to RRS with"))],
        ours=rows,
    )


def _efficiency(results: Results) -> Comparison:
    return Comparison(
        key="efficiency",
        title="Table 3: block efficiency τ",
        runs=_COUNTED_RUNS,
        columns=_columns("τ", "ratio"),
        ours=_rows(results, "tokens_per_pass"),
        published_note=f"{_NOTE}; {_RATIO}",
        published_columns=_columns("τ", "ratio"),
        published=_TABLE_3,
        remark="Whether differences are significant stands among the claims above.",
    )


def _row(results: Results, run: str, scheme: str, temperature: float, drafts: int) -> dict[str, Any]:
    """Return all figures of a scheme in an analysis; empty if it was not measured."""
    for row in results.get(run, {}).get("rows", []):
        if (row["scheme"], row["drafts"]) == (scheme, drafts) and abs(row["temperature"] - temperature) < 1e-9:
            return dict(row)
    return {}


def _distribution(
    results: Results, run: str, scheme: str, key: str, *, temperature: float = 0.7, drafts: int = 3
) -> Estimate | None:
    """Return a figure of an analysis with its interval, from its standard error over prompts."""
    row = _row(results, run, scheme, temperature, drafts)
    if row.get(key) is None:
        return None
    error = "standard_error" if key == "acceptance" else f"{key}_standard_error"
    return Estimate.of_mean(row[key], row.get(error) if results[run]["settings"]["prompts"] >= LEAST_PROMPTS else None)


def _gain(
    results: Results, run: str, one: str, other: str, key: str = "acceptance", *, temperature: float = 0.7, drafts: int = 3
) -> Estimate | None:
    """Return by how much one scheme's figure exceeds another's on the same prompts, with the interval of the difference."""
    rows = [_row(results, run, scheme, temperature, drafts) for scheme in (one, other)]
    parts = [np.array(row.get(f"{key}_by_prompt") or []) for row in rows]
    if min(map(len, parts)) >= LEAST_PROMPTS:
        gains_C = parts[0] - parts[1]
        return Estimate.of_mean(float(gains_C.mean()), float(gains_C.std(ddof=1)) / math.sqrt(len(gains_C)))
    both = [_distribution(results, run, scheme, key, temperature=temperature, drafts=drafts) for scheme in (one, other)]
    return difference(*both)


def _in_percent(value: Estimate | None, sign: int = 1) -> str:
    return text_of(None if value is None else value.scaled(100 * sign), digits=1)


def _distributions(results: Results) -> Comparison:
    """Table 1: acceptance against the optimum, on three kinds of text."""
    rows = []
    for label, (scheme, key) in _DISTRIBUTION_ROWS.items():
        cells = []
        for run in _DISTRIBUTIONS.values():
            gap = _distribution(results, run, scheme, "gap") if key == "acceptance" else None
            cells += [_in_percent(_distribution(results, run, scheme, key)), _in_percent(gap, -1)]
        rows.append([label, *cells])
    return Comparison(
        key="distributions",
        title="Table 1: acceptance against the optimum",
        runs=tuple(_DISTRIBUTIONS.values()),
        columns=["drafts: verifier", *(column for name in _DISTRIBUTIONS for column in (f"{name}: α in %", "Δα"))],
        ours=rows,
        published_note="T = 0.7, 3 drafts; α in per cent (± 0.1 or 0.2), in brackets Δα, on Alpaca / CNN-DailyMail / WMT'14",
        published_columns=["drawn", "method", "OPT 125M → 6.7B", "LLaMA 68M → 7B", "EAGLE → Vicuna-7B", "EAGLE → Qwen2-7B"],
        published=_TABLE_1,
        remark="Intervals are 1.96 standard errors over prompts; Δα = α − α*, like the differences among the claims above, is "
        "paired by position and so known better than either. `race` and `hybrid` reach the optimum of their drafts, as Greedy "
        "does. The published α* of distinct drafts belongs to another way of drawing (see below). "
        f"{_PROVED}",
    )


_SWEPT = {
    "RRS wr": ("rrs-wr", "acceptance"),
    "K-SEQ wr": ("kseq", "acceptance"),
    "α* wr": ("rrs-wr", "optimum"),
    "RRS wor": ("rrs-wor", "acceptance"),
    "α* wor": ("rrs-wor", "optimum"),
    "Greedy": ("greedy", "acceptance"),
    "hybrid": ("hybrid", "acceptance"),
}


def _sweep(results: Results, run: str, temperatures: tuple[float, ...], drafts: tuple[int, ...]) -> Comparison:
    """Figure 1 or 2: acceptance as the temperature or the number of drafts varies."""
    over_temperature = len(temperatures) > 1
    places = [(temperature, count) for temperature in temperatures for count in drafts]
    columns = [f"{place[0]:g}" if over_temperature else str(place[1]) for place in places]
    series = {
        label: [_distribution(results, run, scheme, key, temperature=one, drafts=count) for one, count in places]
        for label, (scheme, key) in _SWEPT.items()
    }
    number, across = (1, "temperature T, 3 drafts") if over_temperature else (2, "number of drafts n, T=0.7")
    content = curves(series, columns, across=across, up="acceptance α", base=0.4)
    return Comparison(
        key=f"figure-{number}",
        title=f"Figure {number}: acceptance against the {'temperature' if over_temperature else 'number of drafts'}",
        runs=(run,),
        columns=[across, *columns],
        ours=[[label, *(text_of(value, digits=3) for value in values)] for label, values in series.items()],
        published_note="LLaMA-68M → 7B; the figure prints no numbers, the text states the claims",
        published=[
            ["α is not monotonic in the temperature; the gap of RRS and K-SEQ to α* grows with it"],
            ["drawing with and without replacement come closer as the temperature rises"],
        ]
        if over_temperature
        else [["α grows with the number of drafts, more so without replacement, and so does the gap of RRS and K-SEQ to α*"]],
        remark="wr: independent drafts, drawn with replacement; wor: distinct ones, drawn without. Curves of one figure share "
        f"their prompts, so that they differ by less than their intervals suggest. {_PROVED}",
        charts=[Chart(f"figure-{number}.svg", f"Figure {number}: α against {across.split(',')[0]}", content)],
    )


def _claims_of_table_1(results: Results) -> list[list[str]]:
    """Return claims that compare verifiers with their optima, and ways of drawing with each other, on each set."""
    none, rows = Estimate.exactly(0.0), []
    for name, run in _DISTRIBUTIONS.items():
        where = f"({name}, T=0.7, 3 drafts)"
        gaps = {scheme: _distribution(results, run, scheme, "gap") for scheme in ("rrs-wr", "kseq", "rrs-wor")}
        found = {
            "RRS of independent drafts stays below α*": ("α* − α", gaps["rrs-wr"]),
            "K-SEQ stays below α*": ("α* − α", gaps["kseq"]),
            "RRS of distinct drafts stays below α*": ("α* − α", gaps["rrs-wor"]),
            "drawing without replacement accepts more, by RRS": ("gain", _gain(results, run, "rrs-wor", "rrs-wr")),
            "drawing without replacement accepts more, at best": (
                "gain of α*", _gain(results, run, "rrs-wor", "rrs-wr", "optimum"),
            ),
            "Greedy accepts more than RRS of distinct drafts": ("Greedy − RRS", _gain(results, run, "greedy", "rrs-wor")),
            "Greedy accepts more than K-SEQ": ("Greedy − K-SEQ", _gain(results, run, "greedy", "kseq")),
        }  # fmt: skip
        rows += [ordering(f"{claim} {where}", figure, ("against", none)) for claim, figure in found.items()]
        claim = "Greedy accepts more than any verifier of distinct drafts"
        why = "α* here is that of sequential drawing, theirs not"
        best = _gain(results, run, "greedy", "rrs-wor", "optimum")  # Greedy reaches its own α*
        rows.append(ordering(f"{claim} {where}", ("Greedy − α*", best), ("against", none), why=why))
    return rows


def _claims_of_figures(results: Results) -> list[list[str]]:
    """Return claims on how α and the gaps change with the temperature and the number of drafts."""
    hot, many, none = _BY_TEMPERATURE, _BY_DRAFTS, Estimate.exactly(0.0)
    again = "the sweeps were made without K-SEQ; takes minutes on a GPU: `--runs {}`"
    low, high, rows = _SWEPT_TEMPERATURES[0], _SWEPT_TEMPERATURES[-1], []
    for label, scheme in (("RRS", "rrs-wr"), ("K-SEQ", "kseq")):
        pair = [(f"T={one:g}", _distribution(results, hot, scheme, "gap", temperature=one)) for one in (high, low)]
        rows.append(ordering(f"the gap of {label} to α* grows with T", *pair, missing=again.format(hot)))
        pair = [(f"n={one}", _distribution(results, many, scheme, "gap", drafts=one)) for one in (8, 2)]
        rows.append(ordering(f"the gap of {label} to α* grows with n", *pair, missing=again.format(many)))
    gains = [(f"T={one:g}", _gain(results, hot, "rrs-wor", "rrs-wr", "optimum", temperature=one)) for one in (low, high)]
    rows.append(ordering("what drawing without replacement gains in α* falls with T", *gains))
    for label, scheme in (("distinct", "rrs-wor"), ("independent", "rrs-wr")):
        ends = [_distribution(results, many, scheme, "acceptance", drafts=one) for one in (8, 1)]
        rows.append(ordering(f"α of {label} drafts grows with n, by RRS", ("n=8", ends[0]), ("n=1", ends[1])))
    more = ("without − with, n=8", _gain(results, many, "rrs-wor", "rrs-wr", drafts=8))  # with one draft they are the same
    rows.append(ordering("more drafts bring more without replacement, by RRS", more, ("n=1", none)))
    cold, cool, warm = (
        (f"T={one:g}", _distribution(results, hot, "greedy", "acceptance", temperature=one)) for one in (low, 0.25, high)
    )
    rises = ordering("α is not monotonic in T: of Greedy it rises at first", cool, cold)
    return [*rows, rises, ordering("α is not monotonic in T: of Greedy it falls then", cool, warm)]


def _claims_of_trees(results: Results) -> list[list[str]]:
    """Return claims on whole trees: what Greedy gains at each temperature, counted and timed."""

    def methods(tree: str, *names: str) -> dict[str, str]:
        return {name: _method(tree, _SCHEMES[name]) for name in names}

    cool, warm = _COUNTED_RUNS[0], _COUNTED_RUNS[-1]
    three = greedy, without, _ = ("Greedy", "RRS without replacement", "RRS with replacement")
    rows = []
    for tree, shape in _TREES.items():
        claim = f"τ at T=0.1: Greedy, RRS without, with ({tree})"
        rows.append(results.claim(claim, cool, "tokens_per_pass", methods(shape, *three), digits=2))
        leads = []
        for run in (cool, warm):
            taus = (results.figure(run, method, "tokens_per_pass") for method in methods(shape, greedy, without).values())
            leads.append(difference(*taus))
        claim = f"what Greedy gains in τ over RRS without replacement falls with T ({tree})"
        rows.append(ordering(claim, ("T=0.1", leads[0]), ("T=1", leads[1]), digits=2))
    claim = "τ at T=1: RRS without replacement, Greedy (EAGLE's sparse tree)"
    rows.append(results.claim(claim, warm, "tokens_per_pass", methods(_SPARSE, without, greedy), digits=2))
    why = "equal by theory: the paper, too, finds no significant difference"
    for temperature, run in zip(_TEMPERATURES, _COUNTED_RUNS, strict=True):
        claim = f"α of Greedy and SpecHub is the same with 2 drafts, T={temperature:g}"
        pair = methods(_TIMED_TREE, greedy, "SpecHub")
        rows.append(results.claim(claim, run, "acceptance_rate", pair, alike=True, why=why))
    claim = "speed-up at T=0.1: Greedy, RRS without, with (2 drafts, 4 steps)"
    rows.append(results.claim(claim, run_name("speed", 0.1), "speedup", methods(_TIMED_TREE, *three), digits=2))
    return rows


OPTIMAL = Paper(
    title="Towards Optimal Multi-Draft Speculative Decoding",
    runs=(
        *Run.of_acceptance("spec_bench", _TEMPERATURES, _METHODS),
        DistributionRun(name="distributions-alpaca", prompts="alpaca", schemes=_DISTRIBUTION_SCHEMES),
        DistributionRun(
            name="distributions-cnn", prompts="spec_bench", categories=("summarization",), schemes=_DISTRIBUTION_SCHEMES
        ),
        DistributionRun(name="distributions-wmt", prompts="wmt_ende", schemes=_DISTRIBUTION_SCHEMES),
        DistributionRun(name=_BY_TEMPERATURE, prompts="alpaca", temperatures=_SWEPT_TEMPERATURES, schemes=_SWEPT_SCHEMES),
        DistributionRun(name=_BY_DRAFTS, prompts="alpaca", drafts=_SWEPT_DRAFTS, schemes=_SWEPT_SCHEMES),
        *(
            Run.of_speed(temperature, ("ar", *(_method(_TIMED_TREE, _SCHEMES[name]) for name in _TIMED)))
            for temperature in _TIMED_TEMPERATURES
        ),
    ),
    tables=(
        _distributions,
        partial(_sweep, run=_BY_TEMPERATURE, temperatures=_SWEPT_TEMPERATURES, drafts=(3,)),
        partial(_sweep, run=_BY_DRAFTS, temperatures=(0.7,), drafts=_SWEPT_DRAFTS),
        _acceptance,
        _speed,
        _efficiency,
    ),
    claims=(_claims_of_table_1, _claims_of_figures, _claims_of_trees),
    contest=tuple(
        (name, run_name("speed", 1.0), _method(_TIMED_TREE, _SCHEMES[name]))
        for name in ("Greedy", "hybrid, block verification *")
    ),
)
PAPERS.register("optimal")(OPTIMAL)
