"""*Improving Multi-candidate Speculative Decoding*: Tables 1 and 2, Figures 3 to 6, eq. 1."""

from collections.abc import Callable, Sequence
from functools import partial

from polydraft.lab.charts import Chart, curves, grouped_columns
from polydraft.lab.estimate import Estimate
from polydraft.lab.papers.mcsd_pairs import CHAIN, TREE
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, contest, ordering, run_name, text_of, times
from polydraft.lab.theory import improvement_factor

_DEPTH, _WIDTH, _FIGURE_3_WIDTH = 5, 16, 6
_WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 21, 24)
_TIMED_WIDTHS = (1, 2, 4, 8, 10, 16, 21, 24)
_SMOKE_WIDTHS = (1, 24)
_TEMPERATURES = (0.0, 1.0)
_SETS = {"alpaca": "Alpaca", "spec_bench": "spec_bench"}
_EAGER = ",graphs=no"
"""Target-initialised trees and decision models cannot be captured as CUDA graphs, so for comparison nothing else is."""
_TO_RUN = "takes minutes on a GPU: `--runs {}`"
"""How to measure counted claims that are not measured yet."""


def _lossy(width: int, decision: str = "") -> str:
    return f"target-init:{width}x{_DEPTH}{decision}"


_with_hidden = partial(_lossy, decision=",decision=hidden")
_with_distribution = partial(_lossy, decision=",decision=distribution")


def _fork(width: int) -> str:
    return f"fork:{width}x{_DEPTH}"


def _eager_fork(width: int) -> str:
    return _fork(width) + _EAGER


_DYNAMIC = "dynamic:64"
_TABLE = {
    "SD, γ = 5": CHAIN,
    "MCSD, 4x2x2x1x1": TREE,
    "target-initialised D = 5, W = 16, **lossy**": _lossy(_WIDTH),
    "the same with P_T1 (hidden states), **lossy**, the complete method": _with_hidden(_WIDTH),
    "the same with P_T2 (probabilities), **lossy**, the complete method": _with_distribution(_WIDTH),
    "fork D = 5, W = 16 below one token of the target, lossless *": _fork(_WIDTH),
}
"""The paper's methods; a star marks methods that are not in the paper."""
_KINDS: dict[str, Callable[[int], str]] = {
    "target-init": _lossy,
    "target-init, P_T1": _with_hidden,
    "target-init, P_T2": _with_distribution,
    "fork, lossless *": _fork,
}
_TIMED_KINDS = {**_KINDS, "fork, lossless *": _eager_fork}
_FIGURE_3 = {"target-initialised, lossy": _lossy(_FIGURE_3_WIDTH), "fork, lossless": _fork(_FIGURE_3_WIDTH)}


def _by_widths(kinds: dict[str, Callable[[int], str]], widths: Sequence[int]) -> tuple[str, ...]:
    return tuple(kind(width) for width in widths for kind in kinds.values())


_EAGER_ARMS = tuple(name if name.startswith("target-init") else name + _EAGER for name in _TABLE.values())
_CAPTURED_ARMS = (CHAIN, TREE, _fork(_WIDTH), _DYNAMIC)
_SPEED = ("ar", "ar" + _EAGER, *_EAGER_ARMS, *_CAPTURED_ARMS)


_COUNTED_RUNS = tuple(run_name(prompts, temperature) for prompts in _SETS for temperature in _TEMPERATURES)
_SPEED_RUNS = tuple(run_name("speed", temperature) for temperature in _TEMPERATURES)


def _alpha(results: Results, run: str, method: str) -> Estimate | None:
    """Return the paper's α for any method: accepted drafts per round over D, not counting first tokens from the target."""
    accepted = results.figure(run, method, "accepted_per_pass")
    if accepted is not None:
        return accepted.scaled(1 / _DEPTH)
    share = results.figure(run, method, "accepted_share")  # earlier runs kept this: relative to the drafted path
    if share is None or "decision" in method:
        return None
    return share.scaled((_DEPTH + 1) / _DEPTH) if method.startswith("target-init") else share


