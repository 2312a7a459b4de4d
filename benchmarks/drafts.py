"""Acceptance and block efficiency of several drafts on the same prompts, in batches.

    python benchmarks/drafts.py --prompts spec_bench.jsonl --limit 80 --drafts early-exit:2 DIR DIR

α@n is the share of rounds in which one of n candidates below the root was accepted, drawn without replacement; τ is the
number of tokens that a target pass of the tree yields.
"""

import argparse
import itertools
import time

import torch

from polydraft.draft import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafts", nargs="+", default=["auto"])
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--verifiers", nargs="+", default=["rrs-wor+node"], help="scheme+walk, such as hybrid+block")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tree-only", action="store_true", help="leave α@1 and α@4 out")
    parser.add_argument("--by-category", action="store_true", help="also print τ of each category of prompts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    device = resolve_device(options.device)
    target = load_model(options.target, device, resolve_dtype(options.dtype, device))
    prompts = load_prompts(options.prompts, options.limit)
    print(f"{len(prompts)} prompts of {options.prompts}, chat template, {options.tokens} new tokens, tree {options.tree}")
    trees = [options.tree] if options.tree_only else ["1", "4", options.tree]
    print("| draft | verifier | T | α@1 | α@4 | τ ± s.e. | α by depth | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, verifier, temperature in itertools.product(options.drafts, options.verifiers, options.temperatures):
        draft = load_draft(name, target)
        start = time.perf_counter()
        stats = {tree: measure(target, draft, prompts, tree, temperature, verifier, options) for tree in trees}
        depths = " ".join(f"{rate:.2f}" for rate in stats[options.tree][2])
        first, fourth = (f"{stats[tree][0]:.3f}" if tree in stats else "" for tree in ("1", "4"))
        blocks = f"{stats[options.tree][1]:.3f} ± {stats[options.tree][3]:.3f}"
        seconds = f"{time.perf_counter() - start:.0f}"
        print(f"| {name} | {verifier} | {temperature:g} | {first} | {fourth} | {blocks} | {depths} | {seconds} |", flush=True)
        if options.by_category:
            rates = stats[options.tree][4]
            shown = ", ".join(f"{category} {tokens / passes:.2f}" for category, (tokens, passes) in rates.items())
            print(f"| | | {temperature:g} | | | {shown} | | |", flush=True)


def measure(target, draft, prompts, tree, temperature, verifier, options):
    scheme, walk = verifier.split("+")
    parts = Parts(draft=draft, topology=parse_tree(tree), scheme=scheme)
    ends = target.eos_token_ids
    decoder = Decoder(target.model, make_drafter(parts), tokenizer=target.tokenizer, eos_token_ids=ends, walk=walk)
    offers, accepts, blocks, passes, batches, categories = [0] * 16, [0] * 16, 0, 0, [], {}
    for first, chosen in batches_of(prompts, options.batch, options.by_category):
        results = decoder.generate(
            [prompt.text for prompt in chosen],
            sampling=SamplingParams(temperature=temperature),
            max_new_tokens=options.tokens,
            seed=first,
            chat=True,
        )
        stats = results[0].stats  # of the whole batch
        batches.append((stats.block_tokens, stats.passes))
        earlier = categories.get(chosen[0].category, (0, 0))
        categories[chosen[0].category] = earlier[0] + stats.block_tokens, earlier[1] + stats.passes
        blocks, passes = blocks + stats.block_tokens, passes + stats.passes
        for depth, (offered, accepted) in enumerate(zip(stats.offers_by_depth, stats.accepts_by_depth, strict=True)):
            offers[depth] += offered
            accepts[depth] += accepted
    by_depth = [accepted / offered for accepted, offered in zip(accepts, offers, strict=True) if offered]
    # Batches are independent groups of prompts: the spread of their ratios gives the standard error.
    spread = [(tokens - blocks / passes * count) ** 2 for tokens, count in batches]
    error = (len(batches) / max(len(batches) - 1, 1) * sum(spread)) ** 0.5 / passes
    return sum(accepts) / max(sum(offers), 1), blocks / passes, by_depth, error, categories


def batches_of(prompts, size, by_category):
    """Yield prompts to decode together, each time with a number of their own; of one category if that is asked for."""
    groups = [prompts]
    if by_category:
        groups = [
            [prompt for prompt in prompts if prompt.category == one] for one in dict.fromkeys(p.category for p in prompts)
        ]
    for place, group in enumerate(groups):
        for first in range(0, len(group), size):
            yield place * len(prompts) + first, group[first : first + size]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
