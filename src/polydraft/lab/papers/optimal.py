"""*Towards Optimal Multi-Draft Speculative Decoding*: Tables 1 to 3, Figures 1 and 2."""

from typing import Any

from polydraft.lab.charts import Drawing, curves
from polydraft.lab.papers.paper import PAPERS, Comparison, DistributionRun, Paper, Results, Run, ordering, text_of

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
"""The paper's methods, which verify node by node, and with a star what it does not run."""
_ONLY_PAIRS = "SpecHub"
_TEMPERATURES = (0.1, 0.6, 1.0)
_TIMED_TEMPERATURES = (0.1, 1.0)
_TIMED_TREE = _TREES["2 drafts, 4 steps"]
_TIMED = ("RRS with replacement", "RRS without replacement", "Greedy", "hybrid, block verification *")
_DISTRIBUTIONS = {"Alpaca": "distributions-alpaca", "CNN-DailyMail": "distributions-cnn", "WMT'14": "distributions-wmt"}
_DISTRIBUTION_SCHEMES = ("rrs-wr", "kseq", "race", "rrs-wor", "greedy", "hybrid")
_SWEPT_TEMPERATURES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_SWEPT_DRAFTS = (1, 2, 3, 4, 6, 8)
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
"""How drafts are drawn and verified, and where the figure stands in a row of the analysis."""


def _method(tree: str, options: str) -> str:
    return f"mcsd:{tree},{options}"


_METHODS = tuple(
    _method(tree, options)
    for tree in _TREES.values()
    for name, options in _SCHEMES.items()
    if name != _ONLY_PAIRS or tree == _TREES["2 drafts, 4 steps"]
)


def _timed_run(temperature: float) -> str:
    return f"speed-t{temperature:g}"


def _rows(results: Results, key: str) -> list[list[str]]:
    """Return a figure for each tree, and how it compares with RRS with replacement there."""
    rows = []
    for temperature in _TEMPERATURES:
        run = f"spec_bench-t{temperature:g}"
        for name, options in _SCHEMES.items():
            cells = []
            for tree in _TREES.values():
                own, base = (results.get_figure(run, _method(tree, one), key) for one in (options, _BASE))
                ratio = f"{own / base:.2f}×" if own and base and options != _BASE else "–"
                cells += [text_of(own, digits=3 if key == "acceptance_rate" else 2), ratio]
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
        runs=tuple(f"spec_bench-t{temperature:g}" for temperature in _TEMPERATURES),
        columns=_columns("α", "ratio"),
        ours=_rows(results, "acceptance_rate"),
        published_note=f"{_NOTE}; {_RATIO}",
        published_columns=_columns("α", "speed"),
        published=[
            ["0.1", "RRS with replacement", "0.753", "–", "0.784", "–", "0.747", "–"],
            ["0.1", "RRS without replacement", "0.794", "1.04×", "0.804", "1.03×", "0.768", "1.04×"],
            ["0.1", "SpecHub", "0.840", "1.11×", "–", "–", "–", "–"],
            ["0.1", "Greedy", "0.847", "1.13×", "0.888", "1.17×", "0.791", "1.08×"],
            ["0.6", "RRS with replacement", "0.788", "–", "0.847", "–", "0.762", "–"],
            ["0.6", "RRS without replacement", "0.824", "1.07×", "0.886", "1.07×", "0.776", "1.05×"],
            ["0.6", "SpecHub", "0.823", "1.02×", "–", "–", "–", "–"],
            ["0.6", "Greedy", "0.828", "1.04×", "0.900", "1.09×", "0.783", "1.01×"],
            ["1", "RRS with replacement", "0.767", "–", "0.835", "–", "0.721", "–"],
            ["1", "RRS without replacement", "0.764", "1.00×", "0.853", "1.05×", "0.741", "1.03×"],
            ["1", "SpecHub", "0.795", "1.01×", "–", "–", "–", "–"],
            ["1", "Greedy", "0.792", "1.02×", "0.878", "1.08×", "0.729", "0.97×"],
        ],
        remark="Our ratios are of α, the paper's of speed; ours of speed stand below. α counts positions that were reached, so "
        "that a method that gets deeper meets harder ones. Methods with a star are not in the paper.",
    )


def _speed(results: Results) -> Comparison:
    rows = []
    for name in _TIMED:
        row = [name]
        for temperature in _TIMED_TEMPERATURES:
            run, method = _timed_run(temperature), _method(_TIMED_TREE, _SCHEMES[name])
            own, base = (results.get_figure(run, one, "tokens_per_second") for one in (method, _method(_TIMED_TREE, _BASE)))
            ratio = f"{own / base:.2f}×" if own and base else "–"
            row += [results.text(run, method, "speedup", "×"), ratio]
        rows.append(row)
    return Comparison(
        key="speed",
        title="Table 2: speed with 2 drafts and 4 steps",
        runs=tuple(map(_timed_run, _TIMED_TEMPERATURES)),
        columns=["method", *(f"T={one:g}: {what}" for one in _TIMED_TEMPERATURES for what in ("speed-up", "to RRS with"))],
        ours=rows,
    )


