"""*Multi-Candidate Speculative Decoding*: Tables 2 and 4, Figures 3 to 5. Tables 1, 3 and 5 to 7 are in `mcsd_pairs`."""

from polydraft.lab.charts import Chart, curves, grouped_columns
from polydraft.lab.estimate import Estimate
from polydraft.lab.papers.mcsd_pairs import CHAIN, RUNS, SETS, TEMPERATURES, TREE, pair_claims, pairs_table
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, contest, ordering, run_name, text_of

_WIDTHS = (1, 2, 4, 8, 16, 32)
_COUNTED_RUNS = tuple(run_name(prompts, temperature) for prompts in SETS for temperature in TEMPERATURES)


def _tree(shape: object, scheme: str = "rrs-wor") -> str:
    """Return the method for a tree verified as in the paper, whatever our default is."""
    return f"mcsd:{shape},scheme={scheme},walk=node"


_CHAINS = tuple(f"sd:{length},scheme=speculative,walk=node" for length in (1, 2, 3, 5, 7, 10))
_TREES = tuple(map(_tree, ("4x2x2x1x1", "8x2x1x1", "16x1x1", "2x2x2x1x1", "4x2x2x1", "4x2x2", "8x2x1", "8x2x2")))
# γ = 2 (Fig. 4): each budget K with its configurations, from falling to rising widths.
_BUDGETS = {8: ("4x2", "2x4"), 16: ("8x2", "4x4", "2x8"), 32: ("16x2", "8x4", "4x8", "2x16")}
assert CHAIN in _CHAINS and TREE in _TREES
_ABLATION = {
    "MCSS without replacement, tree attention": _tree("8x2x1x1"),
    "MCSS with replacement, tree attention": _tree("8x2x1x1", "rrs-wr"),
    "MCNS, tree attention": _tree("8x2x1x1", "naive"),
    "SD, γ = 4": "sd:4,scheme=speculative,walk=node",
}
# Copied caches cannot be captured, so for comparison tree attention is timed without captures too.
_EAGER, _FLAT = (f"{_tree('8x2x1x1')},{how}" for how in ("graphs=no", "attention=flat"))
_UNCAPTURED = {
    "MCSS without replacement, tree attention": _EAGER,
    "MCSS without replacement, copied caches": _FLAT,
}
_COUNTED = (*(_tree(width) for width in _WIDTHS), _CHAINS[1], CHAIN, *_TREES[:3])
_ONLY_ALPACA = (
    *_CHAINS,
    *_TREES,
    *(_tree(shape) for shapes in _BUDGETS.values() for shape in shapes),
    *_ABLATION.values(),
)
_SEARCHED = (*_TREES, *(_tree(shapes[0]) for shapes in _BUDGETS.values()))
_TIMED = ("ar", *_CHAINS, *_SEARCHED)


def _acceptance_by_width(results: Results) -> Comparison:
    cells = {
        (name, temperature): [
            results.figure(run_name(prompts, temperature), _tree(width), "acceptance_rate") for width in _WIDTHS
        ]
        for prompts, name in SETS.items()
        for temperature in TEMPERATURES
    }
    rows = [[name, f"{temperature:g}", *map(text_of, values)] for (name, temperature), values in cells.items()]
    series = {f"{name} T={temperature:g}": values for (name, temperature), values in cells.items()}
    content = curves(series, [str(width) for width in _WIDTHS], across="candidates k", up="acceptance rate α")
    return Comparison(
        key="acceptance",
        title="Figures 3 and 5: acceptance rate α with k candidates",
        runs=_COUNTED_RUNS,
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
        remark="The paper finds that α always grows with k and levels off beyond 32.",
        charts=[Chart("figure-3.svg", "Figure 3: acceptance rate α against the number of candidates k", content)],
    )


def _best(results: Results, temperature: float, methods: tuple[str, ...], least: int = 1) -> tuple[str, float | None]:
    """Return the fastest of some methods with its speed-up, as the paper's search does.

    Return no method if fewer than `least` were timed.
    """
    found = {method: results.figure(f"speed-t{temperature:g}", method, "speedup") for method in methods}
    known = {method: value for method, value in found.items() if value is not None}
    if len(known) < least:
        return "", None
    best = max(known, key=lambda method: known[method])
    return best, known[best]