def _acceptance(results: Results) -> Comparison:
    rows = []
    for temperature in _TEMPERATURES:
        run = run_name("spec_bench", temperature)
        for label, name in _TABLE.items():
            alphas = [text_of(_alpha(results, run_name(prompts, temperature), name)) for prompts in _SETS]
            figures = [results.text(run, name, key) for key in ("acceptance_rate", "tokens_per_pass")]
            rows.append([f"{temperature:g}", label, *alphas, *figures])
    return Comparison(
        key="acceptance",
        title="Tables 1 and 2: acceptance of all methods",
        runs=_COUNTED_RUNS,
        columns=["T", "method", "α of the paper, Alpaca", "spec_bench", "α per position", "τ"],
        ours=rows,
        published_note="α; target LLaMA-2-7B-Chat, RTX 4090; nothing says how far these figures vary",
        published_columns=["T", "method", "Alpaca", "TriviaQA", "MT-Bench"],
        published=[
            ["0", "SD, γ = 5, draft TinyLlama-1.1B", "0.45", "0.56", "0.43"],
            ["0", "MCSD, 4x2x2x1x1, TinyLlama-1.1B", "0.64", "0.72", "0.63"],
            ["0", "target-initialised, D = 5, W = 16, TinyLlama-1.1B", "0.92", "0.96", "0.93"],
            ["1", "target-initialised, TinyLlama-1.1B", "0.93", "0.93", "0.95"],
            ["0", "target-initialised, LLaMA-68M", "0.80", "0.86", "0.76"],
            ["1", "target-initialised, LLaMA-68M", "0.75", "0.75", "0.74"],
        ],
        remark="The paper's α is the accepted length over D = 5, the same divisor for every method, early stops included. The "
        "target-initialised rule changes the distribution of the text, so its α and speed are not those of lossless decoding; "
        "the fork below one token of the target is its lossless counterpart. A star: not in the paper.",
    )


def _speed(results: Results) -> Comparison:
    """Figure 4, and the prediction of eq. 1."""
    arms = {"plain decoding": "ar" + _EAGER, **dict(zip(_TABLE, _EAGER_ARMS, strict=True))}
    captured = {"plain decoding": "ar", "SD, γ = 5": CHAIN, "MCSD, 4x2x2x1x1": TREE, "fork D = 5, W = 16 *": _fork(_WIDTH)}
    captured["dynamic tree, at most 64 nodes, lossless *"] = _DYNAMIC
    rows = []
    for temperature, run in zip(_TEMPERATURES, _SPEED_RUNS, strict=True):
        for how, methods in (("`graphs=no`", arms), ("default", captured)):
            for label, name in methods.items():
                figures = [results.text(run, name, "tokens_per_second", digits=1), results.text(run, name, "speedup", "×")]
                rows.append([f"{temperature:g}", how, label, *figures, text_of(_predicted(results, run, name), "×")])
    return Comparison(
        key="speed",
        title="Figure 4, eq. 1: speed of all methods, and the improvement factor",
        runs=_SPEED_RUNS,
        columns=["T", "rounds", "method", "tokens/s", "speed-up over `ar`", "eq. 1"],
        ours=rows,
        published_note="MT-Bench, T=0; the figure prints no numbers, the text states the largest",
        published=[["up to 2.96 times as fast as plain decoding; 23 % faster than MCSD (TinyLlama), 75 % (LLaMA-68M)"]],
        remark="Compare rows with the same `rounds` only: by default a GPU's rounds are captured as graphs and pay for "
        "one launch, without graphs they are eager and pay for hundreds. Target-initialised trees and decision "
        "models run eagerly only. Eq. 1 is for chains: its α per token is counted, its c is what the rounds of this "
        "run cost beyond a target pass.",
    )


def _predicted(results: Results, run: str, method: str) -> float | None:
    """Return eq. 1's improvement factor for a chain, from its acceptance per token and the measured cost of a round."""
    if not method.startswith("sd:"):
        return None
    plain = "ar" + _EAGER if method.endswith(_EAGER) else "ar"
    rate, own, base = (
        results.figure(run, method, "acceptance_rate"),
        results.figure(run, method, "tokens_per_second"),
        results.figure(run, plain, "tokens_per_second"),
    )
    tokens = results.figure(run, method, "tokens_per_pass")
    if rate is None or not own or not base or tokens is None:
        return None
    draft_cost = max((tokens * base / own - 1) / _DEPTH, 0.0)
    return improvement_factor(float(rate), _DEPTH, draft_cost)


def _paths(results: Results) -> Comparison:
    """Figure 3: how often each path wins, and its accepted length then."""
    rows, charts = [], []
    paths = {"": [str(path) for path in range(_FIGURE_3_WIDTH)]}
    for temperature in _TEMPERATURES:
        panels: dict[str, dict[str, list[float | None]]] = {"share": {}, "accepted": {}}
        for label, name in _FIGURE_3.items():
            found = _branches(results, temperature, name)
            for key, series in panels.items():
                series[label.split(",")[0]] = [one[key] for one in found]
            cells = (f"{text_of(one['share'])} / {text_of(one['accepted'])}" for one in found)
            rows.append([f"{temperature:g}", label, *cells])
        for key, file, up in (("share", "", "share of rounds won"), ("accepted", "-length", "accepted length where it wins")):
            content = grouped_columns(panels[key], paths, base=0.0, across="path", up=up)
            caption = f"Figure 3, {'left' if key == 'share' else 'right'}: {up}, by path, T={temperature:g}"
            charts.append(Chart(f"figure-3{file}-t{temperature:g}.svg", caption, content))
    return Comparison(
        key="paths",
        title="Figure 3: how often each of six paths wins, and its accepted length then",
        runs=("spec_bench-t0", "spec_bench-t1"),
        columns=["T", "tree", *(f"path {path}" for path in range(_FIGURE_3_WIDTH))],
        ours=rows,
        published_note="draft LLaMA-68M, target LLaMA-2-7B-Chat; the figure prints no numbers, the text states the claim",
        published=[["with target-initialised trees, paths other than the first win more often, and all paths accept more"]],
        remark="Lossless paths are numbered in draw order; rounds that accept nothing have no winner.",
        charts=charts,
    )


