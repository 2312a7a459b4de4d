"""*Dynamic-Width Speculative Beam Decoding for LLM Inference*: Figures 4 and 5, Tables 1 and 2, without a judge of quality."""

from polydraft.lab.charts import Drawing, scatter
from polydraft.lab.papers.paper import PAPERS, Comparison, Paper, Results, Run, ordering, text_of

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
        (3, 6, 3, 0.7, 1),
        (3, 6, 3, 0.9, 1),
        (3, 6, 2, 0.9, 2),
        (4, 6, 2, 0.9, 3),
    )
}
"""The paper's grid has W_S from 2 to 6, t of 0.7 and 0.9, W_min from 1 to 3; these are spread over it."""
_FIXED = {
    "fixed W=4, layers, iid": "dsbd:4,width=8,depth=2",
    "fixed W=4, shared noise, distinct *": "dsbd:4,width=8,depth=2,draws=distinct",
}
_DISTINCT = "beam:4,draws=distinct"
_ONE_CACHE = {
    f"DSBD, one cache, W_S={width}, t={threshold}": f"dsbd:{beams},width={width},depth=3,threshold={threshold},one=cache"
    for beams, width, threshold in ((2, 4, 0.7), (3, 6, 0.9))
}
_TEMPERATURE = 1.0
_QUALITY, _SPEED = "spec_bench-t1", "speed-t1"
_COLUMNS = ["method", "log-likelihood/token", "tokens/pass", "tokens/s", "J/token", "speed-up"]
_NO_JOULES = "No energy counter could be read on this machine: J/token is not available."


def _row(name: str, results: Results, method: str) -> list[str]:
    """Return what the texts are worth, on all prompts, and what they cost, on the timed ones."""
    quality = [
        results.text(_QUALITY, method, "log_likelihood_per_token", digits=3),
        results.text(_QUALITY, method, "tokens_per_pass"),
    ]
    costs = [results.text(_SPEED, method, key) for key in ("tokens_per_second", "joules_per_token")]
    return [name, *quality, *costs, results.text(_SPEED, method, "speedup", "×")]


def _points(results: Results, names: dict[str, str], key: str, sign: int = 1) -> list[tuple[str, float, float]]:
    """Return label, cost and likelihood of methods that have both."""
    found = []
    for label, method in names.items():
        x, y = results.get_figure(_SPEED, method, key), results.get_figure(_QUALITY, method, "log_likelihood_per_token")
        if x is not None and y is not None:
            found.append((label, sign * x, y))
    return found


def _references() -> dict[str, str]:
    return {"multinomial": _MULTINOMIAL, "SpD": _SPECULATIVE, "SpecInfer": _SPECINFER}


def _figure(results: Results, key: str, file: str, across: str, sign: int = 1) -> Drawing:
    beams = {f"W={width}": method for width, method in _BEAMS.items() if width <= 4}
    others = {label.replace("W_S=", "").replace("t=", "").replace("W_min=", ""): method for label, method in _DYNAMIC.items()}
    groups = {
        "beams": _points(results, beams | _references(), key, sign),
        "DSBD": _points(results, others, key, sign),
    }
    content = scatter(groups, across=across, up="log-likelihood per token; DSBD: W_S, t, W_min")
    return Drawing(file, f"Figures 4 and 5: quality against {across}, with Pareto fronts", content)


def _pareto(results: Results) -> Comparison:
    names = _references() | {f"beam sampling, W={width}": method for width, method in _BEAMS.items()}
    names |= {f"DSBD, {label}": method for label, method in _DYNAMIC.items()} | _FIXED
    names["beam sampling, W=4, distinct *"] = _DISTINCT
    return Comparison(
        key="pareto",
        title="Figures 4 and 5: quality against speed and energy",
        runs=(_QUALITY, _SPEED),
        columns=_COLUMNS,
        ours=[_row(name, results, method) for name, method in names.items()],
        published_note="SQuAD and Spider, Llama-2-13B and others; the figures print no numbers, the text states the claim",
        published=[["at equal quality DSBD is 1.5 to 1.9 times as fast as beam sampling, with 1.8 to 2.5 times less energy"]],
        remark=_claim(results) + " Methods with a star are not in the paper.",
        drawings=[
            _figure(results, "tokens_per_second", "figure-4.svg", "tokens per second"),
            _figure(results, "joules_per_token", "figure-4-energy.svg", "joules per token, counted downwards", sign=-1),
        ],
    )


