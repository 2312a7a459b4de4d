"""Acceptance and block efficiency of several drafts on the same prompts, in batches.

    python benchmarks/drafts.py --prompts spec_bench.jsonl --limit 80 --drafts early-exit:2 DIR DIR

α@n is the share of rounds in which one of n candidates below the root was accepted, drawn without replacement; τ is the
number of tokens that a target pass of the tree yields.
"""

import argparse
import time

import torch

from polydraft.bench.prompts import load_prompts
from polydraft.drafters import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafts", nargs="+", default=["auto"])
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=80)
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--scheme", default="rrs-wor")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    device = resolve_device(options.device)
    target = load_model(options.target, device, resolve_dtype(options.dtype, device))
    prompts = load_prompts(options.prompts, options.limit)
    print(f"{len(prompts)} prompts of {options.prompts}, chat template, {options.tokens} new tokens, tree {options.tree}")
    print("| draft | T | α@1 | α@4 | τ | α by depth | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.drafts:
        draft = load_draft(name, target)
        for temperature in options.temperatures:
            start = time.perf_counter()
            stats = {tree: measure(target, draft, prompts, tree, temperature, options) for tree in ("1", "4", options.tree)}
            depths = " ".join(f"{rate:.2f}" for rate in stats[options.tree][2])
            figures = f"{stats['1'][0]:.3f} | {stats['4'][0]:.3f} | {stats[options.tree][1]:.2f}"
            print(f"| {name} | {temperature:g} | {figures} | {depths} | {time.perf_counter() - start:.0f} |", flush=True)


def measure(target, draft, prompts, tree, temperature, options):
    parts = Parts(target=target.model, draft=draft, topology=parse_tree(tree), scheme=options.scheme)
    decoder = Decoder(target.model, make_drafter(parts), tokenizer=target.tokenizer, eos_token_ids=target.eos_token_ids)
    offers, accepts, blocks, passes = [0] * 16, [0] * 16, 0, 0
    for first in range(0, len(prompts), options.batch):
        texts = [prompt.text for prompt in prompts[first : first + options.batch]]
        results = decoder.generate(
            texts, sampling=SamplingParams(temperature=temperature), max_new_tokens=options.tokens, seed=first, chat=True
        )
        stats = results[0].stats  # of the whole batch
        blocks, passes = blocks + stats.block_tokens, passes + stats.passes
        for depth, (offered, accepted) in enumerate(zip(stats.offers_by_depth, stats.accepts_by_depth, strict=True)):
            offers[depth] += offered
            accepts[depth] += accepted
    by_depth = [accepted / offered for accepted, offered in zip(accepts, offers, strict=True) if offered]
    return sum(accepts) / max(sum(offers), 1), blocks / passes, by_depth


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
