"""Methods with beams: our own without and with drafts, and Hugging Face's."""

from typing import Any

from polydraft.beam import BeamDecoder
from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.bench.peers import hugging_face
from polydraft.drafters import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.trees import parse_tree

_SHARED = ("length_penalty", "early_stopping")
_DRAFTS = ("width", "depth", "draft")
_SAMPLING = ("draws", "verification")
_NAMES = {"width": "draft_width", "depth": "draft_depth", "threshold": "width_threshold", "min": "min_width"}
_FLAGS = {"one": ("cache", "one_cache"), "draft": ("twins", "twins")}
_NUMBERS = {"draft_width": int, "draft_depth": int, "width_threshold": float, "min_width": int, "length_penalty": float}


@METHODS.register("beam")
def beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling without drafts: ``beam:4``, with ``,draws=distinct|iid|hf``."""
    spec.take("draws", *_SHARED)
    return _method(spec, bench, "sample", with_draft=False)


@METHODS.register("dsbd")
def speculative_beam_sampling(spec: MethodSpec, bench: Bench) -> Method:
    """Beam sampling with drafts: ``dsbd:4,width=8,depth=3``, with ``,threshold=0.7,min=1`` for dynamic widths, ``,one=cache``.

    With ``,draft=twins`` it does without a draft model.
    Layers of the paper's ``iid`` beams unless ``,draws=`` or ``,verification=`` say otherwise.
    """
    spec.take("threshold", "min", "one", *_DRAFTS, *_SAMPLING, *_SHARED)
    return _method(spec, bench, "sample", with_draft=True)


@METHODS.register("beam-search")
def beam_search(spec: MethodSpec, bench: Bench) -> Method:
    """Deterministic beam search: ``beam-search:4``; with drafts ``beam-search:4,width=8,depth=3``, the same text.

    With ``,draft=twins`` drafts need no draft model.
    """
    spec.take(*_DRAFTS, *_SHARED)
    return _method(spec, bench, "search", with_draft=bool({*_DRAFTS} & {*spec.options}))


@METHODS.register("hf-beam")
def hugging_face_beam(spec: MethodSpec, bench: Bench) -> Method:
    """Beams of Hugging Face `generate`: ``hf-beam:4``; search at temperature 0, sampling above."""
    spec.take()
    width = _width(spec)
    peer = hugging_face(spec, bench, lambda: {"num_beams": width}, one_token_a_pass=True)
    return Method(name=spec.text, generate=peer.generate, comparable=False)


@METHODS.register("hf-beam-search")
def hugging_face_beam_search(spec: MethodSpec, bench: Bench) -> Method:
    """Deterministic beam search of Hugging Face `generate` at any temperature: ``hf-beam-search:4``."""
    spec.take()
    width = _width(spec)
    sampling_off = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    peer = hugging_face(spec, bench, lambda: {"num_beams": width}, one_token_a_pass=True, override=sampling_off)
    return Method(name=spec.text, generate=peer.generate, comparable=False)


def _width(spec: MethodSpec) -> int:
    return spec.count(default=4)


def _method(spec: MethodSpec, bench: Bench, mode: str, *, with_draft: bool) -> Method:
    if mode == "sample" and bench.params.temperature == 0:
        raise UsageError(f"method {spec.text!r} samples; pass --temperature above 0, or use beam-search")
    with_model = with_draft and "draft" not in spec.options
    if with_model and bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
    drafter = None
    if with_model:
        drafter = make_drafter(Parts(target=bench.target.model, draft=bench.draft, topology=parse_tree("1")))
    decoder = BeamDecoder(Decoder(bench.target.model, drafter, eos_token_ids=bench.target.eos_token_ids))
    options = {"mode": mode, "beams": _width(spec), **_options(spec, mode, with_draft)}
    decoder.check(**options)
    if mode == "sample":
        options["sampling"] = bench.params

    def generate(prompt: list[int], seed: int) -> Tokens:
        stream = decoder.stream(prompt, max_new_tokens=bench.max_new_tokens, seed=seed, **options)
        for event in stream:
            yield Token(event.token_id, event.source, event.round)
        return stream.stats

    return Method(name=spec.text, generate=generate, comparable=False)


def _options(spec: MethodSpec, mode: str, with_draft: bool) -> dict[str, Any]:
    """Turn what was written behind a method's name into options of beams."""
    found: dict[str, Any] = {"draws": "iid"} if mode == "sample" and with_draft else {}
    for key, text in spec.options.items():
        name = _NAMES.get(key, key)
        if name in _FLAGS:
            word, option = _FLAGS[name]
            if text != word:
                raise UsageError(f"method {spec.text!r}: {name}={text!r}; allowed: {name}={word}")
            found[option] = True
        elif name == "early_stopping":
            found[name] = {"true": True, "false": False}.get(text, text)
        elif name in _NUMBERS:
            try:
                found[name] = _NUMBERS[name](text)
            except ValueError:
                raise UsageError(f"method {spec.text!r}: {key}={text!r} is not a number; use one such as 4") from None
        else:
            found[name] = text
    return found
