"""Other engines on the same prompts, for comparison."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED, weights_file


@METHODS.register("hf")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate`."""
    spec.take()
    return _hugging_face(spec, bench, lambda: {}, one_token_a_pass=True)


@METHODS.register("hf-compiled")
def compiled(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate` with a static cache and a compiled forward."""
    from transformers import CompileConfig

    spec.take()
    options = {"cache_implementation": "static", "compile_config": CompileConfig(mode="default", fullgraph=False)}
    options["compile_config"]._compile_all_devices = True  # CPUs too: by itself transformers compiles on GPUs only
    return _hugging_face(spec, bench, lambda: options, one_token_a_pass=True)


@METHODS.register("hf-assisted")
def assisted(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face assisted generation with the same draft; ``hf-assisted:5`` fixes the number of drafted tokens."""
    spec.take()
    if bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
    assistant = bench.draft.hf_model

    def options() -> dict[str, Any]:
        if spec.argument:
            assistant.generation_config.num_assistant_tokens = int(spec.argument)
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
        return {"assistant_model": assistant}

    return _hugging_face(spec, bench, options)


@METHODS.register("hf-lookup")
def lookup(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face prompt lookup; ``hf-lookup:10`` drafts ten tokens."""
    spec.take()
    return _hugging_face(spec, bench, lambda: {"prompt_lookup_num_tokens": int(spec.argument or 10)})


def _hugging_face(
    spec: MethodSpec, bench: Bench, options: Callable[[], dict[str, Any]], one_token_a_pass: bool = False
) -> Method:
    model, params = bench.target.model.hf_model, bench.params
    settings: dict[str, Any] = {"do_sample": False}
    if params.temperature > 0:
        # top_k=0: `generate` would otherwise keep 50 tokens by default and sample from another law than we do.
        settings = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    eos = list(bench.target.eos_token_ids)

    def generate(prompt: list[int], seed: int) -> Tokens:
        ids_1T = torch.tensor([prompt], device=model.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=bench.max_new_tokens,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,
                **settings,
                **options(),
            )
        tokens = output[0, len(prompt) :].tolist()
        for index, token in enumerate(tokens[: bench.max_new_tokens]):
            yield Token(token, "target" if one_token_a_pass else "unknown", index if one_token_a_pass else None)
        return None

    return Method(name=spec.text, generate=generate)


@METHODS.register("llama.cpp")
def llama_cpp(spec: MethodSpec, bench: Bench) -> Method:
    """llama.cpp through `llama-cpp-python`, on the bundled model's own 4-bit weights: another law, so texts differ."""
    spec.take()
    weights = weights_file()
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError("method 'llama.cpp' needs the package llama-cpp-python; get it with: pip install llama-cpp-python")
    if bench.target.model.name != BUNDLED or weights is None:
        raise UsageError(f"method 'llama.cpp' reads GGUF weights; it works with --target {BUNDLED} only")
    from llama_cpp import Llama

    engine = Llama(str(weights), n_ctx=2048, n_threads=torch.get_num_threads(), verbose=False)
    eos = set(bench.target.eos_token_ids)

    def generate(prompt: list[int], seed: int) -> Tokens:
        engine.reset()
        engine.set_seed(seed)
        stream = engine.generate(prompt, temp=bench.params.temperature, top_k=0, top_p=1.0, min_p=0.0)
        for index, token in enumerate(stream):
            yield Token(token, "target", index)
            if token in eos or index + 1 == bench.max_new_tokens:
                break
        return None

    return Method(name=spec.text, generate=generate, comparable=False)
