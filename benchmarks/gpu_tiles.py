"""Tiles of invariant products on a GPU, all tried for the weights of a 7B and a 135M model, against the library's product.

    python benchmarks/gpu_tiles.py [--rows 64 80 128 144 256] [--shapes 7B] [--json tiles.json]

Tiles change no bits (tests/gpu/test_invariant.py looks), so the fastest may be chosen by number of rows: see `plan_product`.
Kernels are compiled first, in several processes; then each is recorded and timed alone, with weights that no cache holds.
"""

import argparse
import itertools
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from polydraft.models._invariant import Tile, invariant_parts, plan_product, shared_room, splits_of

SHAPES = {
    "7B": {"qkv": (12288, 4096), "output": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008)},
    "135M": {"qkv": (960, 576), "output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
}
_COPIES_BYTES = 2**28
"""Weights are many copies of one, so many bytes of them, which take turns: none is in a cache when it is read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 80, 128, 144, 256])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["7B"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def tiles_for(rows: int, shape: tuple[int, int]) -> list[Tile]:
    """Return the tiles that may do well."""
    room, tiles = 227 * 2**10, [plan_product(rows, *shape, torch.bfloat16, 227 * 2**10)]
    heights = (32, 64, 128) if rows <= 128 else (128, 256)
    for outputs, height, channels, warps in itertools.product((32, 64, 128), heights, (64, 128), (4, 8)):
        if height >= 2 * rows or (warps == 8 and outputs * height < 128 * 128):
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
    except Exception as error:  # out of registers or shared memory: whatever Triton says, it is no tile for us
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


def microseconds(function, copies: int) -> float:
    """Return the median time of one product, recorded with all copies of the weight in turn."""
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


if __name__ == "__main__":
    main()
