"""*Dynamic-Width Speculative Beam Decoding for LLM Inference*: Figures 4 and 5, Tables 1 and 2, without a judge of quality."""

from typing import Any

import numpy as np

from polydraft.lab.charts import Chart, scatter
from polydraft.lab.estimate import LEAST_PROMPTS, Estimate, verdict
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, ordering, text_of, times
from polydraft.tune.contest import mean_interval

_MULTINOMIAL = "ar"
_SPECULATIVE = "sd:3"
_SPECINFER = "mcsd:4x2x1,scheme=rrs-wr,walk=node"
_REFERENCES = {"multinomial": _MULTINOMIAL, "SpD": _SPECULATIVE, "SpecInfer": _SPECINFER}
_BEAMS = {width: f"beam:{width},draws=iid" for width in (1, 2, 3, 4, 5)}
_KNOWN = {
    f"W_S={width}, t={threshold}, W_min={least}": f"dsbd:{beams},width={width},depth={depth},threshold={threshold},min={least}"
    for beams, width, depth, threshold, least in (
        (1, 2, 3, 0.7, 1),
        (2, 4, 3, 0.7, 1),
        (2, 4, 3, 0.9, 1),
        (3, 6, 3, 0.7, 1),
        (3, 6, 3, 0.9, 1),
        (3, 6, 2, 0.9, 2),
        (4, 6, 2, 0.9, 3),
    )
}
"""Settings spread over the paper's grid: W_S from 2 to 6, t of 0.7 and 0.9, W_min from 1 to 3."""
_FIXED = "dsbd:4,width=8,depth=2"
_ONE_CACHE = {
    f"one cache, W_S={width}, t={threshold}": f"dsbd:{beams},width={width},depth=3,threshold={threshold},one=cache"
    for beams, width, threshold in ((2, 4, 0.7), (3, 6, 0.9))
}
_SHARED, _DISTINCT = "dsbd:4,width=8,depth=2,draws=distinct", "beam:4,draws=distinct"


def _model_only(method: str) -> str:
    """Return a method whose drafts come from the draft model alone, as in the paper."""
    return f"{method},draft=model"


_DYNAMIC = {label: _model_only(method) for label, method in _KNOWN.items()}
_ALL = (
    _REFERENCES
    | {f"beam sampling, W={width}": method for width, method in _BEAMS.items()}
    | {f"DSBD, {label}": method for label, method in _DYNAMIC.items()}
    | {"fixed W=4, layers, iid": _model_only(_FIXED)}
    | {f"DSBD, {label} *": method for label, method in _KNOWN.items()}
    | {"fixed W=4, layers, iid *": _FIXED, "fixed W=4, shared noise, distinct *": _SHARED}
    | {"beam sampling, W=4, distinct *": _DISTINCT}
)
_OF_ONE_CACHE = {f"DSBD, {label}": _model_only(method) for label, method in _ONE_CACHE.items()} | {
    f"DSBD, {label} *": method for label, method in _ONE_CACHE.items()
}
_UNTIMED = (_DISTINCT, _SHARED, _FIXED, _model_only(_FIXED), _BEAMS[1])
_QUALITY, _SPEED = "spec_bench-t1", "speed-t1"
_COLUMNS = [
    *("method", "log-likelihood/token", "minus multinomial's", "tokens/pass", "tokens/s"),
    *("J/token", "peak memory, GiB", "speed-up"),
]
_WHAT = (
    "Log-likelihoods are means over all prompts and seeds; differences are paired by prompt. Joules are read over blocks of "
    "seconds; their brackets hold the least and the most of three blocks. Peak memory is the whole process's, all methods' "
    "captured rounds included. Methods with a star are not in the paper: there, what the target predicted before drafts too."
)
_NO_JOULES = "energy was not read"


