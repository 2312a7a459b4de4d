"""Time tree attention against masked SDPA, as the lean body calls it, in a CUDA graph of 32 calls (a 7B model has 32 layers).

python benchmarks/tree_attention.py [--sweep]
"""

import argparse
import dataclasses
import itertools
import math

import torch
from torch.nn import functional

from polydraft.backends.triton.attention import attend_tree, plan_attention

SHAPES = {"135M": (9, 3, 64), "7B": (32, 32, 128), "8B, grouped": (32, 8, 128)}
"""Query heads, key heads, channels."""
SIZES, CONTEXTS, CALLS = (1, 13, 64), (512, 4096, 16_384, 32_768), 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="try other plans too and print the best")
    sweep = parser.parse_args().sweep
    print(f"{'heads':<13}{'T':>4}{'context':>9}{'sdpa µs':>9}{'ours µs':>9}{'in 32k':>9}{'ratio':>7}{'GB/s':>7}   plan")
    for (name, (queries, keys, channels)), size in itertools.product(SHAPES.items(), SIZES):
        for context in CONTEXTS:
            slots = max(CONTEXTS) + size
            # Two layers in turn, or a small cache would never leave the GPU's own.
            cache = torch.randn(2, 2, 1, keys, slots, channels, device="cuda", dtype=torch.bfloat16)
            query = torch.randn(1, size, queries, channels, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            visible = torch.ones(1, size, size, dtype=torch.bool, device="cuda").tril()
            lengths = torch.tensor([context], device="cuda")
            scale = channels**-0.5

            def ours(layer, bucket, plan=None, query=query, cache=cache, lengths=lengths, visible=visible, scale=scale):
                return attend_tree(query, cache[0, layer], cache[1, layer], lengths, visible, scale, bucket, plan=plan)

            before = clock(masked(query, cache, visible, context, scale))
            after = clock(lambda layer, call=ours, bucket=context: call(layer, bucket))
            bucketed = clock(lambda layer, call=ours: call(layer, max(CONTEXTS)))
            lines = size * queries // keys
            plan = plan_attention(1, keys, lines, channels, context + size, torch.bfloat16)
            rate = 4 * keys * channels * (context + size) / after / 1e3
            print(
                f"{name:<13}{size:>4}{context:>9}{before:>9.1f}{after:>9.1f}{bucketed:>9.1f}{before / after:>7.2f}{rate:>7.0f}",
                f"  {describe(plan)}",
                flush=True,
            )
            if sweep:
                times = {
                    other: clock(lambda layer, call=ours, at=context, way=other: call(layer, at, way))
                    for other in others(plan, context)
                }
                best = min(times, key=lambda other: times[other])
                print(f"{'':26}best of {len(times)} plans: {times[best]:.1f} µs   {describe(best)}", flush=True)


def masked(query, cache, visible, context: int, scale: float):
    """The call of the lean body: grouped heads repeated, a mask of the whole context, only for more than one token."""
    size, group = query.shape[2], query.shape[1] // cache.shape[3]
    used = cache[:, :, :, :, : context + size]
    mask = torch.cat([visible.new_ones(1, size, context), visible], dim=-1)[:, None] if size > 1 else None

    def call(layer: int):
        key, value = used[0, layer], used[1, layer]
        if mask is not None and group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)

    return call


def others(plan, context: int):
    for block_keys, splits, warps, stages in itertools.product((32, 64, 128), (1, 2, 4, 8, 16, 32), (4, 8), (2, 3)):
        if (splits - 1) * block_keys < context:
            yield dataclasses.replace(plan, block_keys=block_keys, splits=splits, warps=warps, stages=stages)


def describe(plan) -> str:
    return f"{plan.block_lines}x{plan.block_keys}, {plan.splits} splits, {plan.warps} warps, {plan.stages} stages"


def clock(call) -> float:
    """Microseconds a call, inside a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number % 2)
    best = math.inf
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 1e3 * best / CALLS


if __name__ == "__main__":
    main()
