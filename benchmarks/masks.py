"""Time of an early stop's mask: a slice of the large one against building it anew.

    python benchmarks/masks.py [--device cuda]

Three ways to get the tables of a tree that stopped after each of its levels: a slice of `SlicedMask`; the same tree built from
scratch; and the mask alone from a parent list by tensor operations, as dynamic trees of any shape are built every round.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from polydraft.draft.candidates import _ancestors
from polydraft.trees import SlicedMask, Topology, parse_tree
from polydraft.trees.topology import _tables

TREES = ("fork:16x5", "4x2x2x1x1", "fork:64x8", "8x4x4x2")
REPEATS = 200


def microseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    print(f"{'tree':>12} {'stop':>5} {'nodes':>6} {'slice µs':>9} {'tensor ops µs':>14} {'from scratch µs':>16}")
    for text in TREES:
        topology = parse_tree(text)
        mask = SlicedMask.of(topology, device)
        for depth in range(1, topology.depth + 1):
            nodes = mask.stops[depth]
            stopped = Topology(topology.parents[:nodes])
            parents_1N = torch.tensor([stopped.parents], device=device)
            figures = (
                microseconds(lambda: mask.stopped(depth), device),  # noqa: B023 (called at once)
                microseconds(lambda: _ancestors(parents_1N, depth), device),  # noqa: B023
                microseconds(lambda: _tables.__wrapped__(stopped, device), device),  # noqa: B023
            )
            print(f"{text:>12} {depth:>5} {nodes:>6} {figures[0]:>9.1f} {figures[1]:>14.1f} {figures[2]:>16.1f}", flush=True)


if __name__ == "__main__":
    main()
