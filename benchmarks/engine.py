"""Time the engine on this machine: plain decoding against Hugging Face `generate`, and where a round's time goes.

    python benchmarks/engine.py [--tokens 48] [--repeat 5] [--dtype auto] [--tree 4x2x2x1x1] [--draft early-exit:2]

Arms alternate within one run; figures are medians over repeats. A table, then one JSON line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from transformers.utils import logging

from polydraft.engine import Decoder
from polydraft.lab.papers.flat import FlatModel
from polydraft.loading import load
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.sampling import RowParams, SamplingParams

PROMPT = "Explain to a curious child how a bicycle stays upright while it rolls."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="early-exit:2")
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    decoder = load(options.target, options.draft, tree=options.tree, dtype=options.dtype, device=options.device)
    target = decoder.target
    assert isinstance(target, HFModel)
    # No arm makes text or ends early: Hugging Face's does not either.
    drafted = decoder.replace(tokenizer=None, eos_token_ids=())
    plain = drafted.replace(drafter=None)
    unlean = plain.replace(target=HFModel(target.hf_model, lean=False))
    flat = drafted.replace(target=FlatModel(target, decoder.drafter.topology))
    prompt = decoder.encode(PROMPT, chat=True)

    def ours(arm: Decoder, temperature: float) -> Callable[[], dict]:
        def run() -> dict:
            params = SamplingParams(temperature=temperature)
            start = time.perf_counter()
            with forward_clock() as forwards:
                result = arm.generate(prompt, sampling=params, max_new_tokens=options.tokens, seed=0)
            seconds = time.perf_counter() - start
            stats = result.stats
            rounds_ms = 1e3 * stats.decode_seconds / stats.rounds
            # Reading the prompt is a forward too, but not part of a round.
            model_ms = 1e3 * (sum(forwards) - stats.seconds["prefill"]) / stats.rounds
            return {
                "ms_per_token": 1e3 * seconds / stats.new_tokens,
                "round_ms": rounds_ms,
                "model_ms": model_ms,
                "overhead_share": 1 - model_ms / rounds_ms,
                "tokens_per_pass": stats.tokens_per_pass,
                "acceptance": stats.acceptance_rate,
            }

        return run

    def hugging_face() -> dict:
        ids = torch.tensor([prompt], device=target.device)
        count = options.tokens
        start = time.perf_counter()
        target.hf_model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        return {"ms_per_token": 1e3 * (time.perf_counter() - start) / count}

    arms: dict[str, Callable[[], dict]] = {
        "hf generate": hugging_face,
        "plain": ours(plain, 0),
        "plain, hf body": ours(unlean, 0),
        f"{options.tree} T=0": ours(drafted, 0),
        f"{options.tree} T=1": ours(drafted, 1),
        f"{options.tree} T=0 flat": ours(flat, 0),
    }
    figures = measure(arms, options.repeat)
    keys = ["ms_per_token", "round_ms", "model_ms", "overhead_share", "tokens_per_pass", "acceptance"]
    print(f"{target.name}, {options.draft}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads, "
          f"{len(prompt)} prompt tokens, {options.tokens} new tokens, medians of {options.repeat}")  # fmt: skip
    print(f"{'arm':<24}" + "".join(f"{key:>16}" for key in keys) + f"{'time / hf':>12}")
    for name, row in figures.items():
        cells = "".join(f"{row[key]:>16.3f}" if key in row else f"{'-':>16}" for key in keys)
        print(f"{name:<24}{cells}{row['ms_per_token'] / figures['hf generate']['ms_per_token']:>12.2f}")
    memory = kv_memory(decoder, prompt, options.tokens)
    print(
        f"KV bytes: {memory['bytes']:,} = {memory['slots']} slots (prompt + new tokens + tree) x {memory['bytes_per_slot']:,}"
    )
    print(json.dumps({"figures": figures, "kv": memory}))


def measure(arms: dict[str, Callable[[], dict]], repeat: int) -> dict[str, dict]:
    """Run all arms in turn, `repeat` times after a warm-up, and take medians of every figure."""
    runs: dict[str, list[dict]] = {name: [] for name in arms}
    for turn in range(repeat + 1):
        for name, arm in arms.items():
            result = arm()
            if turn:
                runs[name].append(result)
    return {name: {key: statistics.median(run[key] for run in results) for key in results[0]} for name, results in runs.items()}


@contextmanager
def forward_clock():
    """Collect the seconds spent inside model forwards and heads."""
    spent: list[float] = []
    forward, head = HFContext._forward, HFModel.head

    def timed(function: Callable) -> Callable:
        def run(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)
            return result

        return run

    HFContext._forward, HFModel.head = timed(forward), timed(head)
    try:
        yield spent
    finally:
        HFContext._forward, HFModel.head = forward, head


def kv_memory(decoder: Decoder, prompt: list[int], tokens: int) -> dict[str, int]:
    """Return what the target's cache holds after a generation."""
    stream = decoder.stream(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=tokens, keep=True)
    for _ in stream:
        pass
    context = decoder._lend(decoder.drafter, RowParams((SamplingParams(temperature=0),)), keep=True).memory.context
    size, slots = context.cache.nbytes, context.capacity
    return {"bytes": size, "slots": slots, "bytes_per_slot": size // slots}


if __name__ == "__main__":
    main()