def _branches(results: Results, temperature: float, method: str) -> list[dict[str, Estimate | None]]:
    """Return the share and accepted length of each path; None if not measured."""
    found = results.figures(run_name("spec_bench", temperature), method).get("winning_branches", [])
    return [*found, *[{"share": None, "accepted": None}] * (_FIGURE_3_WIDTH - len(found))][:_FIGURE_3_WIDTH]


def _by_width(results: Results) -> Comparison:
    """Figure 5, left: acceptance by width, of the complete method too."""
    rows, charts = [], []
    for temperature in _TEMPERATURES:
        run, series = run_name("spec_bench", temperature), {}
        for label, method in _KINDS.items():
            names = [method(width) for width in _WIDTHS]
            series[label] = [_alpha(results, run, name) for name in names]
            tokens = [results.text(run, name, "tokens_per_pass") for name in names]
            rows.append([f"{temperature:g}", label, "α", *map(text_of, series[label])])
            rows.append([f"{temperature:g}", label, "τ", *tokens])
        content = curves(series, [str(width) for width in _WIDTHS], across="width W", up="α of the paper")
        file = f"figure-5-t{temperature:g}.svg"
        charts.append(Chart(file, f"Figure 5, left: α of the paper against the width, T={temperature:g}", content))
    return Comparison(
        key="width",
        title="Figure 5, left: width 1 to 24, α of the paper and tokens per pass τ",
        runs=("spec_bench-t0", "spec_bench-t1"),
        columns=["T", "tree", "", *(f"W={width}" for width in _WIDTHS)],
        ours=rows,
        published_note="MT-Bench, RTX 4090; the figure prints no numbers, the text states the claim",
        published=[["α rises with the width up to 12"]],
        charts=charts,
    )


def _speed_by_width(results: Results) -> Comparison:
    """Figure 5, right, and Figure 6: speed by width, with and without decision models, all without captures."""
    series = {
        label: [results.figure("speed-t0", method(width), "speedup") for width in _TIMED_WIDTHS]
        for label, method in _TIMED_KINDS.items()
    }
    up = "speed-up, eager rounds, T=0"
    content = curves(series, [str(width) for width in _TIMED_WIDTHS], across="width W", up=up)
    return Comparison(
        key="width-speed",
        title="Figure 5, right, and Figure 6: width against speed, T=0",
        runs=("speed-t0",),
        columns=[up, *(f"W={width}" for width in _TIMED_WIDTHS)],
        ours=[[label, *map(text_of, values)] for label, values in series.items()],
        published_note="MT-Bench, RTX 4090; the figures print no numbers, the text states the claims",
        published=[
            ["speed rises with the width up to 10 and drops at 21 (Figure 5)"],
            ["decision models help a little at small widths and cost speed at most others (Figure 6)"],
        ],
        remark="All arms run without CUDA graphs, and so like with like; the speed-up is over captured plain decoding.",
        charts=[Chart("figure-6.svg", "Figures 5 and 6: speed against the width", content)],
    )


def _claims_of_acceptance(results: Results) -> list[list[str]]:
    lossy = "the target-initialised rule is lossy"
    rows = []
    for prompts, name in _SETS.items():
        target, mcsd, chain = (_alpha(results, run_name(prompts, 0.0), method) for method in (_lossy(_WIDTH), TREE, CHAIN))
        three = [("target-initialised", target), ("MCSD", mcsd), ("SD", chain)]
        counted = _TO_RUN.format(run_name(prompts, 0.0))
        rows.append(ordering(f"α at T=0: target-initialised, MCSD, SD ({name})", *three, why=lossy, missing=counted))
        for percent, draft in ((40, "larger draft, on average"), (164, "smaller draft")):
            claim = f"α at T=0 is {percent} % above MCSD's ({draft}; {name})"
            why = "no α exceeds 1, so the claim needs an MCSD below 0.38" if percent > 100 else lossy
            pair = ("target-initialised", target), times(1 + percent / 100, "MCSD", mcsd)
            rows.append(ordering(claim, *pair, why=why, missing=counted))
    for temperature in _TEMPERATURES:
        run = run_name("spec_bench", temperature)
        widths = [(f"W={width}", _alpha(results, run, _lossy(width))) for width in (12, 4, 1)]
        missing = _TO_RUN.format(run)
        rows.append(ordering(f"α rises with the width up to 12, T={temperature:g}", *widths, missing=missing))
        widths = [(f"W={width}", _alpha(results, run, _lossy(width))) for width in (24, 12)]
        claim = f"α no longer rises beyond a width of 12, T={temperature:g}"
        rows.append(ordering(claim, *widths, alike=True, missing=missing))
    return rows