def _speed(results: Results) -> Comparison:
    rows, winners = [], []
    for temperature in TEMPERATURES:
        best = [_best(results, temperature, methods, least=2) for methods in (_CHAINS, _SEARCHED)]
        if None not in (best[0][1], best[1][1]):
            winners.append(f"at T={temperature:g} {' and '.join(f'`{name}` ({text_of(value)}×)' for name, value in best)}")
        for name in ("ar", *_CHAINS, *_SEARCHED):
            efficiency = [results.text(run_name(prompts, temperature), name, "tokens_per_pass") for prompts in SETS]
            speed = results.text(f"speed-t{temperature:g}", name, "speedup", "×")
            speed = f"**{speed}**" if name in (best[0][0], best[1][0]) else speed
            rows.append([f"`{name}`", f"{temperature:g}", *(efficiency if name != "ar" else ["1", "1"]), speed])
    return Comparison(
        key="speed",
        title="Table 2: block efficiency τ and speed-up, and the search for γ and k",
        runs=(*_COUNTED_RUNS, "speed-t0", "speed-t1"),
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
        remark="The paper searches for the best γ and the best configuration, k ∈ {1, 2, 4, 8, 16, 32} and K ≤ 32."
        + (f" Of the chains and trees above, the fastest of each: {'; '.join(winners)}." if winners else ""),
    )


def _budgets(results: Results) -> Comparison:
    rows = []
    for temperature in TEMPERATURES:
        run, timed = run_name("alpaca", temperature), f"speed-t{temperature:g}"
        for budget, shapes in _BUDGETS.items():
            for shape in shapes:
                figures = [
                    results.text(run, _tree(shape), "tokens_per_pass"), results.text(timed, _tree(shape), "speedup", "×")
                ]  # fmt: skip
                rows.append([f"{temperature:g}", f"K={budget}", shape, *figures])
    return Comparison(
        key="budgets",
        title="Figure 4: budgets at γ = 2, K ≤ 32, and the monotonic rule",
        runs=("alpaca-t0", "alpaca-t1", "speed-t0", "speed-t1"),
        columns=["T", "budget", "configuration", "τ", "speed-up"],
        ours=rows,
        published_note="Alpaca, 13B targets; the figure prints no numbers, the text states the rule",
        published=[
            ["for the same budget, decreasing configurations (4x2) beat increasing ones (2x4)"],
            ["K = 32 has a higher τ than K = 16 but a lower speed-up"],
        ],
        charts=[_figure_4(results)],
    )


def _figure_4(results: Results) -> Chart:
    series = {
        f"T={temperature:g}": [
            results.figure(run_name("alpaca", temperature), _tree(shape), "tokens_per_pass")
            for shapes in _BUDGETS.values()
            for shape in shapes
        ]
        for temperature in TEMPERATURES
    }
    groups = {f"K = {budget}": shapes for budget, shapes in _BUDGETS.items()}
    # Columns stand on 1, because a pass without drafts yields one token.
    content = grouped_columns(series, groups, base=1.0, across="k-configuration, by budget K", up="block efficiency τ")
    return Chart("figure-4.svg", "Figure 4: block efficiency τ of each k-configuration, by budget K", content)


def _ablation(results: Results) -> Comparison:
    rows = []
    for captured, methods in ((True, _ABLATION), (False, _UNCAPTURED)):
        for name, method in methods.items():
            counted = run_name("alpaca", 1.0) if captured else "speed-t1"
            figures = [results.text(counted, method, key) for key in ("acceptance_rate", "tokens_per_pass")]
            speed = results.text("speed-t1", method, "speedup", "×")
            rows.append([name, "captured" if captured else "eager", *figures, speed])
    return Comparison(
        key="ablation",
        title="Table 4: tree attention and verification algorithms, T=1",
        runs=("alpaca-t1", "speed-t1"),
        columns=["algorithm, 8x2x1x1", "rounds", "α", "τ", "speed-up"],
        ours=rows,
        published_note="Alpaca, T=1, target LLaMA-13B / Vicuna-13B, draft LLaMA-68M",
        published_columns=["algorithm", "LLaMA-13B", "τ", "Vicuna-13B", "τ"],
        published=[
            ["MCSS without replacement, tree attention", "1.91×", "2.45", "1.64×", "2.00"],
            ["MCSS with replacement, tree attention", "1.89×", "2.39", "1.55×", "1.95"],
            ["MCNS, tree attention", "1.21×", "1.52", "1.45×", "1.78"],
            ["MCSS without replacement, copied caches", "1.61×", "2.47", "1.36×", "1.99"],
        ],
        remark="On a GPU rounds are captured as graphs, which rounds with copied caches cannot be: compare the two eager rows "
        "with each other. Their speed-up is over captured plain decoding, and they count the timed prompts only.",
    )


