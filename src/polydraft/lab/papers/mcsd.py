"""*Multi-Candidate Speculative Decoding*: Tables 1 to 7, Figures 3 to 5."""

from polydraft.lab.charts import Drawing, curves, grouped_columns
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, ordering, text_of

_WIDTHS = (1, 2, 4, 8, 16, 32)
_SETS = {"alpaca": "Alpaca", "wmt_ende": "WMT"}
_TEMPERATURES = (0.0, 1.0)


def _tree(shape: object, scheme: str = "rrs-wor") -> str:
    """Name the paper's own way of verifying a tree, whatever is the default here."""
    return f"mcsd:{shape},scheme={scheme},walk=node"


def _run(prompts: str, temperature: float) -> str:
    return f"{prompts}-t{temperature:g}"


_CHAINS = ("sd:2,scheme=speculative,walk=node", "sd:5,scheme=speculative,walk=node")
_TREES = (_tree("4x2x2x1x1"), _tree("8x2x1x1"), _tree("16x1x1"))
# γ = 2 (Fig. 4): each budget K with its falling and its rising configuration.
_BUDGETS = {8: ("4x2", "2x4"), 16: ("8x2", "4x4", "2x8"), 32: ("16x2", "8x4", "4x8", "2x16")}
_BY_DEPTH = _TREES[0]
_ABLATION = {
    "MCSS without replacement, tree attention": _tree("8x2x1x1"),
    "MCSS with replacement, tree attention": _tree("8x2x1x1", "rrs-wr"),
    "MCNS, tree attention": _tree("8x2x1x1", "naive"),
    "SD, γ = 4": "sd:4,scheme=speculative,walk=node",
    "MCSS without replacement, copied caches": _tree("8x2x1x1") + ",attention=flat",
}
_FLAT = _ABLATION["MCSS without replacement, copied caches"]
_COUNTED = (*(_tree(width) for width in _WIDTHS), *_CHAINS, *_TREES)
_ONLY_ALPACA = (
    *(_tree(shape) for shapes in _BUDGETS.values() for shape in shapes),
    *(method for method in _ABLATION.values() if method != _FLAT),
)
_TIMED = ("ar", _CHAINS[1], *_TREES[:2], *(_tree(shapes[0]) for shapes in _BUDGETS.values()))


def _acceptance_by_width(results: Results) -> Comparison:
    cells = {
        (name, temperature): [
            results.get_figure(_run(prompts, temperature), _tree(width), "acceptance_rate") for width in _WIDTHS
        ]
        for prompts, name in _SETS.items()
        for temperature in _TEMPERATURES
    }
    rows = [[name, f"{temperature:g}", *map(text_of, values)] for (name, temperature), values in cells.items()]
    series = {f"{name} T={temperature:g}": values for (name, temperature), values in cells.items()}
    content = curves(series, [str(width) for width in _WIDTHS], across="candidates k", up="acceptance rate α")
    known = [[value for value in values if value is not None] for values in cells.values()]
    measured = [values for values in known if len(values) == len(_WIDTHS)]
    rising = sum(values == sorted(values) for values in measured)
    return Comparison(
        key="acceptance",
        title="Tables 1 and 7, Figures 3 and 5: acceptance rate α with k candidates",
        runs=tuple(_run(prompts, temperature) for prompts in _SETS for temperature in _TEMPERATURES),
        columns=["set", "T", *(f"k={width}" for width in _WIDTHS)],
        ours=rows,
        published_note="Table 7, draft LLaMA-68M, RTX A6000, k = 1 → 4; Figures 3 and 5 print no numbers",
        published_columns=["target", "T", "Alpaca k=1 → 4", "WMT k=1 → 4"],
        published=[
            ["LLaMA-13B", "0", "0.76 → 0.88", "0.55 → 0.68"],
            ["Vicuna-13B", "0", "0.49 → 0.67", "0.36 → 0.51"],
            ["LLaMA-13B", "1", "0.51 → 0.72", "0.39 → 0.56"],
            ["Vicuna-13B", "1", "0.35 → 0.57", "0.25 → 0.41"],
        ],
        remark=f"The paper finds that α always grows with k and levels off beyond 32. Here it grows in {rising} of "
        f"{len(measured)} rows.",
        drawings=[Drawing("figure-3.svg", "Figure 3: acceptance rate α against the number of candidates k", content)],
    )


