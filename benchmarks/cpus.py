"""Whole texts on this CPU: Hugging Face `generate`, plain decoding and the default, in each dtype; tokens per second.

    python benchmarks/cpus.py [--prompts spec_bench.jsonl] [--limit 8] [--tokens 64] [--dtypes float32 int8] [--threads 2]
    python benchmarks/cpus.py --target qwen.gguf --dtypes float32 --temperatures 0.7 1 --arms default drawn --no-hugging-face

The arm `drawn` is the default with candidates that are drawn and verified (`hybrid+block`) instead of coupled; it exists where
the default tree is static, as with an int8 copy, since dynamic trees draw nothing. Arms alternate
prompt by prompt; prefill is not counted; ranges are 95 % intervals over prompts. "same" counts texts that equal plain
decoding's.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers.utils import logging

import polydraft
from polydraft import SamplingParams
from polydraft.cli.comparison import hugging_face_text
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.prompts import load_prompts
from polydraft.tune.contest import speedup_interval


@dataclass
class Arm:
    """What one way of decoding has done, a number per prompt."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def told(self, name: str, plain: "Arm") -> str:
        """Return a line for people."""
        ratio, low, high = speedup_interval(np.array([self.tokens, self.seconds, plain.tokens, plain.seconds]).T)
        line = f"  {name:8} {sum(self.tokens) / sum(self.seconds):7.1f} tokens/s  {ratio:.2f}x plain ({low:.2f} to {high:.2f})"
        if not self.passes:
            return line
        same = sum(one == two for one, two in zip(self.texts, plain.texts, strict=True))
        return f"{line}  {sum(self.tokens) / sum(self.passes):.2f} tokens per pass  same {same}/{len(self.texts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=Path, help="a file of prompts; the built-in ones otherwise")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--arms", nargs="*", choices=["default", "drawn"], default=["default"])
    parser.add_argument("--hugging-face", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    texts = [prompt.text for prompt in load_prompts(str(options.prompts or "builtin"), options.limit)]
    for dtype in options.dtypes:
        default = polydraft.load(options.target, options.draft, dtype=dtype, device="cpu")
        if "drawn" in options.arms and default.drafter.ranked:
            parser.error(f"--arms drawn does not work with {default.drafter.name} trees, which draw nothing; leave it out")
        ways = {"default": default, "drawn": default.replace(coupled=False)}
        decoders = {"plain": default.replace(drafter=None), **{name: ways[name] for name in options.arms}}
        prompts = [default.encode(text, chat=default.tokenizer.chat_template is not None) for text in texts]
        for temperature in options.temperatures:
            with_peer = options.hugging_face and dtype != "int8"
            arms = measure(temperature, decoders, prompts, options.tokens, with_peer)
            lines = [arm.told(name, arms["plain"]) for name, arm in arms.items()]
            print("\n".join([f"{dtype} T={temperature:g}", *lines]), flush=True)


def measure(
    temperature: float, decoders: dict[str, Decoder], prompts: Sequence[list[int]], tokens: int, with_peer: bool
) -> dict[str, Arm]:
    sampling = SamplingParams(temperature=temperature)
    arms = {name: Arm() for name in [*(["hf"] if with_peer else []), *decoders]}
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first text only warms up
        if with_peer:
            count, seconds = hugging_face(decoders["plain"], prompt, temperature, tokens if turn else 8)
            if turn:
                arms["hf"].tokens.append(count)
                arms["hf"].seconds.append(seconds)
        for name, decoder in decoders.items():
            result = decoder.generate(prompt, sampling=sampling, max_new_tokens=tokens if turn else 8, seed=7 + turn)
            if turn:
                arms[name].tokens.append(result.stats.new_tokens)
                arms[name].seconds.append(result.stats.decode_seconds)
                arms[name].passes.append(result.stats.passes)
                arms[name].texts.append(result.token_ids)
    return arms


def hugging_face(decoder: Decoder, prompt: list[int], temperature: float, tokens: int) -> tuple[int, float]:
    """Return tokens after the first one, and the seconds that they took."""
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    spent, found = [], []
    for limit in (1, tokens):
        start = time.perf_counter()
        found = hugging_face_text(cast(HFModel, decoder.target).hf_model, prompt, decoder.eos_token_ids, limit, 7, **choice)
        spent.append(time.perf_counter() - start)
    return len(found) - 1, spent[1] - spent[0]


if __name__ == "__main__":
    main()
