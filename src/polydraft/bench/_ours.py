"""Our own methods: plain decoding, draft trees, n-grams alone or beside a tree, and beams."""

import math
from collections.abc import Callable
from typing import Any

from polydraft.beam import BeamDecoder
from polydraft.bench.method import COMBINED, METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.decision import DEFAULT_THRESHOLD, SHIPPED_DECISIONS, DecisionModel, check_threshold, load_decision
from polydraft.drafters import (
    GRAM_DRAFTERS,
    LOSSY_DRAFTERS,
    Drafter,
    GramTreeOptions,
    Parts,
    RiderOptions,
    make_drafter,
)
from polydraft.engine import Decoder, Stats
from polydraft.errors import UsageError, unknown_name
from polydraft.models import LanguageModel
from polydraft.ngrams import GramOptions
from polydraft.papers.flat import FlatModel
from polydraft.trees import Topology, parse_dynamic, parse_tree
from polydraft.walks import AUTO

IF_SHIPPED = "if-shipped"
"""In place of a decision model's folder: the one that ships with the draft, or none."""
_TREES: dict[str, Callable[[str], str]] = {
    "sd": lambda argument: f"chain:{argument or 5}",
    "mcsd": lambda argument: argument or "4x2x2x1x1",
    "fork": lambda argument: f"fork:{argument or '16x5'}",
}
"""Methods with a static tree, which a combination may have beside n-grams, and the tree that their argument means."""
_GRAM_SIZES = ("nodes", "depth", "branches", "length", "gram", "prefix")
_GRAM_OPTIONS = (*_GRAM_SIZES, "chance", "seeds", "context", "corpus", "lossy")
_SWITCH = {"yes": True, "no": False}
_BEAM_SHARED = ("length_penalty", "early_stopping")
_BEAM_DRAFTS = ("width", "depth", "draft")
_BEAM_SAMPLING = ("draws", "verification")
_BEAM_NAMES = {"width": "draft_width", "depth": "draft_depth", "threshold": "width_threshold", "min": "min_width"}
_BEAM_FLAGS = {"one": ("cache", "one_cache"), "draft": ("twins", "twins")}
_BEAM_NUMBERS = {"draft_width": int, "draft_depth": int, "width_threshold": float, "min_width": int, "length_penalty": float}