def _claims(results: Results) -> list[list[str]]:
    def tau(claim: str, run: str, methods: dict[str, str]) -> list[str]:
        return results.claim(claim, run, "tokens_per_pass", methods)

    def alpha(prompts: str, temperature: float) -> Estimate | None:
        return results.figure(run_name(prompts, temperature), _tree(1), "acceptance_rate")

    rows = []
    for temperature in TEMPERATURES:
        widths = {f"k={width}": _tree(width) for width in (32, 8, 2, 1)}
        claim = f"α grows with k (Alpaca, T={temperature:g})"
        rows.append(results.claim(claim, run_name("alpaca", temperature), "acceptance_rate", widths))
    sampling = [(f"T={temperature:g}", alpha("alpaca", temperature)) for temperature in TEMPERATURES]
    rows.append(ordering("α is lower with sampling than with argmax (Alpaca, k=1)", *sampling))
    sets = [(name, alpha(prompts, 0.0)) for prompts, name in SETS.items()]
    rows.append(ordering("α is lower on WMT than on Alpaca (T=0, k=1)", *sets))
    for temperature in TEMPERATURES:
        claim = f"τ of MCSD above that of SD, γ = 5 (T={temperature:g})"
        rows.append(tau(claim, run_name("alpaca", temperature), {"MCSD": TREE, "SD": CHAIN}))
        best = [_best(results, temperature, methods) for methods in (_SEARCHED, _CHAINS)]
        speed = [(name.partition(",")[0], value) for name, value in best]
        rows.append(ordering(f"MCSD outruns SD, the fastest of each (T={temperature:g})", *speed, digits=2))
    labels = ("without replacement", "with replacement", "naive")
    verifiers = dict(zip(labels, _ABLATION.values(), strict=False))
    rows.append(tau("τ at T=1: MCSS without replacement, with, naive", "alpaca-t1", verifiers))
    for budget, shapes in _BUDGETS.items():
        ends = {shape: _tree(shape) for shape in (shapes[0], shapes[-1])}
        rows.append(tau(f"τ of falling and rising widths, K={budget} (T=1)", "alpaca-t1", ends))
    rows.append(tau("K=32 has a higher τ than K=16 (T=0)", "alpaca-t0", {"16x2": _tree("16x2"), "8x2": _tree("8x2")}))
    budgets, eager = {"8x2": _tree("8x2"), "16x2": _tree("16x2")}, {"tree": _EAGER, "copied": _FLAT}
    rows.append(results.claim("K=32 is slower than K=16 (T=0)", "speed-t0", "speedup", budgets, digits=2))
    claim = "speed-up: tree attention, copied caches (T=1, both eager)"
    rows.append(results.claim(claim, "speed-t1", "speedup", eager, digits=2))
    return rows


MCSD = Paper(
    title="Multi-Candidate Speculative Decoding",
    runs=(
        *Run.of_acceptance("alpaca", TEMPERATURES, _COUNTED + _ONLY_ALPACA),
        *Run.of_acceptance("wmt_ende", TEMPERATURES, _COUNTED),
        Run.of_speed(0.0, _TIMED),
        Run.of_speed(1.0, (*_TIMED, *list(_ABLATION.values())[1:], *_UNCAPTURED.values())),
        *RUNS,
    ),
    tables=(_acceptance_by_width, _speed, pairs_table, _budgets, _ablation),
    claims=(_claims, pair_claims),
    contest=contest({"plain decoding": "ar", "SD, γ = 5": CHAIN, "MCSD": TREE}),
)
PAPERS.register("mcsd")(MCSD)