def _difference(results: Results, method: str, base: str) -> Estimate | None:
    """Return by how much a method's texts are likelier per token than another's after the same prompts."""
    one, other = (results.figures(_QUALITY, name).get("log_likelihood_by_prompt", []) for name in (method, base))
    differences = [a - b for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    if not differences:
        return None
    value, low, high = mean_interval(np.array(differences))
    return Estimate(value, low, high) if len(differences) >= LEAST_PROMPTS else Estimate(value)


def _row(name: str, results: Results, method: str) -> list[str]:
    """Return a method's row: the likelihood of its texts on all prompts, and their cost on the timed ones."""
    memory = results.figure(_SPEED, method, "peak_memory_bytes")
    return [
        name,
        results.text(_QUALITY, method, "log_likelihood_per_token", digits=3),
        "–" if method == _MULTINOMIAL else text_of(_difference(results, method, _MULTINOMIAL), digits=3),
        results.text(_QUALITY, method, "tokens_per_pass"),
        results.text(_SPEED, method, "tokens_per_second"),
        results.text(_SPEED, method, "joules_per_token"),
        text_of(None if memory is None else memory / 2**30),
        results.text(_SPEED, method, "speedup", "×"),
    ]


def _points(results: Results, names: dict[str, str], key: str, sign: int = 1) -> list[tuple[str, float, float]]:
    """Return label, cost and likelihood of the methods for which both were measured."""
    found: list[tuple[str, float, float]] = []
    for label, method in names.items():
        x, y = results.figure(_SPEED, method, key), results.figure(_QUALITY, method, "log_likelihood_per_token")
        if x is not None and y is not None:
            found.append((label, x.scaled(sign), y))
    return found


def _figure(results: Results, key: str, file: str, across: str, sign: int = 1) -> Chart:
    def short(names: dict[str, str]) -> dict[str, str]:
        return {label.replace("W_S=", "").replace("t=", "").replace("W_min=", ""): name for label, name in names.items()}

    groups = {
        "beam sampling": {f"W={width}": method for width, method in _BEAMS.items() if width <= 4},
        "DSBD": short(_DYNAMIC),
        "DSBD *": short(_KNOWN),
        **{label: {label: method} for label, method in _REFERENCES.items()},
    }
    points = {name: _points(results, methods, key, sign) for name, methods in groups.items()}
    content = scatter(points, across=across, up="log-likelihood per token; DSBD: W_S, t, W_min")
    return Chart(file, f"Figures 4 and 5: quality against {across}, with the Pareto front of each method", content)


def _comparison(results: Results, methods: dict[str, str], **fields: Any) -> Comparison:
    """Return a table with a row per method."""
    rows = [_row(name, results, method) for name, method in methods.items()]
    return Comparison(runs=(_QUALITY, _SPEED), columns=_COLUMNS, ours=rows, **fields)


def _pareto(results: Results) -> Comparison:
    joules = any(results.figure(_SPEED, method, "joules_per_token") for method in _BEAMS.values())
    charts = [_figure(results, "tokens_per_second", "figure-4.svg", "tokens per second")]
    if joules:
        across = "joules per token, counted downwards"
        charts += [_figure(results, "joules_per_token", "figure-4-energy.svg", across, sign=-1)]
    return _comparison(
        results,
        _ALL,
        key="pareto",
        title="Figures 4 and 5: quality against speed and energy",
        published_note="SQuAD and Spider, Llama-2-13B and others; the figures print no numbers, the text states the claim",
        published=[["at equal quality DSBD is 1.5 to 1.9 times as fast as beam sampling, with 1.8 to 2.5 times less energy"]],
        remark=_WHAT if joules else f"{_WHAT} {_NO_JOULES.capitalize()}.",
        charts=charts,
    )


def _table_1(results: Results) -> Comparison:
    return _comparison(
        results,
        {"SpecInfer": _SPECINFER, "Beam (W=5)": _BEAMS[5]} | _OF_ONE_CACHE,
        key="table-1",
        title="Table 1: against SpecInfer and beam sampling",
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
    return _comparison(
        results,
        _REFERENCES | _OF_ONE_CACHE,
        key="table-2",
        title="Table 2: one cache only",
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


_METHODS = tuple(dict.fromkeys((*_ALL.values(), *_OF_ONE_CACHE.values())))


def _claims(results: Results) -> list[list[str]]:
    rows = [row for width in (2, 3, 4) for row in _at_equal_quality(results, width)]
    label, method = next(iter(_OF_ONE_CACHE.items()))
    likely = [_difference(results, one, _MULTINOMIAL) for one in (method, _SPECINFER)]
    claim = "with one cache, likelier texts than SpecInfer's, each beside multinomial sampling's"
    rows.append(ordering(claim, (label, likely[0]), ("SpecInfer", likely[1])))
    claim, why = "with one cache, as good as beam sampling of width 5", "the paper has a judge's scores, 3.52 against 3.51"
    gap = _difference(results, method, _BEAMS[5])
    rows.append(ordering(claim, ("difference in log-likelihood", gap), ("none", Estimate.exactly(0.0)), why=why, alike=True))
    for what, key, factor in (("times as fast as", "speedup", 1.53), ("times less energy than", "joules_per_token", 1.54)):
        claim = f"with one cache, {factor} {what} beam sampling of width 5"
        rows.append(_times(results, claim, key, factor, (label, method), ("W=5", _BEAMS[5])))
    claim, why = "with one cache, about as fast as SpD", "SpD's draft is trained on the target here"
    pair = {label: method, "SpD": _SPECULATIVE}
    return [*rows, results.claim(claim, _SPEED, "speedup", pair, digits=2, why=why, alike=True)]


def _times(
    results: Results, claim: str, key: str, factor: float, ours: tuple[str, str], base: tuple[str, str], note: str = ""
) -> list[str]:
    """Return the row of a claim that a method is `factor` times as fast as another, or takes that much less energy."""
    pair = [(name, results.figure(_SPEED, method, key)) for name, method in (ours, base)]
    pair = pair if key == "speedup" else pair[::-1]  # the larger figure is claimed first: the joules of beam sampling
    (name, more), (other, less) = pair
    at_all = f"{'faster' if key == 'speedup' else 'less'} at all: {verdict([more, less])}"
    why = "; ".join(filter(None, (at_all, note)))
    missing = "; ".join(filter(None, (_NO_JOULES if key != "speedup" else "", note)))
    return ordering(claim, (name, more), times(factor, other, less), digits=2, why=why, missing=missing)


def _at_equal_quality(results: Results, width: int) -> list[list[str]]:
    """Return the rows of the main claim, for the fastest dynamic widths that reach the likelihood of this beam sampling."""
    base, beams = _BEAMS[width], f"beam sampling of width {width}"
    claims = {
        "speedup": f"1.5 to 1.9 times as fast as {beams}, at its likelihood",
        "joules_per_token": f"1.8 to 2.5 times less energy than {beams}, at its likelihood",
    }
    compared = {label: _difference(results, method, base) for label, method in _DYNAMIC.items()}
    known = {label: figure for label, figure in compared.items() if figure is not None}
    if not known:
        return [ordering(claim, ("DSBD", None), (f"W={width}", None)) for claim in claims.values()]
    best = max(known, key=lambda label: known[label])
    if known[best] < 0:
        holds = verdict([known[best], Estimate.exactly(0.0)])
        note = f"none of the settings is as likely; nearest is {best}, by {text_of(known[best], digits=3)}"
        return [[claim, note, holds, ""] for claim in claims.values()]
    good = [label for label, figure in known.items() if figure >= 0]
    found = max(good, key=lambda label: results.figure(_SPEED, _DYNAMIC[label], "speedup") or 0.0)
    note = f"the fastest setting that is as likely; its likelihood, minus beams': {text_of(known[found], digits=3)}"
    ours, beam = (found, _DYNAMIC[found]), (f"W={width}", base)
    factors = {"speedup": 1.5, "joules_per_token": 1.8}
    return [_times(results, claim, key, factors[key], ours, beam, note) for key, claim in claims.items()]


_SETTINGS = {"top_k": 10, "top_p": 0.8, "log_likelihood": True}

DSBD = Paper(
    title="Dynamic-Width Speculative Beam Decoding for LLM Inference",
    runs=(
        *Run.of_acceptance("spec_bench", (1.0,), _METHODS, settings=_SETTINGS, seeds=True),
        Run.of_speed(
            1.0, tuple(method for method in _METHODS if method not in _UNTIMED), settings=_SETTINGS | {"log_likelihood": False}
        ),
    ),
    tables=(_pareto, _table_1, _table_2),
    claims=(_claims,),
    contest=(
        ("beam sampling, W=4", _SPEED, _BEAMS[4]),
        ("DSBD, W_S=6, t=0.9, W_min=3", _SPEED, _DYNAMIC["W_S=6, t=0.9, W_min=3"]),
        ("DSBD, W_S=6, t=0.9, W_min=3 *", _SPEED, _KNOWN["W_S=6, t=0.9, W_min=3"]),
        ("DSBD, one cache", _SPEED, next(iter(_OF_ONE_CACHE.values()))),
    ),
)
PAPERS.register("dsbd")(DSBD)