def _by_depth(results: Results) -> Comparison:
    cells = {
        (name, temperature): results.figures(_run(prompts, temperature), _BY_DEPTH).get("acceptance_by_depth", [])
        for prompts, name in _SETS.items()
        for temperature in _TEMPERATURES
    }
    padded = {key: [*values, *[None] * 5][:5] for key, values in cells.items()}
    content = curves(
        {f"{name} T={temperature:g}": values for (name, temperature), values in padded.items()},
        [f"{depth} (k={width})" for depth, width in enumerate((4, 2, 2, 1, 1), start=1)],
        across="depth in the tree 4x2x2x1x1, with its candidates k",
        up="acceptance rate α",
    )
    return Comparison(
        key="depth",
        title="Acceptance by depth (not in the paper)",
        runs=tuple(_run(prompts, temperature) for prompts in _SETS for temperature in _TEMPERATURES),
        columns=["set", "T", *(f"depth {depth}" for depth in range(1, 6))],
        ours=[[name, f"{temperature:g}", *map(text_of, values)] for (name, temperature), values in padded.items()],
        drawings=[Drawing("depth.svg", "Acceptance rate α by depth of the tree 4x2x2x1x1", content)],
    )


def _speed(results: Results) -> Comparison:
    rows = []
    for temperature in _TEMPERATURES:
        for name in ("ar", *_CHAINS, *_TREES):
            timed = f"speed-t{temperature:g}"
            efficiency = [results.text(_run(prompts, temperature), name, "tokens_per_pass") for prompts in _SETS]
            speed = results.text(timed, name, "speedup", "×")
            rows.append([f"`{name}`", f"{temperature:g}", *(efficiency if name != "ar" else ["1", "1"]), speed])
    return Comparison(
        key="speed",
        title="Tables 2, 3, 5 and 6: block efficiency τ and speed-up",
        runs=(*(_run(prompts, temperature) for prompts in _SETS for temperature in _TEMPERATURES), "speed-t0", "speed-t1"),
        columns=["method", "T", "τ, Alpaca", "τ, WMT", "speed-up, MT-bench"],
        ours=rows,
        published_note="Table 2, target LLaMA-33B / Vicuna-33B on two RTX A6000, draft LLaMA-68M; best γ and best k",
        published_columns=["set", "method", "T", "LLaMA-33B", "τ", "Vicuna-33B", "τ"],
        published=[
            ["Alpaca", "SD", "0", "2.89×", "3.70", "1.70×", "2.03"],
            ["Alpaca", "MCSD (4x2x2x1x1 / 8x2x1x1)", "0", "3.06×", "3.93", "2.06×", "2.56"],
            ["Alpaca", "SD", "1", "1.73×", "2.02", "1.34×", "1.58"],
            ["Alpaca", "MCSD (8x2x1x1 / 16x1x1)", "1", "2.17×", "2.71", "1.73×", "2.10"],
            ["WMT", "SD", "0", "2.06×", "2.52", "1.15×", "1.29"],
            ["WMT", "MCSD (4x2x2x1x1 / 16x2)", "0", "2.24×", "2.87", "1.45×", "1.73"],
            ["WMT", "SD", "1", "1.43×", "1.69", "1.14×", "1.31"],
            ["WMT", "MCSD (8x2x1 / 16x2)", "1", "1.72×", "2.08", "1.42×", "1.70"],
        ],
        remark="Tables 3, 5 and 6 are the same with a larger draft (LLaMA-160M) and 13B targets. We have one pair.",
    )


def _budgets(results: Results) -> Comparison:
    rows, kept, asked = [], 0, 0
    for temperature in _TEMPERATURES:
        run, timed = _run("alpaca", temperature), f"speed-t{temperature:g}"
        for budget, shapes in _BUDGETS.items():
            for shape in shapes:
                figures = [
                    results.text(run, _tree(shape), "tokens_per_pass"), results.text(timed, _tree(shape), "speedup", "×")
                ]  # fmt: skip
                rows.append([f"{temperature:g}", f"K={budget}", shape, *figures])
            falling, rising = (results.get_figure(run, _tree(shape), "tokens_per_pass") for shape in (shapes[0], shapes[-1]))
            if falling is not None and rising is not None:
                asked += 1
                kept += falling >= rising
    return Comparison(
        key="budgets",
        title="Figure 4: budgets at γ = 2, K ≤ 32, and the monotonic rule",
        runs=(*(_run("alpaca", temperature) for temperature in _TEMPERATURES), "speed-t0", "speed-t1"),
        columns=["T", "budget", "configuration", "τ", "speed-up"],
        ours=rows,
        published_note="Alpaca, 13B targets; the figure prints no numbers, the text states the rule",
        published=[
            ["for the same budget, decreasing configurations (4x2) beat increasing ones (2x4)"],
            ["K = 32 has a higher τ than K = 16 but a lower speed-up"],
        ],
        remark=f"Here the decreasing configuration reaches at least the τ of the increasing one in {kept} of {asked} pairs.",
        drawings=[_figure_4(results)],
    )


