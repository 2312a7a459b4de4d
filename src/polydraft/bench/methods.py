"""Our own methods."""

import math

from polydraft.bench.flat import FlatModel
from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.drafters import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.trees import Topology, parse_tree
from polydraft.walks import AUTO


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


def _tree(spec: MethodSpec, bench: Bench, topology: Topology) -> Method:
    options = spec.take("scheme", "walk", "draft_temperature", "attention")
    if bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
    attention = options.get("attention", "tree")
    if attention not in ("tree", "flat"):
        raise UsageError(f"method {spec.text!r}: attention={attention!r}; allowed: tree, flat")
    parts = Parts(
        target=bench.target.model,
        draft=bench.draft,
        topology=topology,
        scheme=options.get("scheme", "auto"),
        draft_temperature=_draft_temperature(spec),
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


def _method(spec: MethodSpec, bench: Bench, decoder: Decoder, parents: tuple[int, ...] | None = None) -> Method:
    def generate(prompt: list[int], seed: int) -> Tokens:
        stream = decoder.stream(prompt, sampling=bench.params, max_new_tokens=bench.max_new_tokens, seed=seed)
        for event in stream:
            yield Token(event.token_id, event.source, event.round)
        return stream.stats

    return Method(name=spec.text, generate=generate, parents=parents)