def _claims_of_paths(results: Results) -> list[list[str]]:
    rows = []
    for temperature in _TEMPERATURES:
        target, fork = (_branches(results, temperature, kind(_FIGURE_3_WIDTH)) for kind in (_lossy, _fork))
        claim = f"paths other than the first win more often, T={temperature:g}: share of the first path"
        missing = _TO_RUN.format(run_name("spec_bench", temperature))
        pair = ("draft-initialised", fork[0]["share"]), ("target-initialised", target[0]["share"])
        rows.append(ordering(claim, *pair, missing=missing))
        for path in range(_FIGURE_3_WIDTH):
            pair = ("target-initialised", target[path]["accepted"]), ("draft-initialised", fork[path]["accepted"])
            rows.append(ordering(f"path {path} accepts more, T={temperature:g}", *pair, digits=2, missing=missing))
    return rows


def _claims_of_speed(results: Results) -> list[list[str]]:
    eager = "all arms eager"

    def speed(claim: str, methods: dict[str, str]) -> list[str]:
        return results.claim(f"{claim} (T=0)", "speed-t0", "speedup", methods, digits=2, why=eager)

    target, mcsd = (results.figure("speed-t0", method, "speedup") for method in (_lossy(_WIDTH), TREE + _EAGER))
    four = {"target-initialised": _lossy(_WIDTH), "MCSD": TREE + _EAGER, "SD": CHAIN + _EAGER, "plain": "ar" + _EAGER}
    claim = "speed at T=0: target-initialised, MCSD, SD, plain decoding"
    rows = [results.claim(claim, "speed-t0", "speedup", four, digits=2, why=eager)]
    for percent, draft in ((23, "larger draft, on average"), (75, "smaller draft")):
        pair = ("target-initialised", target), times(1 + percent / 100, "MCSD", mcsd)
        rows.append(ordering(f"speed at T=0 is {percent} % above MCSD's ({draft})", *pair, digits=2, why=eager))
    rows.append(speed("speed rises with the width up to 10", {f"W={width}": _lossy(width) for width in (10, 4, 1)}))
    rows.append(speed("speed drops at a width of 21", {f"W={width}": _lossy(width) for width in (16, 21)}))
    for label, kind in (("P_T1", _with_hidden), ("P_T2", _with_distribution)):
        rows.append(speed(f"{label} speeds up a narrow tree, W=1", {"with": kind(1), "without": _lossy(1)}))
        rows.append(speed(f"{label} slows down a wide tree, W=16", {"without": _lossy(_WIDTH), "with": kind(_WIDTH)}))
    return rows


IMPROVED = Paper(
    title="Improving Multi-candidate Speculative Decoding",
    runs=(
        *Run.of_acceptance("alpaca", _TEMPERATURES, tuple(_TABLE.values())),
        *Run.of_acceptance(
            "spec_bench",
            _TEMPERATURES,
            (*_TABLE.values(), *_FIGURE_3.values(), *_by_widths(_KINDS, _SMOKE_WIDTHS)),
            more=_by_widths(_KINDS, _WIDTHS),
        ),
        Run.of_speed(0.0, (*_SPEED, *_by_widths(_TIMED_KINDS, _SMOKE_WIDTHS)), more=_by_widths(_TIMED_KINDS, _TIMED_WIDTHS)),
        Run.of_speed(1.0, _SPEED),
    ),
    tables=(_acceptance, _speed, _paths, _by_width, _speed_by_width),
    branches_of=tuple(_FIGURE_3.values()),
    claims=(_claims_of_acceptance, _claims_of_paths, _claims_of_speed),
    contest=contest(
        {
            "lossless fork *": _fork(_WIDTH),
            "target-initialised, **lossy**, eager": _lossy(_WIDTH),
            "MCSD, eager": TREE + _EAGER,
            "plain decoding, eager": "ar" + _EAGER,
            "dynamic tree *": _DYNAMIC,
        }
    ),
)
PAPERS.register("improved")(IMPROVED)