def _efficiency(results: Results) -> Comparison:
    return Comparison(
        key="efficiency",
        title="Table 3: block efficiency τ",
        runs=tuple(f"spec_bench-t{temperature:g}" for temperature in _TEMPERATURES),
        columns=_columns("τ", "ratio"),
        ours=_rows(results, "tokens_per_pass"),
        published_note=f"{_NOTE}; {_RATIO}",
        published_columns=_columns("τ", "ratio"),
        published=[
            ["0.1", "RRS with replacement", "3.04", "–", "2.83", "–", "3.19", "–"],
            ["0.1", "RRS without replacement", "3.27", "1.07×", "2.96", "1.05×", "3.42", "1.07×"],
            ["0.1", "SpecHub", "3.63", "1.19×", "–", "–", "–", "–"],
            ["0.1", "Greedy", "3.62", "1.19×", "3.39", "1.20×", "3.70", "1.16×"],
            ["0.6", "RRS with replacement", "3.22", "–", "3.11", "–", "3.41", "–"],
            ["0.6", "RRS without replacement", "3.52", "1.09×", "3.39", "1.09×", "3.71", "1.09×"],
            ["0.6", "SpecHub", "3.52", "1.09×", "–", "–", "–", "–"],
            ["0.6", "Greedy", "3.52", "1.09×", "3.45", "1.11×", "3.66", "1.07×"],
            ["1", "RRS with replacement", "3.14", "–", "3.09", "–", "3.22", "–"],
            ["1", "RRS without replacement", "3.22", "1.02×", "3.25", "1.05×", "3.43", "1.06×"],
            ["1", "SpecHub", "3.35", "1.07×", "–", "–", "–", "–"],
            ["1", "Greedy", "3.33", "1.06×", "3.34", "1.08×", "3.33", "1.03×"],
        ],
        remark=_greedy_remark(results),
    )


def _greedy_remark(results: Results) -> str:
    """Say whether what the paper finds of its own method is seen here."""
    leads = []
    for temperature in _TEMPERATURES:
        for tree in _TREES.values():
            methods = [_method(tree, _SCHEMES[name]) for name in ("Greedy", "RRS with replacement")]
            greedy, base = (results.get_figure(f"spec_bench-t{temperature:g}", method, "tokens_per_pass") for method in methods)
            leads.append(bool(greedy and base and greedy >= base))
    return (
        f"The paper's greedy drafts yield at least as many tokens per pass as RRS with replacement in {sum(leads)} of "
        f"{len(leads)} cases here; in the paper they always do, by less at higher temperatures."
    )


def _distribution(results: Results, run: str, scheme: str, key: str, *, temperature: float, drafts: int) -> float | None:
    """Return a figure of an analysis."""
    rows: list[dict[str, Any]] = results.get(run, {}).get("rows", [])
    found = [
        row[key]
        for row in rows
        if (row["scheme"], row["drafts"]) == (scheme, drafts) and abs(row["temperature"] - temperature) < 1e-9
    ]
    return found[0] if found else None


def _distributions(results: Results) -> Comparison:
    """Table 1: acceptance against the optimum, on three kinds of text."""
    rows = []
    for label, (scheme, key) in _DISTRIBUTION_ROWS.items():
        values = [_distribution(results, run, scheme, key, temperature=0.7, drafts=3) for run in _DISTRIBUTIONS.values()]
        rows.append([label, *(text_of(None if value is None else 100 * value, digits=1) for value in values)])
    return Comparison(
        key="distributions",
        title="Table 1: acceptance against the optimum",
        runs=tuple(_DISTRIBUTIONS.values()),
        columns=["drafts: verifier", *(f"{name}, α in %" for name in _DISTRIBUTIONS)],
        ours=rows,
        published_note="T = 0.7, 3 drafts; α in per cent on Alpaca / CNN-DailyMail / WMT'14",
        published_columns=["drawn", "method", "OPT 125M → 6.7B", "LLaMA 68M → 7B", "EAGLE → Vicuna-7B", "EAGLE → Qwen2-7B"],
        published=[
            ["independent", "RRS", "85.4 / 77.3 / 70.6", "71.6 / 65.3 / 59.8", "63.4 / 56.7 / 32.9", "59.6 / 46.7 / 38.3"],
            ["independent", "K-SEQ", "85.8 / 78.4 / 71.1", "71.9 / 66.0 / 60.0", "63.9 / 57.0 / 33.0", "59.9 / 47.2 / 38.3"],
            ["independent", "α*", "86.9 / 80.7 / 72.0", "73.0 / 67.5 / 60.8", "64.4 / 57.8 / 33.1", "60.7 / 48.3 / 38.7"],
            ["distinct", "RRS", "88.9 / 81.5 / 75.1", "75.7 / 70.5 / 63.3", "70.9 / 63.4 / 36.9", "68.3 / 52.4 / 43.9"],
            ["distinct", "α*", "89.9 / 84.3 / 76.0", "76.5 / 71.8 / 63.4", "71.5 / 64.2 / 36.4", "69.4 / 54.1 / 44.0"],
            ["greedy", "Greedy", "90.7 / 84.2 / 77.0", "78.4 / 73.2 / 66.1", "72.6 / 65.7 / 39.5", "69.9 / 54.0 / 45.5"],
        ],
        remark=_distribution_remark(results),
    )