def _claim(results: Results) -> str:
    """Say what the paper's claim amounts to here: the best dynamic widths that reach each beam sampling's likelihood."""
    said = []
    for width in (2, 3, 4):
        found = [_gain(results, _BEAMS[width], key) for key in ("tokens_per_second", "joules_per_token")]
        speed, energy = (text_of(value, "×") for value in found)
        said.append(f"W={width}: speed {speed}, energy {energy}")
    joules = any(results.get_figure(_SPEED, method, "joules_per_token") for method in _BEAMS.values())
    spent = "" if joules else f" {_NO_JOULES}"
    return f"The best DSBD setting that reaches beam sampling's likelihood, against beam sampling: {'; '.join(said)}.{spent}"


def _gain(results: Results, base: str, key: str) -> float | None:
    """Return by which factor the best dynamic width that is as likely as `base` costs less; None where there is none."""
    quality, cost = results.get_figure(_QUALITY, base, "log_likelihood_per_token"), results.get_figure(_SPEED, base, key)
    if quality is None or not cost:
        return None
    gains = []
    for method in _DYNAMIC.values():
        likely, own = results.get_figure(_QUALITY, method, "log_likelihood_per_token"), results.get_figure(_SPEED, method, key)
        if likely is not None and likely >= quality and own:
            gains.append(own / cost if key == "tokens_per_second" else cost / own)
    return max(gains, default=None)


def _table_1(results: Results) -> Comparison:
    names = {"SpecInfer": _SPECINFER, "Beam (W=5)": _BEAMS[5]} | _ONE_CACHE
    return Comparison(
        key="table-1",
        title="Table 1: against SpecInfer and beam sampling",
        runs=(_QUALITY, _SPEED),
        columns=_COLUMNS,
        ours=[_row(name, results, method) for name, method in names.items()],
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
    names = _references() | _ONE_CACHE
    return Comparison(
        key="table-2",
        title="Table 2: one cache only",
        runs=(_QUALITY, _SPEED),
        columns=_COLUMNS,
        ours=[_row(name, results, method) for name, method in names.items()],
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


def _orderings(results: Results) -> list[list[str]]:
    def rows(what: str, key: str) -> list[list[str]]:
        return [
            ordering(
                f"{what}, gain over beam sampling of width {width} at its likelihood",
                ("DSBD", _gain(results, _BEAMS[width], key)),
                ("beams", 1.0),
                digits=2,
            )
            for width in (2, 4)
        ]

    return [*rows("speed", "tokens_per_second"), *rows("energy", "joules_per_token")]


_SETTINGS = {"top_k": 10, "top_p": 0.8, "log_likelihood": True, "max_new_tokens": 32}

DSBD = Paper(
    title="Dynamic-Width Speculative Beam Decoding for LLM Inference",
    runs=(
        Run(name=_QUALITY, prompts="spec_bench", temperature=_TEMPERATURE, methods=_METHODS, settings=_SETTINGS),
        Run(
            name=_SPEED,
            prompts="spec_bench",
            temperature=_TEMPERATURE,
            methods=tuple(method for method in _METHODS if method not in (_DISTINCT, _BEAMS[1], *_FIXED.values())),
            settings=_SETTINGS | {"log_likelihood": False},
            timed=True,
        ),
    ),
    tables=_tables,
    orderings=_orderings,
    contest=(
        ("beam sampling, W=4", _SPEED, _BEAMS[4]),
        ("DSBD, W_S=6, t=0.9, W_min=3", _SPEED, _DYNAMIC["W_S=6, t=0.9, W_min=3"]),
        ("DSBD, one cache", _SPEED, next(iter(_ONE_CACHE.values()))),
    ),
)
PAPERS.register("dsbd")(DSBD)
