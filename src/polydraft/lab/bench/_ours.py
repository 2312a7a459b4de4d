"""Our own methods: plain decoding, draft trees, n-grams (alone or with a tree), and beams."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polydraft.beam import BeamDecoder, BeamOptions
from polydraft.draft import GRAM_DRAFTERS, Parts, make_drafter
from polydraft.draft.tree_drafter import needs_draft
from polydraft.engine import Decoder, Stats
from polydraft.errors import UsageError, unknown_name
from polydraft.lab.bench.method import COMBINED, METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.lab.bench.options import OF_DRAFTS, MethodNgrams, method_options
from polydraft.lab.papers.flat import FlatModel
from polydraft.loading import default_decoder, make_decoder
from polydraft.models import LanguageModel
from polydraft.options import AUTO, COUPLED, SELF_DRAFT, LoadOptions
from polydraft.trees import parse_tree

_TREES: dict[str, Callable[[str], str]] = {
    "sd": lambda argument: f"chain:{argument or 5}",
    "mcsd": lambda argument: argument or "4x2x2x1x1",
    "fork": lambda argument: f"fork:{argument or '16x5'}",
}
"""Methods with a static tree, which can be combined with n-grams; each turns its argument into a tree."""
_BEAM_SHARED = ("length_penalty", "early_stopping")
_BEAM_DRAFTS = ("width", "depth", "draft")
_BEAM_SAMPLING = ("draws", "verification")
_BEAM_NAMES = {"width": "draft_width", "depth": "draft_depth", "threshold": "width_threshold", "min": "min_width"}
_BEAM_FLAGS = {"one": {"cache": "one_cache"}, "draft": {"twins": "twins", "model": "model_only"}}
_BEAM_NUMBERS = {"draft_width": int, "draft_depth": int, "width_threshold": float, "min_width": int, "length_penalty": float}


@METHODS.register("ar")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Plain autoregressive decoding on our engine, the baseline; ``,graphs=no`` turns CUDA graphs off."""
    spec.refuse_argument()
    given = spec.read([option for option in method_options(grams=False) if option.name == "graphs"])
    return _decoded(spec, bench, LoadOptions(tree="none", **given))


@METHODS.register("auto")
def by_default(spec: MethodSpec, bench: Bench) -> Method:
    """Decode as `polydraft.load` does by default, with the benchmark's draft if it has one."""
    spec.take_nothing()
    return _measured(spec, bench, default_decoder(bench.target, bench.draft, bench.target_name))


@METHODS.register("sd")
@METHODS.register("mcsd")
@METHODS.register("fork")
def static_tree(spec: MethodSpec, bench: Bench) -> Method:
    """Decode with a chain, ``sd:5``, any tree, ``mcsd:4x2x2x1x1``, or a fork of chains, ``fork:16x5`` (16 of length 5)."""
    options = _options(spec, bench, "attention", skip=("lossy",), tree=_TREES[spec.name](spec.argument))
    attention = spec.options.get("attention", "tree")
    if attention not in ("tree", "flat"):
        raise UsageError(f"method {spec.text!r}: attention={attention!r}; allowed: tree, flat")
    target = None if attention == "tree" else FlatModel(bench.target.model, options.shape[1])
    return _decoded(spec, bench, options, target=target)


@METHODS.register("dynamic")
def dynamic(spec: MethodSpec, bench: Bench) -> Method:
    """Decode with a tree chosen anew in every round: ``dynamic:64``, ``dynamic:64:6``, ``dynamic:64:6:fixed``."""
    tree = f"dynamic:{spec.argument}" if spec.argument else "dynamic"
    return _decoded(spec, bench, _options(spec, bench, skip=("scheme", "lossy"), tree=tree))


@METHODS.register("target-init")
def target_init(spec: MethodSpec, bench: Bench) -> Method:
    """Start several chains with the target's best tokens and keep the longest: ``target-init:16x5``, lossy, of improved-MCSD.

    Its decision models: ``,decision=hidden`` (P_T1) or ``,decision=distribution`` (P_T2).
    """
    spec.take("decision", "stop_below")
    return _decoded(spec, bench, _options(spec, bench, tree=f"fork:{spec.argument or '16x5'}", lossy="target-init"))


