"""*Towards Optimal Multi-Draft Speculative Decoding*: Tables 2 and 3; Table 1 and the figures are `polydraft analyze`'s."""

from typing import Any

from polydraft.papers.paper import PAPERS, Comparison, Paper, Results, text_of

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
    "RRS without replacement, traversal *": "scheme=rrs-wor,walk=traversal",
}
"""The paper's methods, which verify node by node, and with a star what it does not run."""
_ONLY_PAIRS = "SpecHub"
_TEMPERATURES = (0.1, 0.6, 1.0)


def _method(tree: str, options: str) -> str:
    return f"mcsd:{tree},{options}"


_METHODS = tuple(
    _method(tree, options)
    for tree in _TREES.values()
    for name, options in _SCHEMES.items()
    if name != _ONLY_PAIRS or tree == _TREES["2 drafts, 4 steps"]
)


def _cells(methods: dict[str, Any], tree: str, options: str, key: str, ratio_key: str) -> list[str]:
    """Return a figure, and how it or another one compares with RRS with replacement on the same tree."""
    figures, base = methods.get(_method(tree, options), {}), methods[_method(tree, _BASE)]
    value, own, its = figures.get(key), figures.get(ratio_key), base.get(ratio_key)
    ratio = f"{own / its:.2f}×" if own and its and options != _BASE else "–"
    return [text_of(value, digits=3 if key == "acceptance_rate" else 2), ratio]


def _rows(results: Results, key: str, ratio_key: str) -> list[list[str]]:
    return [
        [
            f"{temperature:g}",
            name,
            *(cell for tree in _TREES.values() for cell in _cells(methods, tree, options, key, ratio_key)),
        ]
        for temperature, methods in results.items()
        for name, options in _SCHEMES.items()
    ]


def _columns(figure: str, ratio: str) -> list[str]:
    return ["T", "method", *(column for tree in _TREES for column in (f"{tree}: {figure}", ratio))]


_NOTE = "MT-Bench, target Vicuna-7B-v1.3, draft EAGLE-0.24B"
_RATIO = "ratios are to RRS with replacement on the same tree"


def _acceptance(results: Results) -> Comparison:
    return Comparison(
        title="Table 2: acceptance rate α and speed",
        columns=_columns("α", "speed"),
        ours=_rows(results, "acceptance_rate", "tokens_per_second"),
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
        remark="Methods with a star are not in the paper.",
    )


def _efficiency(results: Results) -> Comparison:
    return Comparison(
        title="Table 3: block efficiency τ",
        columns=_columns("τ", "ratio"),
        ours=_rows(results, "tokens_per_pass", "tokens_per_pass"),
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
    for methods in results.values():
        for tree in _TREES.values():
            greedy, base = (
                methods[_method(tree, _SCHEMES[name])]["tokens_per_pass"] for name in ("Greedy", "RRS with replacement")
            )
            leads.append(bool(greedy and base and greedy >= base))
    return (
        f"The paper's greedy drafts yield at least as many tokens per pass as RRS with replacement in {sum(leads)} of "
        f"{len(leads)} cases here; in the paper they always do, by less at higher temperatures."
    )


def _laws(results: Results) -> Comparison:
    """Point to the command that measures acceptance on laws instead of by decoding."""
    return Comparison(
        title="Table 1, Figures 1 and 2: acceptance against the optimum",
        columns=["what", "command"],
        ours=[
            ["Table 1", "`polydraft analyze --temperature 0.7 --drafts 3 --paper-bound --out DIR`"],
            ["Figure 1", "`polydraft analyze --sweep temperature --out DIR`"],
            ["Figure 2", "`polydraft analyze --sweep drafts --out DIR`"],
        ],
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
        remark="Greedy reaches its own α* (up to sampling noise in the paper's figures). "
        "The published α* of distinct drafts belongs to another way of drawing; see docs/theory.md.",
    )


def _tables(results: Results) -> list[Comparison]:
    return [_laws(results), _acceptance(results), _efficiency(results)]


OPTIMAL = Paper(
    title="Towards Optimal Multi-Draft Speculative Decoding",
    claim="For a given way of drawing drafts, the best acceptance rate of an exact verifier is the value of an optimal "
    "transport problem. Its dual is a choice of one subset of the vocabulary, which a single sort solves for drafts drawn "
    "with or without replacement. The known verifiers for these drafts, recursive rejection and K-SEQ, stay below the "
    "optimum. Drafts that are the likeliest tokens plus one random token have a verifier that reaches their optimum.",
    algorithms={
        "Optimal acceptance as a linear program (§2.3)": "polydraft.theory.linear_program_optimum",
        "Its dual, the choice of a subset (§3.3)": "polydraft.theory.subset_optimum",
        "Independent drafts, one sort (§4.2)": "polydraft.theory.with_replacement_optimum",
        "Distinct drafts as the paper computes them (§4.2.2)": "polydraft.theory.conditional_poisson_optimum",
        "Distinct drafts as they are drawn, ours": "polydraft.theory.without_replacement_optimum",
        "Drafts from several distributions (§2.3)": "polydraft.theory.product_optimum",
        "Greedy drafts and their verifier (§5)": "polydraft.schemes.Greedy",
        "SpecHub (§5.3)": "polydraft.schemes.SpecHub",
        "K-SEQ, for comparison (Appendix A.2)": "polydraft.schemes.KSeq",
        "A verifier that reaches the optimum of independent drafts, ours": "polydraft.schemes.Race",
        "Acceptance against the optimum on real models (§6)": "polydraft.analyze.Analysis",
    },
    runs={temperature: ("ar", *_METHODS) for temperature in _TEMPERATURES},
    tables=_tables,
)
PAPERS.register("optimal")(OPTIMAL)
