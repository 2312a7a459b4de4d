"""Tiles of invariant products on a GPU, all tried for the weights of three models, against the library's product.

    python benchmarks/gpu_tiles.py [--rows 64 80 128 144 256] [--shapes 7B] [--json tiles.json]
    python benchmarks/gpu_tiles.py --attention [--contexts 300 2000] [--nodes 24 28 64] [--batches 1 16] [--shapes 7B 135M]

Tiles change no bits (tests/gpu/test_invariant.py checks), so the fastest may be chosen by number of rows: see `plan_product`.
Kernels are compiled first, in several processes; then each is captured and timed alone, with weights that no cache holds.
With `--attention`, so are plans of attention over trees (`plan_attend`), with keys that no cache holds.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from polydraft.backends.triton import invariant as _invariant
from polydraft.backends.triton import power_of_two
from polydraft.backends.triton.invariant import (
    AttendPlan,
    Tile,
    invariant_attention,
    invariant_parts,
    plan_attend,
    plan_product,
    shared_room,
    sight_of,
    splits_of,
)
from polydraft.trees import parse_tree

SHAPES = {
    "7B": {"qkv": (12288, 4096), "output": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008)},
    "1.5B": {
        "qkv": (2048, 1536),
        "output": (1536, 1536),
        "gate and up": (17920, 1536),
        "down": (1536, 8960),
        "head": (151936, 1536),
    },
    "135M": {"qkv": (960, 576), "output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
}
HEADS = {"7B": (32, 32, 128), "1.5B": (12, 2, 128), "135M": (9, 3, 64)}
"""Heads of queries and of keys, and their channels."""
_SPLIT = _invariant._SPLIT_CHANNELS
_COPIES_BYTES = 2**28
"""Total size of the copies of a weight, which take turns, so that none is in a cache when it is read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 80, 128, 144, 256])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["7B"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attention", action="store_true", help="try plans of attention, not tiles of products")
    parser.add_argument("--contexts", type=int, nargs="+", default=[300, 2000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[24, 28, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    found = attention(options) if options.attention else products(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def products(options: argparse.Namespace) -> list[dict]:
    jobs = [
        (shape, rows, tile)
        for name in options.shapes
        for shape in SHAPES[name].values()
        for rows in options.rows
        for tile in tiles_for(rows, shape)
    ]
    kinds = {(splits_of(*shape), rows <= 128, shape[1] % tile.channels == 0, tile): (shape, rows, tile)
             for shape, rows, tile in jobs}  # fmt: skip
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        compiled = list(pool.map(compiles, kinds.values()))
    bad = {job[2] for job, good in zip(kinds.values(), compiled, strict=True) if not good}
    print(f"{len(compiled)} kernels compiled, {compiled.count(False)} do not fit", flush=True)
    found = []
    for name in options.shapes:
        for layer, shape in SHAPES[name].items():
            for rows in options.rows:
                found.append(measured(name, layer, shape, rows, bad))
    return found


def tiles_for(rows: int, shape: tuple[int, int]) -> list[Tile]:
    """Return promising tiles."""
    room, tiles = 227 * 2**10, [plan_product(rows, *shape, torch.bfloat16, 227 * 2**10)]
    splits = splits_of(*shape)
    width = shape[1] if splits == 1 else math.ceil(shape[1] / splits / _SPLIT) * _SPLIT  # channels of a split
    heights = {min(power_of_two(rows), most) for most in (32, 64, 128, 256)} | {8}
    for outputs, height, channels, warps in itertools.product((16, 32, 64, 128), heights, (64, 128, 256), (2, 4, 8)):
        work = outputs * height
        if height >= max(2 * rows, 16) or 8 * height < rows or width % channels or work // warps not in range(128, 8192):
            continue
        for stages in (3, 4, 6):
            if (outputs + height) * channels * 2 * stages <= room:
                tiles.append(Tile(outputs, height, channels, stages, warps))
    return list(dict.fromkeys(tiles))


def compiles(job: tuple[tuple[int, int], int, Tile]) -> bool:
    (outputs, channels), rows, tile = job
    inputs = torch.zeros(1, rows, channels, dtype=torch.bfloat16, device="cuda")
    try:
        invariant_parts(inputs, torch.zeros(outputs, channels, dtype=torch.bfloat16, device="cuda"), None, tile=tile)
    except Exception as error:  # out of registers or shared memory, which Triton reports in many ways
        print(f"{tile}: {type(error).__name__}", flush=True)
        return False
    return True


def measured(name: str, layer: str, shape: tuple[int, int], rows: int, bad: set[Tile]) -> dict:
    torch.manual_seed(0)
    copies = max(_COPIES_BYTES // (2 * shape[0] * shape[1]), 2)
    weights = torch.randn(copies, *shape, device="cuda").bfloat16()
    inputs = torch.randn(1, rows, shape[1], device="cuda").bfloat16()
    library = microseconds(lambda number: torch.nn.functional.linear(inputs, weights[number]), copies)
    times = {}
    for tile in tiles_for(rows, shape):
        if tile not in bad:
            times[tile] = microseconds(
                lambda number, tile=tile: invariant_parts(inputs, weights[number], None, tile=tile), copies
            )
    now = plan_product(rows, *shape, torch.bfloat16, shared_room(inputs.device))
    best = sorted(times, key=lambda tile: times[tile])[:4]
    shown = ", ".join(f"{tile.outputs}x{tile.rows}x{tile.channels} s{tile.stages} w{tile.warps} {times[tile]:.1f}"
                      for tile in best)  # fmt: skip
    print(f"{name} {layer:12} {rows:4} rows: library {library:6.1f} µs, now {times.get(now, 0):6.1f}; best {shown}", flush=True)
    listed = [[tile.outputs, tile.rows, tile.channels, tile.stages, tile.warps, round(times[tile], 2)] for tile in times]
    return {"shape": shape, "rows": rows, "library": library, "now": times.get(now), "tiles": listed}


def microseconds(function: Callable[[int], Any], copies: int) -> float:
    """Return the median time of one call, captured with all copies of the weight, or of the keys, in turn."""
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(copies):
            function(number)
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / copies)
    return statistics.median(times)


@dataclass(frozen=True)
class AttentionCase:
    """Trees behind texts, as in `tests/models/invariant_cases.py`; lengths differ, so that tails do."""

    shape: str
    context: int
    nodes: int
    batch: int

    @property
    def lines(self) -> int:
        return self.nodes * HEADS[self.shape][0] // HEADS[self.shape][1]

    @property
    def splits(self) -> int:
        return -(-self.context // _invariant._SPLIT_KEYS)

    def plan(self) -> AttendPlan:
        _, key_heads, channels = HEADS[self.shape]
        return plan_attend(self.batch, key_heads, self.lines, self.splits, channels, torch.bfloat16, 227 * 2**10)

    def build(
        self, device: str, dtype: torch.dtype = torch.bfloat16, copies_bytes: int = _COPIES_BYTES
    ) -> tuple[Callable[..., Tensor], int]:
        """Return attention with one of several copies of keys and values, by number and plan, and how many there are."""
        tables = parse_tree(f"best:{self.nodes}x6").tables(torch.device(device))
        query_heads, key_heads, channels = HEADS[self.shape]
        lengths = self.context - torch.arange(self.batch, device=device) % 16
        positions = (lengths[:, None] + tables.depths_N).contiguous()
        capacity = -(-(self.context + self.nodes) // 64) * 64
        slot_positions = torch.arange(capacity, device=device).repeat(self.batch, 1)
        slot_positions.scatter_(1, lengths[:, None] + torch.arange(self.nodes, device=device), positions)
        visible = tables.ancestors_NN.expand(self.batch, -1, -1)
        sight = sight_of(lengths, self.splits * _invariant._SPLIT_KEYS, None, positions, visible, slot_positions)
        torch.manual_seed(0)
        query = torch.randn(self.batch, self.nodes, query_heads, channels, device=device).to(dtype).transpose(1, 2)
        size = self.batch * key_heads * capacity * channels * dtype.itemsize * 2
        copies = min(max(copies_bytes // size, 2), 64)
        keys = torch.randn(copies, 2, self.batch, key_heads, capacity, channels, device=device, dtype=dtype)

        def attend(number: int, plan: AttendPlan | None = None) -> Tensor:
            key, value = keys[number]
            return invariant_attention(query, key, value, sight, channels**-0.5, plan)

        return attend, copies


class Skipped:
    """Replaces a kernel by nothing, so that others are timed without it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def plans_for(case: AttentionCase) -> list[AttendPlan]:
    """Return promising plans, the current one first."""
    plans = [case.plan()]
    for lines, keys, warps, stages in itertools.product((16, 32, 64), (32, 64, 128), (2, 4, 8), (2, 3, 4)):
        small, tall = lines == 16, lines == 64
        if (
            lines >= 2 * max(case.lines, 16)
            or (keys == 128 and not small)
            or (warps == 2 and tall)
            or (warps == 8 and not tall)
        ):
            continue
        programs = case.batch * HEADS[case.shape][1] * -(-case.lines // lines)
        ways = [False] * (programs < 264) + [True] * (programs > 66)  # twice and half of what there are multiprocessors
        plans += [AttendPlan(lines, keys, at_once, warps, stages) for at_once in ways]
    return list(dict.fromkeys(plans))


def plan_compiles(job: tuple[AttentionCase, AttendPlan]) -> bool:
    case, plan = job
    try:
        case.build("cuda", copies_bytes=0)[0](0, plan)
    except Exception as error:  # as in `compiles`
        print(f"{plan}: {type(error).__name__}", flush=True)
        return False
    return True


def attention(options: argparse.Namespace) -> list[dict]:
    cases = [
        AttentionCase(*each) for each in itertools.product(options.shapes, options.contexts, options.nodes, options.batches)
    ]
    kinds = {(case.shape, plan): (case, plan) for case in reversed(cases) for plan in plans_for(case)}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        compiled = list(pool.map(plan_compiles, kinds.values()))
    bad = {kind for kind, good in zip(kinds, compiled, strict=True) if not good}
    print(f"{len(compiled)} kernels compiled, {compiled.count(False)} do not fit", flush=True)
    print("µs per layer                    | join apart, at once | attend now                | attend under the best plans")
    return [attention_times(case, bad) for case in cases]


def attention_times(case: AttentionCase, bad: set[tuple[str, AttendPlan]]) -> dict:
    """Time both kernels by themselves: `attend` under every plan, `join` behind parts of splits and behind one part."""
    from polydraft.backends.triton import invariant_kernels as kernels

    attend, copies = case.build("cuda")
    now = case.plan()
    with mock.patch.object(kernels, "invariant_attend", Skipped()):
        joins = [microseconds(partial(attend, plan=AttendPlan(16, 64, at_once)), copies) for at_once in (False, True)]
    with mock.patch.object(kernels, "invariant_join", Skipped()):
        plans = [plan for plan in plans_for(case) if (case.shape, plan) not in bad]
        times = {plan: microseconds(partial(attend, plan=plan), copies) for plan in plans}
    both = microseconds(attend, copies)
    best = sorted(times, key=lambda plan: times[plan])[:5]
    print(
        f"{case.shape:4} {case.context:5} tokens {case.batch:2} x {case.nodes:3} nodes | {joins[0]:10.1f} {joins[1]:8.1f} "
        f"| {named(now)} {times[now]:6.1f}, both {both:6.1f} | "
        + ", ".join(f"{named(plan)} {times[plan]:.1f}" for plan in best),
        flush=True,
    )
    listed = [{**asdict(plan), "attend": round(times[plan], 2)} for plan in times]
    return {**asdict(case), "join": joins, "now": asdict(now), "both": both, "plans": listed}


def named(plan: AttendPlan) -> str:
    return f"{plan.lines}x{plan.keys} s{plan.stages} w{plan.warps}{' at once' if plan.at_once else ''}"


if __name__ == "__main__":
    main()
