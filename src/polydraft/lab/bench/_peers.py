"""Peers to compare with: several modes of Hugging Face `generate`, and llama.cpp."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polydraft.cli.comparison import hugging_face_text
from polydraft.devices import captures
from polydraft.errors import FailureError, UsageError, first_line
from polydraft.lab.bench.libllama import SEEDS, VARIABLE, LlamaCpp, find_build, find_wheel
from polydraft.lab.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.models.bundled import BUNDLED, weights_file
from polydraft.models.hf import HFModel
from polydraft.models.translation import refuse_translated

_BACKEND = "inductor"
_WITHOUT_COMPILER = ("No working C++ compiler found", "Failed to find C compiler")
"""What torch and Triton say if there is no compiler."""
_COMPILED_TOKENS = 3
"""Generated to compile: one after the prompt, whose pass is not compiled, and two from compiled passes."""
_PLAIN_DISTRIBUTION = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Turns all truncation and penalties off: llama-cpp-python's defaults truncate."""


@METHODS.register("hf")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate`."""
    spec.take_nothing()
    return _hugging_face(spec, bench, dict, one_token_per_pass=True)


@METHODS.register("hf-assisted")
def assisted(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face assisted generation with the same draft; ``hf-assisted:5`` fixes the number of drafted tokens."""
    spec.take()
    count = spec.count(default=0)
    draft = bench.draft_for(spec)
    refuse_translated(draft, f"method {spec.text!r}")
    if not isinstance(draft, HFModel):
        raise UsageError(f"method {spec.text!r} needs a draft that is a language model; {draft.name!r} is a feature head")
    assistant = draft.hf_model

    def options() -> dict[str, Any]:
        if count:
            assistant.generation_config.num_assistant_tokens = count
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
        return {"assistant_model": assistant}

    return _hugging_face(spec, bench, options)


@METHODS.register("hf-lookup")
def lookup(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face prompt lookup; ``hf-lookup:10`` drafts ten tokens."""
    spec.take()
    count = spec.count(default=10)
    return _hugging_face(spec, bench, lambda: {"prompt_lookup_num_tokens": count})


@METHODS.register("hf-beam")
@METHODS.register("hf-beam-search")
def hugging_face_beams(spec: MethodSpec, bench: Bench) -> Method:
    """Beams of Hugging Face `generate`: ``hf-beam:4`` samples above temperature 0, ``hf-beam-search:4`` never does."""
    spec.take()
    options: dict[str, Any] = {"num_beams": spec.count(default=4)}
    if spec.name == "hf-beam-search":
        options |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return replace(_hugging_face(spec, bench, lambda: options, one_token_per_pass=True), comparable=False)


def _hugging_face(
    spec: MethodSpec, bench: Bench, options: Callable[[], dict[str, Any]], *, one_token_per_pass: bool = False
) -> Method:
    """Make a method of `generate`; `options` returns further arguments for each text, which override those for sampling.

    `generate` does not report its passes; `one_token_per_pass` says that each token took one.
    """
    params = bench.params
    settings: dict[str, Any] = {"do_sample": False}
    if params.temperature > 0:
        # Always pass top_k: by default `generate` keeps only 50 tokens, and would sample from another distribution than ours.
        settings = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}

    def generate(prompt: list[int], seed: int) -> Tokens:
        model, ends = bench.target.model.hf_model, bench.target.eos_token_ids
        tokens = hugging_face_text(model, prompt, ends, bench.max_new_tokens, seed, **{**settings, **options()})
        for index, token in enumerate(tokens[: bench.max_new_tokens]):
            yield Token(token, "target" if one_token_per_pass else "unknown", index if one_token_per_pass else None)
        return None

    return Method(name=spec.text, generate=generate)


@METHODS.register("hf-compiled")
def compiled(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate` with a static cache and a compiled forward; compiled once, before anything is measured."""
    spec.take_nothing()
    peer = _hugging_face(spec, bench, lambda: _compiled_options(bench), one_token_per_pass=True)
    ready = False

    def generate(prompt: list[int], seed: int) -> Tokens:
        nonlocal ready
        if not ready:  # the first call is the warm-up
            _compile(prompt, bench)
            ready = True
        return (yield from peer.generate(prompt, seed))

    return Method(name=spec.text, generate=generate)


def _compiled_options(bench: Bench) -> dict[str, Any]:
    from transformers import CompileConfig

    # reduce-overhead means CUDA graphs, which is what transformers itself chooses on a GPU.
    mode = "reduce-overhead" if captures(bench.target.model.device) else "default"
    config = CompileConfig(backend=_BACKEND, mode=mode)
    config._compile_all_devices = True  # on CPUs too: transformers compiles only on GPUs by default
    return {"cache_implementation": "static", "compile_config": config}


def _compile(prompt: list[int], bench: Bench) -> None:
    """Compile for the longest of all texts; transformers never shrinks a static cache, so later texts do not compile again."""
    model, length = bench.target.model.hf_model, bench.longest_prompt + bench.max_new_tokens
    text = (prompt * (length // len(prompt) + 1))[: max(1, length - _COMPILED_TOKENS)]
    try:
        hugging_face_text(model, text, (), length - len(text), 0, do_sample=False, **_compiled_options(bench))
    except RuntimeError as problem:
        if any(words in str(problem) for words in _WITHOUT_COMPILER):
            raise FailureError("method 'hf-compiled' needs a C++ compiler and found none; install one, such as g++") from None
        raise


@METHODS.register("llama.cpp")
def llama_cpp(spec: MethodSpec, bench: Bench) -> Method:
    """llama.cpp on the target's own GGUF file. Its arithmetic on quantized weights differs from ours, and so do its texts.

    ``llama.cpp,lib=PATH`` or the environment variable `POLYDRAFT_LLAMA_CPP` names a build; the default is llama-cpp-python's.
    """
    place = spec.take("lib").get("lib") or os.environ.get(VARIABLE, "")
    spec.refuse_argument(f"{spec.name} or {spec.name},lib=PATH")
    weights = _gguf(spec, bench)
    if place:
        with spec.named_in_errors():
            return _library(spec, bench, find_build(place), weights)
    threads = torch.get_num_threads()
    engine = _llama_cpp_library().Llama(
        str(weights),
        n_ctx=bench.longest_prompt + bench.max_new_tokens,
        n_threads=threads,
        n_threads_batch=threads,  # for prompts; its default is every core
        verbose=False,
    )

    def tokens(prompt: list[int], seed: int) -> Iterator[int]:
        engine.reset()  # otherwise it would reuse the prefix that prompts share
        engine.set_seed(seed % SEEDS)
        yield from engine.generate(prompt, temp=bench.params.temperature, **_PLAIN_DISTRIBUTION)  # temp=0 decodes greedily

    return _one_by_one(spec, bench, tokens)


@METHODS.register("xllamacpp")
def xllamacpp(spec: MethodSpec, bench: Bench) -> Method:
    """llama.cpp from the wheel `xllamacpp`, compiled for CPUs in general; on the same weights as the method llama.cpp."""
    spec.take_nothing()
    weights = _gguf(spec, bench)
    with spec.named_in_errors():
        return _library(spec, bench, find_wheel(), weights)


def _gguf(spec: MethodSpec, bench: Bench) -> Path:
    name = bench.target.model.name
    given = Path(name).expanduser()
    named = given if given.suffix.lower() == ".gguf" and given.is_file() else None
    weights = weights_file() if name == BUNDLED else named
    if weights is None:
        raise UsageError(f"method {spec.name!r} reads GGUF weights; it works with --target {BUNDLED} and GGUF files")
    return weights


def _library(spec: MethodSpec, bench: Bench, file: Path, weights: Path) -> Method:
    capacity = bench.longest_prompt + bench.max_new_tokens
    engine = LlamaCpp(file, weights, capacity=capacity, threads=torch.get_num_threads())
    return _one_by_one(spec, bench, lambda prompt, seed: engine.generate(prompt, bench.params, seed))


def _one_by_one(spec: MethodSpec, bench: Bench, endless: Callable[[list[int], int], Iterator[int]]) -> Method:
    """Make a method of a function that yields tokens endlessly, one per pass of an engine with its own weights."""
    eos = set(bench.target.eos_token_ids)

    def generate(prompt: list[int], seed: int) -> Tokens:
        for index, token in enumerate(endless(prompt, seed)):
            yield Token(token, "target", index)
            if token in eos or index + 1 == bench.max_new_tokens:
                break
        return None

    return Method(name=spec.text, generate=generate, comparable=False)


def _llama_cpp_library() -> Any:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:  # its shared library may be missing, or for another machine
        raise UsageError(
            f"method 'llama.cpp' needs the package llama-cpp-python, which cannot be loaded ({first_line(problem)}); "
            f"get it with: pip install llama-cpp-python, or give a build of llama.cpp with lib=PATH or {VARIABLE}"
        ) from None
    return llama_cpp
