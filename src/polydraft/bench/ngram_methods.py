"""Our methods that propose from n-grams, alone or beside a draft's tree."""

from collections.abc import Callable
from typing import Any

from polydraft.bench.method import COMBINED, METHODS, Bench, Method, MethodSpec
from polydraft.bench.methods import _draft_temperature, _method
from polydraft.drafters import GRAM_DRAFTERS, Drafter, GramTreeOptions, Parts, RiderOptions, make_drafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError, unknown_name
from polydraft.ngrams import GramOptions
from polydraft.trees import parse_tree

_TREES: dict[str, Callable[[str], str]] = {
    "sd": lambda argument: f"chain:{argument or 5}",
    "mcsd": lambda argument: argument or "4x2x2x1x1",
    "fork": lambda argument: f"fork:{argument or '16x5'}",
}
"""Methods that a combination may have beside n-grams, and the tree that their argument means."""
_SIZES = ("nodes", "depth", "branches", "length", "gram", "prefix")
_OPTIONS = (*_SIZES, "chance", "seeds", "context", "corpus", "lossy")
_SWITCH = {"yes": True, "no": False}


def gram_options(spec: MethodSpec, bench: Bench) -> GramTreeOptions:
    """Read the options behind a method."""
    options = dict(spec.options)
    if spec.name == "self-draft" and spec.argument:
        options["branches"], separator, options["length"] = spec.argument.partition("x")
        if not separator:
            raise UsageError(f"method {spec.text!r}: {spec.argument!r} is no size of branches; write self-draft:NUMBERxLENGTH")
    sizes = {name: _number(spec, name, options[name]) for name in _SIZES if name in options}
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
    """Make a method of n-grams alone: ``self-draft:6x6,nodes=32``, ``lookup``, ``corpus+suffix``."""
    spec.take(*_OPTIONS)
    if spec.argument and spec.name != "self-draft":
        raise UsageError(f"method {spec.text!r} takes no argument; write {spec.name},nodes=20")
    parts = Parts(target=bench.target.model, topology=parse_tree("none"), grams=gram_options(spec, bench))
    return _decoded(spec, bench, make_drafter(parts, spec.name))


def _decoded(spec: MethodSpec, bench: Bench, drafter: Drafter, parents: tuple[int, ...] | None = None) -> Method:
    return _method(spec, bench, Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids), parents)


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
            f"method {spec.text!r}: {spec.argument!r} is no argument; allowed: one tree, with its argument last, as in "
            "lookup+mcsd:4x2x1"
        )
    if len(trees) > 1:
        raise UsageError(f"method {spec.text!r} has {len(trees)} trees; allowed: one of {', '.join(_TREES)}")
    options = spec.take(*_OPTIONS, "scheme", "draft_temperature")
    if bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
    parts = Parts(
        target=bench.target.model,
        draft=bench.draft,
        topology=parse_tree(_TREES[trees[0]](spec.argument)),
        scheme=options.get("scheme", "auto"),
        draft_temperature=_draft_temperature(spec),
        grams=gram_options(spec, bench),
    )
    drafter = make_drafter(parts, "+".join("model" if name in _TREES else name for name in names))
    return _decoded(spec, bench, drafter, parts.topology.parents)
