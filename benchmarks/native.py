"""Time a pass of the bundled model on this CPU, output head included: torch against the native kernels, by tokens per pass.

    python benchmarks/native.py [--threads 2] [--repeat 9] [--context 128] [--target smollm2] [--tokens 1,2,4,5,8,16,32,64]

Arms alternate within one run; figures are the least of all repeats, in ms, and how many plain passes a pass costs. "reading" is
the time in which all threads together read as many bytes as the weights have, by torch's own sum. A table, then one JSON line.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.placement import resolve_device
from polydraft.native import kernels
from polydraft.trees import causal_block

ARMS = {"torch": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", default="1,2,4,5,8,16,32,64")
    parser.add_argument("--arms", default=",".join(ARMS))
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    counts, names = [int(count) for count in options.tokens.split(",")], options.arms.split(",")
    library = kernels()
    print("kernels:", "none" if library is None else library.polydraft_instructions().decode(), f"· {options.threads} threads")
    models = {
        name: load_model(options.target, resolve_device("cpu"), ARMS[name], native=name != "torch").model for name in names
    }
    least: dict[tuple[str, int], float] = {}
    passes = {(name, count): one_pass(models[name], count, options.context) for count in counts for name in names}
    streams = {name: stream(weight_bytes(models[name])) for name in names}
    with torch.inference_mode():
        for _ in range(options.repeat):
            for key, call in [*passes.items(), *(((name, 0), call) for name, call in streams.items())]:
                call()  # what other arms have left in the caches and the clock
                start = time.perf_counter()
                call()
                least[key] = min(least.get(key, float("inf")), 1e3 * (time.perf_counter() - start))
    print(f"{'tokens':>8}" + "".join(f"{name:>20}" for name in names))
    print(f"{'reading':>8}" + "".join(f"{least[name, 0]:>13.1f}       " for name in names))
    for count in counts:
        cells = [f"{least[name, count]:>13.1f} {least[name, count] / least[name, counts[0]]:>5.2f}×" for name in names]
        print(f"{count:>8}" + "".join(cells))
    megabytes = {name: round(weight_bytes(models[name]) / 1e6) for name in names}
    print("weights, MB:", ", ".join(f"{name} {size}" for name, size in megabytes.items()))
    figures = {name: {str(count): least[name, count] for count in (0, *counts)} for name in names}
    print(json.dumps({"threads": options.threads, "context": options.context, "ms": figures, "megabytes": megabytes}))


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