@METHODS.register("ar")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Plain autoregressive decoding on our engine, the baseline."""
    spec.take_nothing()
    return _decoded(spec, bench, None)


@METHODS.register("sd")
@METHODS.register("mcsd")
@METHODS.register("fork")
def static_tree(spec: MethodSpec, bench: Bench) -> Method:
    """Decode with a chain, ``sd:5``, any tree, ``mcsd:4x2x2x1x1``, or a fork of chains, ``fork:16x5`` (16 of length 5)."""
    topology = parse_tree(_TREES[spec.name](spec.argument))
    options = spec.take("scheme", "walk", "draft_temperature", "attention", "decision", "stop_below")
    _check_draft(spec, bench)
    attention = options.get("attention", "tree")
    if attention not in ("tree", "flat"):
        raise UsageError(f"method {spec.text!r}: attention={attention!r}; allowed: tree, flat")
    parts = Parts(
        target=bench.target.model,
        draft=bench.draft,
        topology=topology,
        scheme=options.get("scheme", "auto"),
        draft_temperature=_draft_temperature(spec),
        decision=_decision(spec, bench),
    )
    target = bench.target.model if attention == "tree" else FlatModel(bench.target.model, topology)
    return _decoded(spec, bench, make_drafter(parts), topology.parents, target=target, walk=options.get("walk", AUTO))


@METHODS.register("dynamic")
def dynamic(spec: MethodSpec, bench: Bench) -> Method:
    """Decode with a tree that every round chooses anew: ``dynamic:64``, ``dynamic:64:6``, ``dynamic:64:6:fixed``."""
    spec.take("walk", "draft_temperature", "decision", "stop_below")
    shape = parse_dynamic(f"dynamic:{spec.argument}" if spec.argument else "dynamic")
    _check_draft(spec, bench)
    parts = Parts(
        target=bench.target.model,
        draft=bench.draft,
        topology=Topology(),
        draft_temperature=_draft_temperature(spec),
        dynamic=shape,
        decision=_decision(spec, bench),
    )
    return _decoded(spec, bench, make_drafter(parts), walk=spec.options.get("walk", AUTO))


@METHODS.register("target-init")
def target_init(spec: MethodSpec, bench: Bench) -> Method:
    """Keep the longest of several chains behind tokens of the target, as improved-MCSD does. Lossy: ``target-init:16x5``."""
    spec.take()
    topology = parse_tree(f"fork:{spec.argument or '16x5'}")
    _check_draft(spec, bench)
    drafter = LOSSY_DRAFTERS.get("target-init")(Parts(target=bench.target.model, draft=bench.draft, topology=topology))
    decoder = Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids, lossless=False)
    return _streamed(spec, bench, decoder.stream, topology.parents, comparable=False, sampling=bench.params)


def _check_draft(spec: MethodSpec, bench: Bench) -> None:
    if bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")


def _decision(spec: MethodSpec, bench: Bench) -> DecisionModel | None:
    """Load the decision model that a method asks for."""
    name = spec.options.get("decision")
    text = spec.options.get("stop_below", str(DEFAULT_THRESHOLD))
    try:
        threshold = float(text)
    except ValueError:
        raise UsageError(f"method {spec.text!r}: stop_below={text!r} is not a number; allowed: 0 to 1") from None
    check_threshold(threshold)
    if name is None or (name == IF_SHIPPED and bench.draft.name not in SHIPPED_DECISIONS):
        return None
    return load_decision(AUTO if name == IF_SHIPPED else name, bench.draft, threshold)


def _draft_temperature(spec: MethodSpec) -> float | None:
    text = spec.options.get("draft_temperature")
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"method {spec.text!r}: draft_temperature={text!r} is out of range; allowed: 0 or more")
    return value


def _gram_options(spec: MethodSpec, bench: Bench) -> GramTreeOptions:
    """Read the options behind a method."""
    options = dict(spec.options)
    if spec.name == "self-draft" and spec.argument:
        options["branches"], separator, options["length"] = spec.argument.partition("x")
        if not separator:
            raise UsageError(f"method {spec.text!r}: {spec.argument!r} is not a size of branches; write self-draft:6x6")
    sizes = {name: _number(spec, name, options[name]) for name in _GRAM_SIZES if name in options}
    switches = {name: _choice(spec, name, options.get(name, "yes"), _SWITCH) for name in ("context", "corpus")}
    flat_blocks = "lossy" in options and _choice(spec, "lossy", options["lossy"], {"flat-blocks": True})
    riders = _renamed(sizes, {"branches": "branches", "length": "length"})
    if "seeds" in options:
        riders["seeds"] = options["seeds"]
    caches = _renamed(sizes, {"gram": "gram", "prefix": "max_prefix"})
    return GramTreeOptions(
        **_renamed(sizes, {"nodes": "nodes", "depth": "depth"}),
        least_chance=_chance(spec, options["chance"]) if "chance" in options else None,
        riders=RiderOptions(**riders) if riders else None,
        caches=GramOptions(**caches, corpus=bench.corpus),
        flat_blocks=flat_blocks,
        **switches,
    ).for_tokenizer(bench.target.tokenizer)


def _number(spec: MethodSpec, name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"method {spec.text!r}: {name}={text!r} is out of range; allowed: whole numbers")
    return int(text)


def _chance(spec: MethodSpec, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"method {spec.text!r}: chance={text!r} is out of range; allowed: 0 to 1") from None


def _choice(spec: MethodSpec, name: str, text: str, allowed: dict[str, bool]) -> bool:
    if text not in allowed:
        raise UsageError(f"method {spec.text!r}: {name}={text!r}; allowed: {', '.join(allowed)}")
    return allowed[text]


def _renamed(values: dict[str, int], names: dict[str, str]) -> dict[str, Any]:
    return {name: values[key] for key, name in names.items() if key in values}


def _ngrams(spec: MethodSpec, bench: Bench) -> Method:
    """Draft from n-grams alone: ``self-draft:6x6,nodes=32``, ``lookup``, ``corpus+suffix``."""
    spec.take(*_GRAM_OPTIONS)
    if spec.argument and spec.name != "self-draft":
        raise UsageError(f"method {spec.text!r} takes no argument; write {spec.name},nodes=20")
    parts = Parts(target=bench.target.model, topology=parse_tree("none"), grams=_gram_options(spec, bench))
    return _decoded(spec, bench, make_drafter(parts, spec.name))


for _name in GRAM_DRAFTERS:
    METHODS.register(_name)(_ngrams)


@METHODS.register(COMBINED)
def combined(spec: MethodSpec, bench: Bench) -> Method:
    """Combine n-grams and a draft's tree, whose argument it takes: ``lookup+mcsd:4x2x1``, ``self-draft+sd:3,branches=2``."""
    names = spec.name.split("+")
    for name in names:
        if name not in GRAM_DRAFTERS and name not in _TREES:
            raise unknown_name(f"method in {spec.text!r}:", name, [*GRAM_DRAFTERS, *_TREES])
    trees = [name for name in names if name in _TREES]
    if not trees:
        return _ngrams(spec, bench)
    if "+" in spec.argument:  # a second name behind the first one's argument would read as part of a tree
        raise UsageError(
            f"method {spec.text!r}: {spec.argument!r} is not an argument; allowed: one tree, with its argument last, as in "
            "lookup+mcsd:4x2x1"
        )
    if len(trees) > 1:
        raise UsageError(f"method {spec.text!r} has {len(trees)} trees; allowed: one of {', '.join(_TREES)}")
    options = spec.take(*_GRAM_OPTIONS, "scheme", "draft_temperature")
    _check_draft(spec, bench)
    parts = Parts(
        target=bench.target.model,
        draft=bench.draft,
        topology=parse_tree(_TREES[trees[0]](spec.argument)),
        scheme=options.get("scheme", "auto"),
        draft_temperature=_draft_temperature(spec),
        grams=_gram_options(spec, bench),
    )
    drafter = make_drafter(parts, "+".join("model" if name in _TREES else name for name in names))
    return _decoded(spec, bench, drafter, parts.topology.parents)