def _options(spec: MethodSpec, bench: Bench, *others: str, skip: tuple[str, ...] = (), **fixed: Any) -> LoadOptions:
    """Read a method's options, those of n-grams included if it uses any; its name fixes those in `fixed`."""
    values = spec.read(method_options(grams="drafter" in fixed, skip=(*skip, *fixed)), *others)
    if needs_draft(fixed.get("drafter", AUTO)):
        bench.draft_for(spec)
    with spec.named_in_errors():
        names = values.keys() & MethodNgrams.__dataclass_fields__.keys()
        given = MethodNgrams(**{name: values.pop(name) for name in names})
        grams = given.grams_asked_for(fixed.get("drafter", SELF_DRAFT), values.get("lossy"))
        grams = replace(grams, caches=replace(grams.caches, corpus=bench.corpus))
        options = LoadOptions(**fixed, **values, grams=grams)
        options.check_used()
        return options


def _ngrams(spec: MethodSpec, bench: Bench) -> Method:
    """Draft from n-grams alone: ``self-draft:6x6,nodes=32``, ``lookup``, ``corpus+suffix``."""
    if spec.name != "self-draft":
        spec.refuse_argument(f"{spec.name},nodes=20")
    if spec.argument:
        branches, separator, length = spec.argument.partition("x")
        if not separator:
            raise UsageError(f"method {spec.text!r}: {spec.argument!r} is not a size of branches; write self-draft:6x6")
        spec = replace(spec, options={**spec.options, "branches": branches, "length": length})
    return _decoded(spec, bench, _options(spec, bench, skip=OF_DRAFTS, drafter=spec.name, tree="none"))


for _name in GRAM_DRAFTERS:
    METHODS.register(_name)(_ngrams)


@METHODS.register(COMBINED)
def combined(spec: MethodSpec, bench: Bench) -> Method:
    """Combine n-grams with a draft's tree, which gets the argument: ``lookup+mcsd:4x2x1``, ``self-draft+sd:3,branches=2``."""
    names = spec.name.split("+")
    for name in names:
        if name not in GRAM_DRAFTERS and name not in _TREES:
            raise unknown_name(f"method in {spec.text!r}:", name, [*GRAM_DRAFTERS, *_TREES])
    trees = [name for name in names if name in _TREES]
    if not trees:
        return _ngrams(spec, bench)
    if "+" in spec.argument:  # in sd:3+lookup, the second name would be read as part of the tree
        raise UsageError(
            f"method {spec.text!r}: {spec.argument!r} is not an argument; allowed: one tree, with its argument last, as in "
            "lookup+mcsd:4x2x1"
        )
    if len(trees) > 1:
        raise UsageError(f"method {spec.text!r} has {len(trees)} trees; allowed: one of {', '.join(_TREES)}")
    drafter = "+".join("model" if name in _TREES else name for name in names)
    return _decoded(spec, bench, _options(spec, bench, drafter=drafter, tree=_TREES[trees[0]](spec.argument)))


@METHODS.register("beam")
def beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling without drafts: ``beam:4``, with ``,draws=distinct|iid|hf``."""
    spec.take("draws", *_BEAM_SHARED)
    return _beams(spec, bench, "sample", with_draft=False)


@METHODS.register("dsbd")
def speculative_beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling with drafts: ``dsbd:4,width=8,depth=3``, with ``,threshold=0.7,min=1`` for dynamic widths, ``,one=cache``.

    ``,draft=twins`` needs no draft model; ``,draft=model`` drafts from the model alone, as in the paper. By default beams are
    ``iid`` and verified by layers, also as in the paper; ``,draws=`` and ``,verification=`` change that.
    """
    spec.take("threshold", "min", "one", *_BEAM_DRAFTS, *_BEAM_SAMPLING, *_BEAM_SHARED)
    return _beams(spec, bench, "sample", with_draft=True)


@METHODS.register("beam-search")
def beam_search(spec: MethodSpec, bench: Bench) -> Method:
    """Deterministic beam search: ``beam-search:4``; with drafts ``beam-search:4,width=8,depth=3``, which gives the same text.

    ``,draft=twins`` needs no draft model; ``,draft=model`` drafts from the model alone.
    """
    spec.take(*_BEAM_DRAFTS, *_BEAM_SHARED)
    return _beams(spec, bench, "search", with_draft=bool({*_BEAM_DRAFTS} & {*spec.options}))