def _figure_4(results: Results) -> Drawing:
    series = {
        f"T={temperature:g}": [
            results.get_figure(_run("alpaca", temperature), _tree(shape), "tokens_per_pass")
            for shapes in _BUDGETS.values()
            for shape in shapes
        ]
        for temperature in _TEMPERATURES
    }
    groups = {f"K = {budget}": shapes for budget, shapes in _BUDGETS.items()}
    # A pass without any draft yields one token, so columns stand on 1.
    content = grouped_columns(series, groups, base=1.0, across="k-configuration, by budget K", up="block efficiency τ")
    return Drawing("figure-4.svg", "Figure 4: block efficiency τ of each k-configuration, by budget K", content)


def _ablation(results: Results) -> Comparison:
    rows = []
    for name, method in _ABLATION.items():
        counted = "speed-t1" if method == _FLAT else _run("alpaca", 1.0)
        figures = [results.text(counted, method, "acceptance_rate"), results.text(counted, method, "tokens_per_pass")]
        rows.append([name, *figures, results.text("speed-t1", method, "speedup", "×")])
    return Comparison(
        key="ablation",
        title="Table 4: tree attention and verification algorithms, T=1",
        runs=("alpaca-t1", "speed-t1"),
        columns=["algorithm, 8x2x1x1", "α", "τ", "speed-up"],
        ours=rows,
        published_note="Alpaca, T=1, target LLaMA-13B / Vicuna-13B, draft LLaMA-68M",
        published_columns=["algorithm", "LLaMA-13B", "τ", "Vicuna-13B", "τ"],
        published=[
            ["MCSS without replacement, tree attention", "1.91×", "2.45", "1.64×", "2.00"],
            ["MCSS with replacement, tree attention", "1.89×", "2.39", "1.55×", "1.95"],
            ["MCNS, tree attention", "1.21×", "1.52", "1.45×", "1.78"],
            ["MCSS without replacement, copied caches", "1.61×", "2.47", "1.36×", "1.99"],
        ],
        remark="Copied caches are verified as the tree is; their row counts the few timed prompts only.",
    )


def _tables(results: Results) -> list[Comparison]:
    return [
        _acceptance_by_width(results), _by_depth(results), _speed(results), _budgets(results), _ablation(results)
    ]  # fmt: skip


def _orderings(results: Results) -> list[list[str]]:
    labels = ("without replacement", "with replacement", "naive")
    rates = [results.get_figure("alpaca-t1", method, "tokens_per_pass") for method in list(_ABLATION.values())[:3]]
    efficiency = [results.get_figure("alpaca-t1", _tree(shape), "tokens_per_pass") for shape in ("8x2", "2x8")]
    speeds = [results.get_figure("speed-t1", method, "speedup") for method in (_tree("8x2x1x1"), _FLAT)]
    return [
        ordering("τ at T=1: MCSS without replacement, with, naive", *zip(labels, rates, strict=True)),
        ordering("τ of falling and rising widths (T=1)", *zip(("8x2", "2x8"), efficiency, strict=True)),
        ordering("speed-up: tree attention, copied caches (T=1)", *zip(("tree", "copied"), speeds, strict=True), digits=2),
    ]


MCSD = Paper(
    title="Multi-Candidate Speculative Decoding",
    runs=(
        *(
            Run(name=_run("alpaca", temperature), prompts="alpaca", temperature=temperature, methods=_COUNTED + _ONLY_ALPACA)
            for temperature in _TEMPERATURES
        ),
        *(
            Run(name=_run("wmt_ende", temperature), prompts="wmt_ende", temperature=temperature, methods=_COUNTED)
            for temperature in _TEMPERATURES
        ),
        Run(name="speed-t0", prompts="spec_bench", temperature=0.0, methods=_TIMED, timed=True),
        Run(
            name="speed-t1",
            prompts="spec_bench",
            temperature=1.0,
            methods=(*_TIMED[:4], *list(_ABLATION.values())[1:3], _FLAT),
            timed=True,
        ),
    ),
    tables=_tables,
    orderings=_orderings,
    contest=tuple(
        (label, f"speed-t{temperature}", method)
        for temperature in (0, 1)
        for label, method in (("plain decoding", "ar"), ("SD, γ = 5", _CHAINS[1]), ("MCSD", _TREES[0]))
    ),
)
PAPERS.register("mcsd")(MCSD)
