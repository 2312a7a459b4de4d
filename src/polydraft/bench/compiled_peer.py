"""Hugging Face `generate` with a static cache and a compiled forward, for comparison."""

from typing import Any

from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Tokens
from polydraft.bench.peers import hugging_face
from polydraft.errors import FailureError

_BACKEND = "inductor"
_WITHOUT_COMPILER = ("No working C++ compiler found", "Failed to find C compiler")
"""What torch and triton say where there is none."""
_COMPILED_TOKENS = 3
"""One from the prompt, which is not compiled, and two from compiled passes."""


@METHODS.register("hf-compiled")
def compiled(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate` with a static cache and a compiled forward; compiled once, before anything is measured."""
    spec.take_nothing()
    plain = hugging_face(spec, bench, lambda: _options(bench), one_token_a_pass=True)
    ready = False

    def generate(prompt: list[int], seed: int) -> Tokens:
        nonlocal ready
        if not ready:  # the first call is the warm-up's
            _compile(prompt, bench)
            ready = True
        return (yield from plain.generate(prompt, seed))

    return Method(name=spec.text, generate=generate)


def _options(bench: Bench) -> dict[str, Any]:
    from transformers import CompileConfig

    # reduce-overhead means CUDA graphs, which is what transformers itself chooses on a GPU.
    mode = "reduce-overhead" if bench.target.model.device.type == "cuda" else "default"
    config = CompileConfig(backend=_BACKEND, mode=mode)
    config._compile_all_devices = True  # CPUs too: by itself transformers compiles on GPUs only
    return {"cache_implementation": "static", "compile_config": config}


def _compile(prompt: list[int], bench: Bench) -> None:
    """Compile for the longest text of all: transformers never shrinks a static cache, so no later text compiles again."""
    import torch

    model, length = bench.target.model.hf_model, bench.longest_prompt + bench.max_new_tokens
    text = (prompt * (length // len(prompt) + 1))[: max(1, length - _COMPILED_TOKENS)]
    ids_1T = torch.tensor([text], device=model.device)
    try:
        model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=length - len(text),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **_options(bench),
        )
    except RuntimeError as problem:
        if any(words in str(problem) for words in _WITHOUT_COMPILER):
            raise FailureError("method 'hf-compiled' needs a C++ compiler and found none; install one, such as g++") from None
        raise
