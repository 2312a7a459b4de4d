"""llama.cpp on the same prompts, for comparison."""

from typing import Any

import torch

from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED, weights_file

_SEEDS = 2**32 - 1
"""llama.cpp takes 32 bits, of which the highest number means "draw one"."""
_PLAIN_LAW = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Each at the value that switches it off: the package's own defaults truncate."""


@METHODS.register("llama.cpp")
def llama_cpp(spec: MethodSpec, bench: Bench) -> Method:
    """llama.cpp through `llama-cpp-python`, on the bundled model's own 4-bit weights: another law, so texts differ."""
    spec.take_nothing()
    weights = weights_file()
    if bench.target.model.name != BUNDLED or weights is None:
        raise UsageError(f"method 'llama.cpp' reads GGUF weights; it works with --target {BUNDLED} only")
    threads = torch.get_num_threads()
    engine = _library().Llama(
        str(weights),
        n_ctx=bench.longest_prompt + bench.max_new_tokens,
        n_threads=threads,
        n_threads_batch=threads,  # prompts too: by itself it takes every core
        verbose=False,
    )
    eos = set(bench.target.eos_token_ids)

    def generate(prompt: list[int], seed: int) -> Tokens:
        engine.reset()  # or it would keep what a prompt shares with the one before it
        engine.set_seed(seed % _SEEDS)
        stream = engine.generate(prompt, temp=bench.params.temperature, **_PLAIN_LAW)  # temp=0 is its greedy sampler
        for index, token in enumerate(stream):
            yield Token(token, "target", index)
            if token in eos or index + 1 == bench.max_new_tokens:
                break
        return None

    return Method(name=spec.text, generate=generate, comparable=False)


def _library() -> Any:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as problem:  # its shared library can be missing or another machine's
        reason = str(problem).splitlines()[0][:200]
        raise UsageError(
            f"method 'llama.cpp' needs the package llama-cpp-python, which cannot be loaded ({reason}); "
            "get it with: pip install llama-cpp-python"
        ) from None
    return llama_cpp