def _beams(spec: MethodSpec, bench: Bench, mode: str, *, with_draft: bool) -> Method:
    if mode == "sample" and bench.params.temperature == 0:
        raise UsageError(f"method {spec.text!r} samples; pass --temperature above 0, or use beam-search")
    drafter = None
    if with_draft and spec.options.get("draft") != "twins":
        drafter = make_drafter(Parts(draft=bench.draft_for(spec), topology=parse_tree("1")))
    decoder = BeamDecoder(Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids))
    options = {"mode": mode, "beams": spec.count(default=4), **_beam_options(spec, mode, with_draft)}
    BeamOptions(**options)  # refuses wrong options before anything is measured
    if mode == "sample":
        options["sampling"] = bench.params
    return _streamed(spec, bench, decoder.stream, comparable=False, **options)


def _beam_options(spec: MethodSpec, mode: str, with_draft: bool) -> dict[str, Any]:
    """Return a method's options as fields of `BeamOptions`."""
    found: dict[str, Any] = {"draws": "iid"} if mode == "sample" and with_draft else {}
    for key, text in spec.options.items():
        name = _BEAM_NAMES.get(key, key)
        if name in _BEAM_FLAGS:
            words = _BEAM_FLAGS[name]
            if text not in words:
                raise UsageError(f"method {spec.text!r}: {name}={text!r}; allowed: {name}={' or '.join(words)}")
            found[words[text]] = True
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


def _decoded(spec: MethodSpec, bench: Bench, options: LoadOptions, target: LanguageModel | None = None) -> Method:
    """Make a method that decodes with these options, on the benchmark's target unless another is given."""
    with spec.named_in_errors():
        decoder = make_decoder(options, bench.target, bench.draft if needs_draft(options.drafter) else None)
        if options.scheme != COUPLED and not options.is_dynamic:  # these are the papers' methods
            decoder = decoder.replace(coupled=False)
    topology = options.shape[1]
    parents = topology.parents if topology.depth else None
    return _measured(spec, bench, decoder if target is None else decoder.replace(target=target), parents)


def _measured(spec: MethodSpec, bench: Bench, decoder: Decoder, parents: tuple[int, ...] | None = None) -> Method:
    """Make a method of a decoder, for one text or several at a time."""
    decoder = decoder.replace(tokenizer=None)  # only tokens are measured, so no time goes into text
    method = _streamed(spec, bench, decoder.stream, parents, comparable=decoder.lossless, sampling=bench.params)
    longest = bench.longest_prompt + bench.max_new_tokens

    def generate_batch(prompts: list[list[int]], seed: int) -> tuple[list[list[Token]], list[Stats]]:
        # Use a separate decoder: on a GPU a decoder keeps its caches, and these are as large as the batch. All rows get the
        # same seed, so each text is the same as when it is generated alone.
        seeds = [seed] * len(prompts)
        stream = decoder.replace().stream(prompts, max_new_tokens=bench.max_new_tokens, seed=seeds, sampling=bench.params)
        texts: list[list[Token]] = [[] for _ in prompts]
        for event in stream:
            texts[event.row].append(Token(event.token_id, event.source, event.round))
        stats = stream.speculations
        stats[0] = replace(stats[0], seconds=stream.stats.seconds, total_seconds=stream.stats.total_seconds)
        return texts, stats

    return replace(
        method,
        generate_batch=generate_batch,
        warm_up=lambda: decoder.warm_up(sampling=bench.params, longest=longest),
    )


def _streamed(
    spec: MethodSpec,
    bench: Bench,
    start: Callable[..., Any],
    parents: tuple[int, ...] | None = None,
    comparable: bool = True,
    **options: Any,
) -> Method:
    """Make a method of the `stream` function of a decoder."""

    def generate(prompt: list[int], seed: int) -> Tokens:
        stream = start(prompt, max_new_tokens=bench.max_new_tokens, seed=seed, **options)
        for event in stream:
            yield Token(event.token_id, event.source, event.round)
        stats: Stats = stream.stats
        return stats

    return Method(name=spec.text, generate=generate, parents=parents, comparable=comparable)
