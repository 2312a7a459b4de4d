"""*Dynamic-Width Speculative Beam Decoding for LLM Inference*: Figures 4 and 5, Tables 1 and 2, without a judge of quality."""

from typing import Any

from polydraft.papers._charts import Drawing, scatter
from polydraft.papers.paper import PAPERS, Comparison, Paper, Results, text_of

_MULTINOMIAL = "ar"
_SPECULATIVE = "sd:3"
_SPECINFER = "mcsd:4x2x1,scheme=rrs-wr,walk=node"
_BEAMS = {width: f"beam:{width},draws=iid" for width in (1, 2, 3, 4, 5)}
_DYNAMIC = {
    f"W_S={width}, t={threshold}, W_min={least}": f"dsbd:{beams},width={width},depth={depth},threshold={threshold},min={least}"
    for beams, width, depth, threshold, least in (
        (1, 2, 3, 0.7, 1),
        (2, 4, 3, 0.7, 1),
        (2, 4, 3, 0.9, 1),
        (3, 6, 3, 0.5, 1),
        (3, 6, 3, 0.7, 1),
        (3, 6, 3, 0.9, 1),
        (3, 6, 2, 0.9, 2),
        (4, 6, 2, 0.9, 3),
    )
}
"""The paper's grid has W_S from 2 to 6, t of 0.7 and 0.9, W_min from 1 to 3; these are spread over it, with t = 0.5 once."""
_FIXED = {
    "fixed W=4, layers, iid": "dsbd:4,width=8,depth=2",
    "fixed W=4, shared noise, distinct *": "dsbd:4,width=8,depth=2,draws=distinct",
}
_DISTINCT = "beam:4,draws=distinct"
_ONE_CACHE = {
    f"DSBD, one cache, W_S={width}, t={threshold}": f"dsbd:{beams},width={width},depth=3,threshold={threshold},one=cache"
    for beams, width, threshold in ((2, 4, 0.7), (3, 6, 0.7), (3, 6, 0.9))
}
_TEMPERATURE = 1.0
_KEYS = ("tokens_per_second", "tokens_per_pass", "log_likelihood_per_token", "joules_per_token")
_COLUMNS = ["method", "tokens/s", "tokens/pass", "log-likelihood/token", "J/token"]
_NO_JOULES = "No energy counter could be read on this machine: J/token is not available."


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [name, *(text_of(figures.get(key), digits=3 if key == "log_likelihood_per_token" else 2) for key in _KEYS)]


def _points(methods: dict[str, Any], names: dict[str, str], key: str) -> list[tuple[str, float, float]]:
    """Return label, figure and likelihood of methods that have both."""
    found = []
    for label, method in names.items():
        x, y = methods[method].get(key), methods[method].get("log_likelihood_per_token")
        if x is not None and y is not None:
            found.append((label, x, y))
    return found


def _references() -> dict[str, str]:
    return {"multinomial": _MULTINOMIAL, "SpD": _SPECULATIVE, "SpecInfer": _SPECINFER}


def _figure(methods: dict[str, Any]) -> Drawing:
    beams = {f"W={width}": method for width, method in _BEAMS.items() if width <= 4}
    others = {label.replace("W_S=", "").replace("t=", "").replace("W_min=", ""): method for label, method in _DYNAMIC.items()}
    groups = {
        "beams": _points(methods, beams | _references(), "tokens_per_second"),
        "DSBD": _points(methods, others, "tokens_per_second"),
    }
    content = scatter(groups, across="tokens per second", up="log-likelihood per token; DSBD: W_S, t, W_min")
    return Drawing("figure-4.svg", "Figures 4 and 5: quality against speed, with Pareto fronts", content)


def _pareto(results: Results) -> Comparison:
    methods = results[_TEMPERATURE]
    names = _references() | {f"beam sampling, W={width}": method for width, method in _BEAMS.items()}
    names |= {f"DSBD, {label}": method for label, method in _DYNAMIC.items()} | _FIXED
    names["beam sampling, W=4, distinct *"] = _DISTINCT
    return Comparison(
        title="Figures 4 and 5: quality against speed and energy",
        columns=_COLUMNS,
        ours=[_row(name, methods[method]) for name, method in names.items()],
        published_note="SQuAD and Spider, Llama-2-13B and others; the figures print no numbers, the text states the claim",
        published_columns=["claim"],
        published=[["at equal quality DSBD is 1.5 to 1.9 times as fast as beam sampling, with 1.8 to 2.5 times less energy"]],
        remark=_claim(methods) + " Methods with a star are not in the paper.",
        drawings=[_figure(methods)],
    )


