"""Whole texts on this CPU: Hugging Face `generate`, plain decoding and the default, in each dtype; tokens per second.

    python benchmarks/cpus.py [--prompts spec_bench.jsonl] [--limit 8] [--tokens 64] [--dtypes float32 int8] [--threads 2]

Arms alternate prompt by prompt; prefill is not counted. "same" counts greedy texts that equal plain decoding's.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers.utils import logging

import polydraft
from polydraft import SamplingParams
from polydraft.cli.comparison import hugging_face_text
from polydraft.engine import Decoder
from polydraft.prompts import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, help="a file of prompts; the built-in ones otherwise")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    texts = [prompt.text for prompt in load_prompts(str(options.prompts or "builtin"), options.limit)]
    for dtype in options.dtypes:
        plain = polydraft.load(draft="none", dtype=dtype, device="cpu")
        arms = {"plain": plain, "default": polydraft.load(dtype=dtype, device="cpu")}
        prompts = [plain.encode(text, chat=True) for text in texts]
        for temperature in (0.0, 1.0):
            measure(dtype, temperature, arms, prompts, options.tokens)


def measure(dtype: str, temperature: float, arms: dict[str, Decoder], prompts: list[list[int]], tokens: int) -> None:
    sampling = SamplingParams(temperature=temperature)
    spent = dict.fromkeys(["hf", *arms], 0.0)
    made = dict.fromkeys(["hf", *arms], 0)
    passes, same = dict.fromkeys(arms, 0), 0
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first text only warms up
        if dtype != "int8":
            count, seconds = hugging_face(arms["plain"], prompt, temperature, tokens if turn else 8)
            made["hf"], spent["hf"] = made["hf"] + count * bool(turn), spent["hf"] + seconds * bool(turn)
        found = {}
        for name, decoder in arms.items():
            result = decoder.generate(prompt, sampling=sampling, max_new_tokens=tokens if turn else 8, seed=7)
            found[name] = result.token_ids
            if turn:
                made[name] += result.stats.new_tokens
                spent[name] += result.stats.decode_seconds
                passes[name] += result.stats.passes
        same += bool(turn) and found["plain"] == found["default"]
    speed = {name: made[name] / spent[name] for name in spent if spent[name]}
    ratios = ", ".join(f"{name} {value:.1f} ({value / speed['plain']:.2f}x plain)" for name, value in speed.items())
    told = f"; same {same}/{len(prompts)}" if temperature == 0 else ""
    print(f"{dtype} T={temperature:g}: {ratios}; tokens per pass {made['default'] / passes['default']:.2f}{told}", flush=True)


def hugging_face(decoder: Decoder, prompt: list[int], temperature: float, tokens: int) -> tuple[int, float]:
    """Return tokens after the first one, and the seconds that they took."""
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    spent, found = [], []
    for limit in (1, tokens):
        start = time.perf_counter()
        found = hugging_face_text(decoder.target.hf_model, prompt, decoder.eos_token_ids, limit, 7, **choice)
        spent.append(time.perf_counter() - start)
    return len(found) - 1, spent[1] - spent[0]


if __name__ == "__main__":
    main()
