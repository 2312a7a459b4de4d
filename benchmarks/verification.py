"""Time of verifying one round, by scheme and walk: distributions over 49,152 tokens, tree 4x2x2x1x1.

python benchmarks/verification.py
python benchmarks/verification.py --device cuda

Distributions are Zipf-like, the draft's a noisy version of the target's, restricted to a quarter of the tokens as shipped
drafts are. Time includes everything from the target's logits on: their softmax, spreading the draft's distributions, all that
scheme and walk do.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.draft import DistributionSource
from polydraft.draft.static_builder import StaticBuilder
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams, Warper
from polydraft.trees import DraftTree, Topology, parse_tree
from polydraft.verify import WALKS, Scheme, TargetDistributions, Verdict, Walk

PAIRS = (
    ("top", "node", 0.0),
    ("top", "node", 1.0),
    ("naive", "node", 1.0),
    ("rrs-wor", "node", 1.0),
    ("kseq", "node", 1.0),
    ("greedy", "node", 1.0),
    ("race", "block", 1.0),
    ("race-bucketed", "block", 1.0),
    ("hybrid", "node", 1.0),
    ("hybrid", "block", 1.0),
)
ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="a scheme")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print("| scheme + walk, temperature | ms per round, median | ms in a CUDA graph | accepted |")
    print("|---|---|---|---|")
    for scheme, walk, temperature in PAIRS:
        if options.only in (None, scheme):
            milliseconds, in_graph, accepted = measure(prepare(scheme, walk, temperature, options))
            graph = "" if in_graph is None else f"{in_graph:.2f}"
            print(f"| {scheme} + {walk}, T={temperature:g} | {milliseconds:.2f} | {graph} | {accepted:.2f} |", flush=True)


@dataclass(frozen=True, eq=False)
class Verification:
    """A pair of made-up models, and a way to verify."""

    topology: Topology
    known: PartialVocabulary
    growth: StaticBuilder
    walk: Walk
    warper: Warper
    generator: torch.Generator
    device: torch.device

    def fresh(self) -> Callable[[], Verdict]:
        """Make distributions and a tree; return what verifies them."""
        topology, size, known = self.topology, self.known.size, self.known
        rank_V = torch.randperm(size, generator=self.generator).double() + 1
        noise_NV = torch.randn(topology.num_nodes, size, generator=self.generator, dtype=torch.float64)
        base_NV = -1.3 * rank_V.log() + noise_NV
        noise_ND = torch.randn(topology.num_nodes, len(known.tokens_D), generator=self.generator, dtype=torch.float64)
        base_NV[:, known.tokens_D.cpu()] += 3.0  # the draft's tokens are the frequent ones
        logits_1NV = base_NV.float()[None].to(self.device)
        draft_1ND = (logits_1NV[..., known.tokens_D] + 0.7 * noise_ND.float().to(self.device)).contiguous()
        uniforms = topology.num_nodes - 1 + self.walk.uniforms(self.growth.scheme, topology.depth)
        uniforms_1U = torch.rand(1, uniforms, generator=self.generator, dtype=torch.float64).to(self.device)
        tokens_1N = self.growth.plant(torch.zeros(1, dtype=torch.long, device=self.device))
        for level in self.growth.plan.levels:
            nodes = torch.arange(level.first, level.stop, device=self.device)[level.drawing]
            self.growth.draw(level, draft_1ND[:, nodes], tokens_1N, uniforms_1U)
        return self._turn(self.growth.scheme, self.growth.tree(tokens_1N), logits_1NV, uniforms_1U[:, topology.num_nodes - 1 :])

    def _turn(self, scheme: Scheme, draft: DraftTree, logits_1NV: Tensor, uniforms_1U: Tensor) -> Callable[[], Verdict]:
        return lambda: self.walk.run(
            scheme, draft, TargetDistributions(logits_1NV, lambda logits: logits, self.warper, whole=True), uniforms_1U
        )


def prepare(scheme: str, walk: str, temperature: float, options: argparse.Namespace) -> Verification:
    """Set everything up that is the same for all rounds."""
    device, size, topology = torch.device(options.device), options.vocabulary, parse_tree(options.tree)
    known = PartialVocabulary(torch.arange(0, size, 4, device=device), size)
    params = SamplingParams(temperature=temperature)
    growth = StaticBuilder(DistributionSource(device, known), topology, RowParams((params,)), size, scheme=scheme)
    growth.begin([[0]], [0], RowParams((params,)))
    warper = Warper(params, size, [[0]], device)
    return Verification(topology, known, growth, WALKS.get(walk)(), warper, torch.Generator().manual_seed(0), device)


def measure(verification: Verification) -> tuple[float, float | None, float]:
    """Return median times, eager and in a graph, and the mean number of accepted tokens."""
    times, accepted, device = [], 0, verification.device
    for turn in range(ROUNDS + 5):
        verify = verification.fresh()
        synchronise(device)
        start = time.perf_counter()
        verdict = verify()
        synchronise(device)
        if turn >= 5:
            times.append(1000 * (time.perf_counter() - start))
            accepted += int(verdict.accepted_B)
    in_graph = graph_time(verify) if device.type == "cuda" else None
    return statistics.median(times), in_graph, accepted / ROUNDS


def graph_time(verify: Callable[[], Verdict]) -> float | None:
    """Return the median time of one replay."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            verify()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verify()
    except RuntimeError as error:
        print(f"<!-- no graph: {str(error).splitlines()[0]} -->")
        return None
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
