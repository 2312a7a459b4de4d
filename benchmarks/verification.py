"""Time of verifying one round, by scheme and walk: laws over 49,152 tokens, tree 4x2x2x1x1.

python benchmarks/verification.py
python benchmarks/verification.py --device cuda

Laws are Zipf-like, the draft's a noisy version of the target's, restricted to a quarter of the tokens as shipped drafts are.
The walk's time includes spreading the draft's laws and everything the scheme does, not the target's logits and softmax.
"""

import argparse
import statistics
import time

import torch

from polydraft.drafters.growth import Growth
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.trees import parse_tree
from polydraft.walks import WALKS

PAIRS = (
    ("rrs-wor", "node"),
    ("rrs-wor", "traversal"),
    ("kseq", "node"),
    ("greedy", "node"),
    ("gumbel", "node"),
    ("race", "block"),
    ("race-bucketed", "block"),
    ("hybrid", "node"),
    ("hybrid", "block"),
)
ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print("| scheme + walk | ms a round, median | ms in a CUDA graph | accepted |")
    print("|---|---|---|---|")
    for scheme, walk in PAIRS:
        milliseconds, in_graph, accepted = measure(scheme, walk, options)
        graph = "" if in_graph is None else f"{in_graph:.2f}"
        print(f"| {scheme} + {walk} | {milliseconds:.2f} | {graph} | {accepted:.2f} |", flush=True)


def measure(scheme_name: str, walk_name: str, options: argparse.Namespace) -> tuple[float, float | None, float]:
    device, generator = torch.device(options.device), torch.Generator().manual_seed(0)
    topology, size = parse_tree(options.tree), options.vocabulary
    known = PartialVocabulary(torch.arange(0, size, 4, device=device), size)
    growth = Growth(topology, scheme_name, SamplingParams(), None, size, known, device, lead=0)
    growth.begin([[0]])
    walk = WALKS.get(walk_name)()
    uniforms = topology.num_nodes - 1 + walk.uniforms(growth.scheme, topology.depth)
    times, accepted = [], 0
    for turn in range(ROUNDS + 5):
        draft, probs_1NV, verify_1U = one_round(growth, topology, size, known, uniforms, generator, device)

        def target_law(node_B, path_BP, probs_1NV=probs_1NV):
            return probs_1NV[:, node_B][:, 0]

        synchronise(device)
        start = time.perf_counter()
        verdict = walk.run(growth.scheme, draft, target_law, verify_1U)
        synchronise(device)
        if turn >= 5:
            times.append(1000 * (time.perf_counter() - start))
            accepted += int(verdict.accepted_B)
    in_graph = graph_time(walk, growth.scheme, draft, target_law, verify_1U) if device.type == "cuda" else None
    return statistics.median(times), in_graph, accepted / ROUNDS


def one_round(growth, topology, size, known, uniforms, generator, device):
    """Make a target law and a noisy draft law for every node, and draw a tree."""
    rank_V = torch.randperm(size, generator=generator).double() + 1
    base_NV = -1.3 * rank_V.log() + torch.randn(topology.num_nodes, size, generator=generator, dtype=torch.float64)
    noise_ND = torch.randn(topology.num_nodes, len(known.tokens_D), generator=generator, dtype=torch.float64)
    base_NV[:, known.tokens_D.cpu()] += 3.0  # the draft's tokens are the frequent ones
    logits_1NV = base_NV.float()[None].to(device)
    draft_1ND = (logits_1NV[..., known.tokens_D] + 0.7 * noise_ND.float().to(device)).contiguous()
    uniforms_1U = torch.rand(1, uniforms, generator=generator, dtype=torch.float64).to(device)
    tokens_1N = growth.plant(torch.zeros(1, dtype=torch.long, device=device))
    for level in growth.levels:
        nodes = torch.arange(level.first, level.stop, device=device)[level.drawing]
        growth.draw(level, draft_1ND[:, nodes], tokens_1N, uniforms_1U)
    return growth.tree(tokens_1N), logits_1NV.softmax(-1), uniforms_1U[:, topology.num_nodes - 1 :]


def graph_time(walk, scheme, draft, target_law, uniforms_1U) -> float | None:
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            walk.run(scheme, draft, target_law, uniforms_1U)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            walk.run(scheme, draft, target_law, uniforms_1U)
    except RuntimeError as error:
        print(f"<!-- {scheme.name} + {walk.name}: no graph: {str(error).splitlines()[0]} -->")
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
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