def _claim(methods: dict[str, Any]) -> str:
    """Say what the paper's claim amounts to here: the fastest dynamic widths that reach each beam sampling's likelihood."""
    said = []
    for width in (2, 3, 4):
        base = methods[_BEAMS[width]]
        quality, speed = base.get("log_likelihood_per_token"), base.get("tokens_per_second")
        if quality is None or not speed:
            continue
        rivals = [methods[method] for method in _DYNAMIC.values()]
        speeds = [one["tokens_per_second"] for one in rivals if (one.get("log_likelihood_per_token") or -1e9) >= quality]
        best = max((value for value in speeds if value), default=None)
        said.append(f"W={width}: " + ("none" if best is None else f"{best / speed:.2f}×"))
    spent = "" if any(one.get("joules_per_token") is not None for one in methods.values()) else f" {_NO_JOULES}"
    found = ", ".join(said) or "unknown"
    return f"Speed-up of the fastest DSBD setting that reaches beam sampling's likelihood: {found}.{spent}"


def _table_1(results: Results) -> Comparison:
    methods = results[_TEMPERATURE]
    names = {"SpecInfer": _SPECINFER, "Beam (W=5)": _BEAMS[5]} | _ONE_CACHE
    return Comparison(
        title="Table 1: against SpecInfer and beam sampling",
        columns=_COLUMNS,
        ours=[_row(name, methods[method]) for name, method in names.items()],
        published_note="MT-Bench; its quality is a judge's score, which is not measured here",
        published_columns=["model", "method", "score", "tokens/s", "J/token"],
        published=[
            ["Llama-2-13B", "SpecInfer", "2.86", "21.8", "21.2"],
            ["Llama-2-13B", "Beam (W=5)", "3.51", "12.1", "26.3"],
            ["Llama-2-13B", "DSBD", "3.52", "16.5", "16.1"],
            ["Llama-3-8B", "SpecInfer", "3.46", "20.2", "19.8"],
            ["Llama-3-8B", "Beam (W=5)", "4.10", "10.5", "33.3"],
            ["Llama-3-8B", "DSBD", "4.11", "17.8", "22.9"],
        ],
    )


def _table_2(results: Results) -> Comparison:
    methods = results[_TEMPERATURE]
    names = _references() | _ONE_CACHE
    return Comparison(
        title="Table 2: one cache only",
        columns=_COLUMNS,
        ours=[_row(name, methods[method]) for name, method in names.items()],
        published_note="Llama-2-13B; exact match on SQuAD, execution accuracy on Spider",
        published_columns=["data", "method", "EM / EA", "tokens/s", "J/token"],
        published=[
            ["SQuAD", "Multinomial", "74", "21.14", "12.36"],
            ["SQuAD", "SpD", "75", "27.11", "8.34"],
            ["SQuAD", "SpecInfer", "74", "27.15", "9.22"],
            ["SQuAD", "DSBD", "86", "26.67", "8.75"],
            ["Spider", "Multinomial", "20", "21.98", "11.14"],
            ["Spider", "SpD", "19", "31.74", "7.06"],
            ["Spider", "SpecInfer", "19", "32.00", "8.01"],
            ["Spider", "DSBD", "31", "30.30", "7.17"],
        ],
        remark="Continuing with the likeliest beam is a heuristic: such texts follow no sampling distribution.",
    )


def _tables(results: Results) -> list[Comparison]:
    return [_pareto(results), _table_1(results), _table_2(results)]


_METHODS = (
    *(_MULTINOMIAL, _SPECULATIVE, _SPECINFER),
    *_BEAMS.values(),
    _DISTINCT,
    *_DYNAMIC.values(),
    *_FIXED.values(),
    *_ONE_CACHE.values(),
)

DSBD = Paper(
    title="Dynamic-Width Speculative Beam Decoding for LLM Inference",
    claim="Beams drafted by a small model can be verified layer by layer so that they follow the target's own beam "
    "sampling, and each layer can keep as many beams as are likely to be accepted. At equal quality this is 1.5 to 1.9 "
    "times as fast as beam sampling and takes 1.8 to 2.5 times less energy.",
    algorithms={
        "Drafting and verifying beams (Algorithm 1, corrected)": "polydraft.beam.BeamDecoder",
        "Dynamic width (§3.2)": "polydraft.beam.BeamOptions.width_threshold",
        "Minimum width (§3.2)": "polydraft.beam.BeamOptions.min_width",
        "Forests in one pass (§3.3)": "polydraft.beam.BeamDecoder",
        "One cache (§3.4), a heuristic": "polydraft.beam.BeamOptions.one_cache",
    },
    lossy="Continuing with the likeliest beam only (`one_cache`) follows no sampling distribution. With a dynamic width, each "
    "layer follows the target's beam sampling given its width, but whole texts differ from those of any fixed width.",
    runs={_TEMPERATURE: _METHODS},
    tables=_tables,
    settings={"top_k": 10, "top_p": 0.8, "log_likelihood": True},
)
PAPERS.register("dsbd")(DSBD)