@METHODS.register("beam")
def beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling without drafts: ``beam:4``, with ``,draws=distinct|iid|hf``."""
    spec.take("draws", *_BEAM_SHARED)
    return _beams(spec, bench, "sample", with_draft=False)


@METHODS.register("dsbd")
def speculative_beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling with drafts: ``dsbd:4,width=8,depth=3``, with ``,threshold=0.7,min=1`` for dynamic widths, ``,one=cache``.

    With ``,draft=twins`` it does without a draft model.
    Layers of the paper's ``iid`` beams unless ``,draws=`` or ``,verification=`` say otherwise.
    """
    spec.take("threshold", "min", "one", *_BEAM_DRAFTS, *_BEAM_SAMPLING, *_BEAM_SHARED)
    return _beams(spec, bench, "sample", with_draft=True)


@METHODS.register("beam-search")
def beam_search(spec: MethodSpec, bench: Bench) -> Method:
    """Deterministic beam search: ``beam-search:4``; with drafts ``beam-search:4,width=8,depth=3``, the same text.

    With ``,draft=twins`` drafts need no draft model.
    """
    spec.take(*_BEAM_DRAFTS, *_BEAM_SHARED)
    return _beams(spec, bench, "search", with_draft=bool({*_BEAM_DRAFTS} & {*spec.options}))


def _beams(spec: MethodSpec, bench: Bench, mode: str, *, with_draft: bool) -> Method:
    if mode == "sample" and bench.params.temperature == 0:
        raise UsageError(f"method {spec.text!r} samples; pass --temperature above 0, or use beam-search")
    with_model = with_draft and "draft" not in spec.options
    drafter = None
    if with_model:
        _check_draft(spec, bench)
        drafter = make_drafter(Parts(target=bench.target.model, draft=bench.draft, topology=parse_tree("1")))
    decoder = BeamDecoder(Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids))
    options = {"mode": mode, "beams": spec.count(default=4), **_beam_options(spec, mode, with_draft)}
    decoder.check(**options)
    if mode == "sample":
        options["sampling"] = bench.params
    return _streamed(spec, bench, decoder.stream, comparable=False, **options)


def _beam_options(spec: MethodSpec, mode: str, with_draft: bool) -> dict[str, Any]:
    """Turn what was written behind a method's name into options of beams."""
    found: dict[str, Any] = {"draws": "iid"} if mode == "sample" and with_draft else {}
    for key, text in spec.options.items():
        name = _BEAM_NAMES.get(key, key)
        if name in _BEAM_FLAGS:
            word, option = _BEAM_FLAGS[name]
            if text != word:
                raise UsageError(f"method {spec.text!r}: {name}={text!r}; allowed: {name}={word}")
            found[option] = True
        elif name == "early_stopping":
            found[name] = {"true": True, "false": False}.get(text, text)
        elif name in _BEAM_NUMBERS:
            try:
                found[name] = _BEAM_NUMBERS[name](text)
            except ValueError:
                raise UsageError(f"method {spec.text!r}: {key}={text!r} is not a number; use one such as 4") from None
        else:
            found[name] = text
    return found


def _decoded(
    spec: MethodSpec,
    bench: Bench,
    drafter: Drafter | None,
    parents: tuple[int, ...] | None = None,
    *,
    target: LanguageModel | None = None,
    walk: str = AUTO,
) -> Method:
    """Decode with a drafter, on the benchmark's target unless another is given."""
    target = bench.target.model if target is None else target
    decoder = Decoder(target, drafter, eos_token_ids=bench.target.eos_token_ids, walk=walk)
    return _streamed(spec, bench, decoder.stream, parents, sampling=bench.params)


def _streamed(
    spec: MethodSpec,
    bench: Bench,
    start: Callable[..., Any],
    parents: tuple[int, ...] | None = None,
    comparable: bool = True,
    **options: Any,
) -> Method:
    """Make a method of a decoder's `stream`."""

    def generate(prompt: list[int], seed: int) -> Tokens:
        stream = start(prompt, max_new_tokens=bench.max_new_tokens, seed=seed, **options)
        for event in stream:
            yield Token(event.token_id, event.source, event.round)
        stats: Stats = stream.stats
        return stats

    return Method(name=spec.text, generate=generate, parents=parents, comparable=comparable)