def _distribution_remark(results: Results) -> str:
    """Say whether the paper's order holds: the optimum, K-SEQ, RRS."""
    kept = asked = 0
    for run in _DISTRIBUTIONS.values():
        values = [
            _distribution(results, run, scheme, key, temperature=0.7, drafts=3)
            for scheme, key in (("rrs-wr", "optimum"), ("kseq", "acceptance"), ("rrs-wr", "acceptance"))
        ]
        known = [value for value in values if value is not None]
        asked += len(known) == len(values)
        kept += len(known) == len(values) and known == sorted(known, reverse=True)
    return (
        f"The paper's order α* ≥ K-SEQ ≥ RRS holds on {kept} of {asked} sets here. `race` and `hybrid` reach the optimum of "
        "their drafts, as Greedy does. The published α* of distinct drafts belongs to another way of drawing (see below)."
    )


_SWEPT = {
    "RRS wr": ("rrs-wr", "acceptance"),
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
        else [["α grows with the number of drafts, more so without replacement, and so does the gap of RRS to α*"]],
        drawings=[Drawing(f"figure-{number}.svg", f"Figure {number}: α against {across.split(',')[0]}", content)],
    )


def _tables(results: Results) -> list[Comparison]:
    return [
        _distributions(results),
        _sweep(results, "distributions-temperature", _SWEPT_TEMPERATURES, (3,)),
        _sweep(results, "distributions-drafts", (0.7,), _SWEPT_DRAFTS),
        _acceptance(results),
        _speed(results),
        _efficiency(results),
    ]


def _orderings(results: Results) -> list[list[str]]:
    distributions = {"α*": ("rrs-wr", "optimum"), "K-SEQ": ("kseq", "acceptance"), "RRS": ("rrs-wr", "acceptance")}
    schemes = {"Greedy": "greedy", "RRS without": "rrs-wor", "RRS with": "rrs-wr"}
    pairs = {
        label: _distribution(results, "distributions-alpaca", *place, temperature=0.7, drafts=3)
        for label, place in distributions.items()
    }
    low = {
        label: results.get_figure("spec_bench-t0.1", _method(_TIMED_TREE, f"scheme={scheme},walk=node"), "tokens_per_pass")
        for label, scheme in schemes.items()
    }
    return [
        ordering("α of independent drafts: optimum, K-SEQ, RRS (Alpaca, T=0.7, 3 drafts)", *pairs.items()),
        ordering("τ at T=0.1: Greedy, RRS without replacement, with (2 drafts, 4 steps)", *low.items()),
    ]


def _distribution_run(name: str, prompts: str, *categories: str) -> DistributionRun:
    return DistributionRun(
        name=name, prompts=prompts, categories=categories, temperatures=(0.7,), drafts=(3,), schemes=_DISTRIBUTION_SCHEMES
    )  # fmt: skip


OPTIMAL = Paper(
    title="Towards Optimal Multi-Draft Speculative Decoding",
    runs=(
        *(
            Run(name=f"spec_bench-t{temperature:g}", prompts="spec_bench", temperature=temperature, methods=_METHODS)
            for temperature in _TEMPERATURES
        ),
        _distribution_run("distributions-alpaca", "alpaca"),
        _distribution_run("distributions-cnn", "spec_bench", "summarization"),
        _distribution_run("distributions-wmt", "wmt_ende"),
        DistributionRun(
            name="distributions-temperature",
            prompts="alpaca",
            temperatures=_SWEPT_TEMPERATURES,
            drafts=(3,),
            schemes=("rrs-wr", "rrs-wor", "greedy", "hybrid"),
        ),
        DistributionRun(
            name="distributions-drafts",
            prompts="alpaca",
            temperatures=(0.7,),
            drafts=_SWEPT_DRAFTS,
            schemes=("rrs-wr", "rrs-wor", "greedy", "hybrid"),
        ),
        *(
            Run(
                name=_timed_run(temperature),
                prompts="spec_bench",
                temperature=temperature,
                methods=("ar", *(_method(_TIMED_TREE, _SCHEMES[name]) for name in _TIMED)),
                timed=True,
            )
            for temperature in _TIMED_TEMPERATURES
        ),
    ),
    tables=_tables,
    orderings=_orderings,
    contest=tuple(
        (label, _timed_run(1.0), _method(_TIMED_TREE, _SCHEMES[name]))
        for label, name in (("Greedy", "Greedy"), ("hybrid, block verification *", "hybrid, block verification *"))
    ),
)
PAPERS.register("optimal")(OPTIMAL)
