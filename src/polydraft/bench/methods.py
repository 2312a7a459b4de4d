"""Our own methods."""

import math

from polydraft.bench.flat import FlatModel
from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.decision import DEFAULT_THRESHOLD, SHIPPED_DECISIONS, DecisionModel, check_threshold, load_decision
from polydraft.drafters import LOSSY_DRAFTERS, Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.trees import Topology, parse_dynamic, parse_tree
from polydraft.walks import AUTO

IF_SHIPPED = "if-shipped"
"""In place of a decision model's folder: the one that ships with the draft, or none."""


@METHODS.register("ar")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Plain autoregressive decoding on our engine, the baseline."""
    spec.take_nothing()
    return _method(spec, bench, Decoder(bench.target.model, eos_token_ids=bench.target.eos_token_ids))


@METHODS.register("sd")
def speculative(spec: MethodSpec, bench: Bench) -> Method:
    """Speculative decoding with one chain: ``sd:5``."""
    length = spec.argument or "5"
    return _tree(spec, bench, parse_tree(f"chain:{length}"))


@METHODS.register("mcsd")
def multi_candidate(spec: MethodSpec, bench: Bench) -> Method:
    """Multi-candidate speculative decoding: ``mcsd:4x2x2x1x1``, or any other tree."""
    return _tree(spec, bench, parse_tree(spec.argument or "4x2x2x1x1"))


@METHODS.register("fork")
def fork(spec: MethodSpec, bench: Bench) -> Method:
    """Decode with a fork of chains: ``fork:16x5`` is 16 chains of length 5."""
    return _tree(spec, bench, parse_tree(f"fork:{spec.argument or '16x5'}"))


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
    walk = spec.options.get("walk", AUTO)
    decoder = Decoder(bench.target.model, make_drafter(parts), eos_token_ids=bench.target.eos_token_ids, walk=walk)
    return _method(spec, bench, decoder)


@METHODS.register("target-init")
def target_init(spec: MethodSpec, bench: Bench) -> Method:
    """Keep the longest of several chains behind tokens of the target, as improved-MCSD does. Lossy: ``target-init:16x5``."""
    spec.take()
    topology = parse_tree(f"fork:{spec.argument or '16x5'}")
    _check_draft(spec, bench)
    drafter = LOSSY_DRAFTERS.get("target-init")(Parts(target=bench.target.model, draft=bench.draft, topology=topology))
    decoder = Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids, lossless=False)
    return _method(spec, bench, decoder, topology.parents, comparable=False)


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
        raise UsageError(f"method {spec.text!r}: stop_below={text!r} is no number; allowed: 0 to 1") from None
    check_threshold(threshold)
    if name is None or (name == IF_SHIPPED and bench.draft.name not in SHIPPED_DECISIONS):
        return None
    return load_decision(AUTO if name == IF_SHIPPED else name, bench.draft, threshold)


def _tree(spec: MethodSpec, bench: Bench, topology: Topology) -> Method:
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
    walk = options.get("walk", AUTO)
    decoder = Decoder(target, make_drafter(parts), eos_token_ids=bench.target.eos_token_ids, walk=walk)
    return _method(spec, bench, decoder, topology.parents)


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


def _method(
    spec: MethodSpec, bench: Bench, decoder: Decoder, parents: tuple[int, ...] | None = None, comparable: bool = True
) -> Method:
    def generate(prompt: list[int], seed: int) -> Tokens:
        stream = decoder.stream(prompt, sampling=bench.params, max_new_tokens=bench.max_new_tokens, seed=seed)
        for event in stream:
            yield Token(event.token_id, event.source, event.round)
        return stream.stats

    return Method(name=spec.text, generate=generate, parents=parents, comparable=comparable)
