"""*Multi-Branch Self-Drafting for LLM Inference Acceleration*: Table 2, Figures 4 to 8."""

from polydraft.lab.charts import Chart, curves, grouped_columns
from polydraft.lab.estimate import Estimate
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, contest, run_name, text_of

_PLAIN = Estimate.exactly(1.0)
_SIZES = (2, 6, 10)
_USUAL = 6
_LOOKUP, _SUFFIX, _SPEDE = "lookup", "suffix+corpus", "sd:5"
_SPEED_KEYS = (("tokens_per_second", ""), ("speedup", "×"), ("tokens_per_pass", ""))


def _branches(number: int, length: int, options: str = "") -> str:
    """Return the method for our exact variant with the paper's n-grams: prefixes of one token, n-grams of four."""
    return f"self-draft:{number}x{length},seeds=vocabulary,nodes=32,chance=0,gram=4,prefix=1{options}"


def _printed(options: str = "") -> str:
    """Return the method for the paper's algorithm as printed."""
    return f"self-draft:{_USUAL}x{_USUAL},gram=4,lossy=self-draft{options}"


_PRINTED, _PAPER = _printed(), _branches(_USUAL, _USUAL)
_OURS = "self-draft"
_AS_PRINTED = {
    "as printed": _PRINTED,
    "without corpus": _printed(",corpus=no"),
    "without context and branches": _printed(",context=no"),
}
_ABLATION = {
    "exact": _PAPER,
    "without corpus cache": _branches(_USUAL, _USUAL, ",corpus=no"),
    "without context cache": _branches(_USUAL, _USUAL, ",context=no"),
    "without branches": _branches(0, _USUAL),
}
_EXTRA = tuple(_branches(number, number, ",corpus=no") for number in (2, 4))
_GRID = tuple(_branches(number, length) for number in _SIZES for length in _SIZES)
_MAIN = {
    "as printed, 6×6, **lossy**": _PRINTED,
    "exact, 6×6": _PAPER,
    "exact, no branches": _ABLATION["without branches"],
    "our default": _OURS,
    "prompt lookup": _LOOKUP,
    "`suffix+corpus` *": _SUFFIX,
    "SpeDe": _SPEDE,
}
_COUNTED = (*_AS_PRINTED.values(), *_ABLATION.values(), *_MAIN.values())
_TIMED = ("ar", *(method for method in _MAIN.values() if method != _PRINTED))
_SETS = {
    "MT-bench": ("spec_bench", ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")),
    "GSM8K": ("spec_bench", ("math_reasoning",)),
    "translation": ("spec_bench", ("translation",)),
    "summaries": ("spec_bench", ("summarization",)),
    "questions": ("spec_bench", ("qa",)),
    "retrieval": ("spec_bench", ("rag",)),
    "HumanEval": ("humaneval", ()),
}
"""The paper's benchmarks: a set of prompts and its categories, () for all. spec_bench has GSM8K's questions too."""


def _efficiency(
    results: Results, prompts: str, categories: tuple[str, ...], temperature: float, method: str
) -> Estimate | None:
    """Return tokens per pass: the mean over the given categories, which have about as many prompts each."""
    run = run_name(prompts, temperature)
    if not categories:
        return results.figure(run, method, "tokens_per_pass")
    values = [results.figure(run, method, "tokens_per_pass", category) for category in categories]
    known = [value for value in values if value is not None]
    return Estimate.mean_of(known) if known else None


def _main(results: Results) -> Comparison:
    rows = []
    for temperature in (0.0, 1.0):
        for name, (prompts, categories) in _SETS.items():
            values = [_efficiency(results, prompts, categories, temperature, method) for method in _MAIN.values()]
            rows.append([f"{temperature:g}", name, *map(text_of, values)])
        overall = [results.text(run_name("spec_bench", temperature), method, "tokens_per_pass") for method in _MAIN.values()]
        rows.append([f"{temperature:g}", "all of spec_bench", *overall])
    return Comparison(
        key="efficiency",
        title="Table 2: decoding efficiency DE (tokens per pass)",
        runs=("spec_bench-t0", "spec_bench-t1", "humaneval-t0", "humaneval-t1"),
        columns=["T", "benchmark", *_MAIN],
        ours=rows,
        published_note="A100, FP16, one text at a time; SpeDe is speculative decoding with LLaMA-68M",
        published_columns=["model", "benchmark", "AR", "SpeDe", "Self-Draft", "speed-up", "DE", "LADE", "DE"],
        published=[
            ["llama-7b", "GSM-100", "49.0", "58.7", "88.2", "1.80×", "2.31", "82.8", "2.23"],
            ["llama-13b", "GSM-100", "33.5", "47.2", "57.2", "1.71×", "2.28", "53.8", "2.05"],
            ["llama-7b", "MT-bench", "47.1", "57.5", "73.6", "1.56×", "2.01", "70.2", "1.97"],
            ["llama-13b", "MT-bench", "33.6", "48.2", "48.7", "1.45×", "2.00", "45.4", "1.82"],
            ["code-llama-7b", "MBPP-100", "42.3", "80.3", "107.3", "2.54×", "2.98", "98.8", "3.09"],
            ["code-llama-13b", "MBPP-100", "32.2", "65.4", "71.5", "2.22×", "3.03", "67.6", "2.95"],
            ["code-llama-7b", "HumanEval", "47.4", "80.7", "111.2", "2.35×", "3.22", "95.1", "2.90"],
            ["code-llama-13b", "HumanEval", "32.4", "62.3", "73.3", "2.26×", "3.22", "67.4", "2.86"],
        ],
        remark=(
            "6×6 is the paper's number and length of branches; our default is chosen for speed. *As printed* has the paper's "
            "own branches, caches, retrieval and verification, which is exact only at T=0; *exact* has ours, with one draw per "
            "node. SpeDe is a chain of five tokens of the draft. MBPP and LADE were not run: we have neither the prompts nor "
            "an implementation. With a star: not in the paper."
        ),
    )


def _speed(results: Results) -> Comparison:
    rows = [
        [label, *(results.text(run, name, key, unit) for run in ("speed-t0", "speed-t1") for key, unit in _SPEED_KEYS)]
        for label, name in {"plain decoding": "ar", **_MAIN}.items()
        if name != _PRINTED
    ]
    return Comparison(
        key="speed",
        title="Table 2: throughput",
        runs=("speed-t0", "speed-t1"),
        columns=["method", *(f"T={one}: {what}" for one in (0, 1) for what in ("tokens/s", "speed-up", "DE"))],
        ours=rows,
        remark="As printed, the method is counted only: our form of its verification goes through the nodes one by one.",
    )


def _overhead(results: Results) -> Comparison:
    names = {4: _EXTRA[0], 16: _EXTRA[1], 36: _ABLATION["without corpus cache"]}
    rows = [[str(extra), results.text("spec_bench-t0", name, "tokens_per_pass")] for extra, name in names.items()]
    return Comparison(
        key="overhead",
        title="Figure 4: draft efficiency without a corpus cache, by branch tokens per pass",
        runs=("spec_bench-t0",),
        columns=["branch tokens", "DE, T=0"],
        ours=rows,
        published_note="LLaMA-7B on MT-bench; the figure prints no numbers",
        published=[["throughput and DE are above LADE's overall, most clearly where the drafting overhead is small"]],
    )


def _grid(results: Results) -> Comparison:
    cells = {
        number: [results.figure("spec_bench-t0", _branches(number, length), "tokens_per_pass") for length in _SIZES]
        for number in _SIZES
    }
    return Comparison(
        key="grid",
        title="Figures 5 to 7: number N and length L of branches, DE at T=0",
        runs=("spec_bench-t0",),
        columns=["", *(f"L={length}" for length in _SIZES)],
        ours=[[f"N={number}", *map(text_of, values)] for number, values in cells.items()],
        published_note="LLaMA-7B and 13B; the figures print no numbers, the text states what they show",
        published=[
            ["DE grows with the length and with the number of branches"],
            ["throughput falls beyond L = 6"],
            ["as N grows, throughput rises and then falls for L from 5 to 7, and only falls for longer branches"],
            ["both are set to 6"],
        ],
        charts=[_figure_5(cells), _figure_7(cells)],
    )


def _grid_speed(results: Results) -> Comparison:
    rows = [
        [
            f"N={number}",
            *(results.text("grid-t0", _branches(number, length), "tokens_per_second", digits=1) for length in _SIZES),
        ]
        for number in _SIZES
    ]
    return Comparison(
        key="grid-speed",
        title="Figures 5 to 7: throughput by number N and length L of branches, tokens/s at T=0",
        runs=("grid-t0",),
        columns=["", *(f"L={length}" for length in _SIZES)],
        ours=[["N=0", results.text("grid-t0", _ABLATION["without branches"], "tokens_per_second", digits=1), "", ""], *rows],
        remark=f"Plain decoding: {results.text('grid-t0', 'ar', 'tokens_per_second', digits=1)} tokens/s.",
    )


def _figure_5(cells: dict[int, list[Estimate | None]]) -> Chart:
    series = {f"N={number}": values for number, values in cells.items()}
    columns = [str(length) for length in _SIZES]
    content = curves(series, columns, across="length of branches L", up="decoding efficiency DE", base=1.0)
    return Chart("figure-5.svg", "Figures 5 and 6: DE against the length of branches, for each number N", content)


def _figure_7(cells: dict[int, list[Estimate | None]]) -> Chart:
    groups = {f"N = {number}": [str(length) for length in _SIZES] for number in _SIZES}
    series = {"DE": [value for values in cells.values() for value in values]}
    content = grouped_columns(series, groups, base=1.0, across="length L, by number N of branches", up="decoding efficiency DE")
    return Chart("figure-7.svg", "Figure 7: DE by number and length of branches", content)


def _by_benchmark(results: Results, methods: dict[str, str]) -> dict[str, list[Estimate | None]]:
    """Return tokens per pass at T=0 of several methods, by benchmark."""
    return {
        name: [_efficiency(results, prompts, categories, 0.0, method) for method in methods.values()]
        for name, (prompts, categories) in _SETS.items()
    }


def _ablation(results: Results) -> Comparison:
    cells, printed = _by_benchmark(results, _ABLATION), _by_benchmark(results, _AS_PRINTED)
    overall = [
        results.text("spec_bench-t0", method, "tokens_per_pass") for method in (*_AS_PRINTED.values(), *_ABLATION.values())
    ]
    groups = {name: ["all", "−corpus", "−context"] for name in cells}
    series = {"DE": [value for values in cells.values() for value in values[:3]]}
    content = grouped_columns(series, groups, base=1.0, across="caches, by benchmark", up="decoding efficiency DE")
    return Comparison(
        key="ablation",
        title="Figure 8: without one of the caches, DE at T=0",
        runs=("spec_bench-t0", "humaneval-t0"),
        columns=["benchmark", *_AS_PRINTED, *_ABLATION],
        ours=[
            *([name, *map(text_of, [*printed[name], *values])] for name, values in cells.items()),
            ["all of spec_bench", *overall],
        ],
        published_note="MT-bench, LLaMA-7B and 13B; the figure prints no numbers",
        published=[
            ["removing the context cache costs much more than removing the corpus cache"],
            ["most of all in code, mathematics and extraction"],
        ],
        remark="Without branches our exact variant still learns the text; as printed, the method learns from branches alone.",
        charts=[Chart("figure-8.svg", "Figure 8: DE with all caches, without the corpus, without the context cache", content)],
    )


def _claims(results: Results) -> list[list[str]]:
    def passes(claim: str, methods: dict[str, str | Estimate | None], **more: str) -> list[str]:
        return results.claim(claim, "spec_bench-t0", "tokens_per_pass", methods, **more)

    def speed(claim: str, methods: dict[str, str | Estimate | None], why: str = "") -> list[str]:
        return results.claim(claim, "speed-t0", "speedup", methods, digits=2, why=why)

    again = {"missing": "takes minutes on a GPU: `--runs spec_bench-t0`"}
    both, context, corpus, text = _ABLATION.values()
    printed, printed_context, printed_corpus = _AS_PRINTED.values()
    caches = "both caches, context alone, none"
    throughput = {f"L={length}": _branches(_USUAL, length) for length in (_USUAL, _SIZES[-1])}
    return [
        passes(
            f"as printed, tokens per pass at T=0: {caches}",
            {"both": printed, "context": printed_context, "none": _PLAIN},
            **again,
        ),
        passes(
            "as printed: context alone, corpus alone (T=0)", {"context": printed_context, "corpus": printed_corpus}, **again
        ),
        passes("tokens per pass at T=0: branches, none", {"6×6": both, "without branches": text}, **again),
        passes(f"tokens per pass at T=0: {caches}", {"both": both, "context": context, "none": _PLAIN}),
        passes("context alone, corpus alone (T=0)", {"context": context, "corpus": corpus}),
        passes("2.0 to 3.2 tokens per pass (T=0)", {"as printed": printed, "2.0": Estimate.exactly(2.0)}, **again),
        passes(
            "more tokens per pass than LADE (T=0)", {"as printed": printed, "LADE": None}, why="LADE is not implemented here"
        ),
        speed("faster than plain decoding (T=0)", {"exact, 6×6": _PAPER, "plain": _PLAIN}),
        speed(
            "faster than SpeDe (T=0)",
            {"exact, 6×6": _PAPER, "SpeDe": _SPEDE},
            why="SpeDe's draft is trained on the target here, LLaMA-68M there",
        ),
        passes(
            "tokens per pass grow with the length of branches (T=0)",
            {f"L={size}": _branches(_USUAL, size) for size in reversed(_SIZES)},
        ),
        passes(
            "tokens per pass grow with the number of branches (T=0)",
            {f"N={size}": _branches(size, _USUAL) for size in reversed(_SIZES)},
        ),
        results.claim("throughput falls beyond L = 6 (T=0, N = 6)", "grid-t0", "tokens_per_second", throughput, digits=1),
    ]


SELF_DRAFT = Paper(
    title="Multi-Branch Self-Drafting for LLM Inference Acceleration",
    runs=(
        *Run.of_acceptance("spec_bench", (0.0,), (*_COUNTED, *_EXTRA, *_GRID)),
        *Run.of_acceptance("humaneval", (0.0,), _COUNTED),
        *Run.of_acceptance("spec_bench", (1.0,), tuple(_MAIN.values())),
        *Run.of_acceptance("humaneval", (1.0,), tuple(_MAIN.values())),
        Run.of_speed(0.0, _TIMED),
        Run.of_speed(1.0, ("ar", _PAPER, _LOOKUP, _SUFFIX, _SPEDE)),
        Run.of_speed(0.0, ("ar", _ABLATION["without branches"], *_GRID), name="grid"),
    ),
    tables=(_main, _speed, _overhead, _grid, _grid_speed, _ablation),
    by_category=True,
    claims=(_claims,),
    contest=contest({"Self-Draft, exact, 6×6": _PAPER, "prompt lookup": _LOOKUP, "suffix+corpus *": _SUFFIX}),
)
PAPERS.register("self-draft")(SELF_DRAFT)
