"""Time a pass of a model on this CPU, output head included, by tokens per pass: torch, the native kernels, llama.cpp.

    python benchmarks/native.py [--threads 2] [--repeat 9] [--context 128] [--target smollm2] [--tokens 1,2,4,5,8,16,32,64]
        [--arms torch,float32,bfloat16,int8] [--shape gemma3-270m]

Arms: torch, torch-bfloat16, float32, bfloat16, int8; with the bundled model also llama.cpp (a build that the variable
POLYDRAFT_LLAMA_CPP names) and xllamacpp (its wheel), which compute all tokens' logits too. A shape is a model of that size with
random weights, in place of a target. Arms alternate within one run; figures are the least of all repeats, in ms, and how many
plain passes a pass costs. "reading" is the time in which all threads together read as many bytes as the weights have, by
torch's own sum. A table, then one JSON line.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from polydraft.backends.native import kernels
from polydraft.lab.bench.libllama import VARIABLE, LlamaCpp, find_build, find_wheel
from polydraft.models.bundled import weights_file
from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.placement import resolve_device
from polydraft.models.quantised import quantise
from polydraft.trees import causal_block

ARMS = {
    "torch": (torch.float32, False),
    "torch-bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
    "int8": (torch.int8, True),
}
"""Dtypes, and whether by native kernels."""
PEERS = {"llama.cpp": lambda: find_build(os.environ.get(VARIABLE, "")), "xllamacpp": find_wheel}
SHAPES = {
    "gemma3-270m": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", default="1,2,4,5,8,16,32,64")
    parser.add_argument("--arms", default="torch,float32,bfloat16,int8")
    parser.add_argument("--shape", choices=SHAPES)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    counts, names = [int(count) for count in options.tokens.split(",")], options.arms.split(",")
    library = kernels()
    print("kernels:", "none" if library is None else library.polydraft_instructions().decode(), f"· {options.threads} threads")
    models = {name: model_of(name, options.target, options.shape) for name in names if name not in PEERS}
    least: dict[tuple[str, int], float] = {}
    passes = {(name, count): one_pass(models[name], count, options.context) for count in counts for name in models}
    streams = {name: stream(weight_bytes(model)) for name, model in models.items()}
    for name in names:
        if name in PEERS:
            passes |= peer_passes(name, counts, options.context, options.threads)
            streams[name] = stream(weights_file().stat().st_size)
    with torch.inference_mode():
        for _ in range(options.repeat):
            for key, call in [*passes.items(), *(((name, 0), call) for name, call in streams.items())]:
                call()  # undoes what other arms did to caches and clock speed
                start = time.perf_counter()
                call()
                least[key] = min(least.get(key, float("inf")), 1e3 * (time.perf_counter() - start))
    print(f"{'tokens':>8}" + "".join(f"{name:>20}" for name in names))
    print(f"{'reading':>8}" + "".join(f"{least[name, 0]:>13.1f}       " for name in names))
    for count in counts:
        cells = [f"{least[name, count]:>13.1f} {least[name, count] / least[name, counts[0]]:>5.2f}×" for name in names]
        print(f"{count:>8}" + "".join(cells))
    megabytes = {name: round(weight_bytes(model) / 1e6) for name, model in models.items()}
    print("weights, MB:", ", ".join(f"{name} {size}" for name, size in megabytes.items()))
    figures = {name: {str(count): least[name, count] for count in (0, *counts)} for name in names}
    settings = {"threads": options.threads, "context": options.context, "shape": options.shape}
    print(json.dumps({**settings, "ms": figures, "megabytes": megabytes}))


def model_of(arm: str, target: str, shape: str | None) -> HFModel:
    """Load a target, or make a random model of some shape, for an arm."""
    dtype, native = ARMS[arm]
    if shape is None:
        return load_model(target, resolve_device("cpu"), dtype, native=native).model
    model = random_model(shape, torch.float32 if dtype == torch.int8 else dtype, dtype == torch.int8)
    return HFModel(quantise(model) if dtype == torch.int8 else model, name=shape, native=native)


@cache
def random_model(shape: str, dtype: torch.dtype, alone: bool) -> Any:
    """Make a model, one for all arms that do not change it."""
    torch.manual_seed(0)
    config = dict(SHAPES[shape])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=dtype).eval()


def peer_passes(name: str, counts: list[int], context_size: int, threads: int) -> dict[tuple[str, int], Callable[[], object]]:
    """Prepare passes of llama.cpp behind a text; each call forgets what it has read."""
    engine = LlamaCpp(PEERS[name](), weights_file(), capacity=context_size + max(counts), threads=threads)
    print(f"{name}: {engine.instructions}")
    engine.read(list(range(1000, 1000 + context_size)))

    def one(count: int) -> None:
        engine.read(list(range(2000, 2000 + count)), every_output=True)
        engine.cut(context_size)

    return {(name, count): lambda count=count: one(count) for count in counts}


def one_pass(model: HFModel, count: int, context_size: int) -> Callable[[], object]:
    """Prepare a pass of some tokens behind a text; nothing is committed, so that every call is the same."""
    generator = torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(0, model.vocab_size, (1, context_size + count), generator=generator)
    with torch.inference_mode():
        context = model.start(1, context_size + count)
        context.prefill(tokens_1T[:, :context_size].tolist())
    block = causal_block(1, count, model.device)
    return lambda: model.head(context.extend(tokens_1T[:, context_size:], block))


def weight_bytes(model: HFModel) -> int:
    """Count what a pass reads: all weights but the embeddings, or these where they are the output head too."""
    if model.int8:
        linears = [part for part in model.hf_model.modules() if hasattr(part, "held")]
        return sum(held.nbytes for part in linears for held in part.held)
    table = model.hf_model.get_input_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.hf_model.parameters())
    return total if table is model.hf_model.get_output_embeddings().weight else total - table.nbytes


def stream(size: int) -> Callable[[], object]:
    """Prepare the reading of so many bytes."""
    numbers = torch.ones(size // 4)
    return numbers.sum


if __name__ == "__main__":
    main()
