"""Drawing and verification above temperature 0 on one GPU: kernels against torch, and both against exact probabilities.

python benchmarks/gpu_verification.py                # everything, about two minutes on an H200
python benchmarks/gpu_verification.py --only rounds  # some of it
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from gpu import SHAPE_135M, graph_seconds, random_head, random_model, round_seconds
from polydraft import operations
from polydraft.certify.chi_square import tuple_p_value
from polydraft.draft import TreeDrafter
from polydraft.draft.static_plan import plan_passes
from polydraft.engine import Decoder
from polydraft.sampling import PartialVocabulary, SamplingParams, Warper
from polydraft.trees import DraftTree, Topology, parse_tree
from polydraft.verify import BlockWalk, Hybrid, TargetDistributions, Verdict

DEVICE = torch.device("cuda")
TREE, SIZE, KNOWN = "4x2x2x1x1", 49152, 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    for name in parser.parse_args().only:
        start = time.perf_counter()
        SECTIONS[name]()
        print(f"-- {name}: {time.perf_counter() - start:.0f} s\n", flush=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let torch's operations do what kernels do otherwise."""
    with operations.using():
        yield


def distributions() -> None:
    """Draw and verify small trees many times: texts, completed by the target, must follow the target's distribution."""
    size, generator = 6, torch.Generator(DEVICE).manual_seed(0)
    topology = parse_tree("3x2")
    target = [
        torch.softmax(1.5 * torch.randn(*[size] * places, device=DEVICE, generator=generator), -1) for places in (1, 2, 3)
    ]
    noise = [torch.randn(*[size] * places, device=DEVICE, generator=generator) for places in (1, 2)]
    draft = [torch.softmax(distribution.log() + 0.8 * shift, -1) for distribution, shift in zip(target, noise, strict=False)]
    texts = itertools.product(range(size), repeat=3)
    expected = {(a, b, c): float(target[0][a] * target[1][a, b] * target[2][a, b, c]) for a, b, c in texts}
    for buckets, rows in ((16, 500_000), (4096, 50_000)):
        scheme = Hybrid(buckets=buckets)
        uniforms_BU = partial(torch.rand, device=DEVICE, generator=generator, dtype=torch.float64)
        first_BK = scheme.draw(draft[0].expand(rows, -1), uniforms_BU(rows, 3))
        distributions_BGV = draft[1][first_BK]
        second_BK = scheme.draw(distributions_BGV.flatten(0, 1), uniforms_BU(3 * rows, 2)).view(rows, 6)
        tokens_BN = torch.cat([torch.zeros_like(first_BK[:, :1]), first_BK, second_BK], 1)
        above_BK = first_BK.repeat_interleave(2, 1)
        target_BNV = torch.cat([target[0].expand(rows, 1, -1), target[1][first_BK], target[2][above_BK, second_BK]], 1)
        tree = tree_of(topology, tokens_BN, (draft[0].expand(rows, 1, -1), distributions_BGV), None)
        walk = BlockWalk()
        verdict = verified(walk, scheme, tree, target_BNV, uniforms_BU(rows, walk.uniforms(scheme, 2)))
        assert not verdict.fault_B.any()
        text_BD = verdict.tokens_BD.clone()
        for place in (1, 2):
            distribution_BV = target[place][tuple(text_BD[:, before] for before in range(place))]
            drawn_B = torch.multinomial(distribution_BV, 1, generator=generator)[:, 0]
            text_BD[:, place] = torch.where(verdict.accepted_B >= place, text_BD[:, place], drawn_B)
        p_value = tuple_p_value(text_BD.cpu(), expected)
        print(f"{rows} trees, {buckets} buckets: p-value {p_value:.3f}, {verdict.accepted_B.double().mean():.3f} accepted")
        assert p_value > 1e-4


class _Given(TargetDistributions):
    """Distributions that are there already."""

    def __init__(self, target_BNV: Tensor) -> None:
        self.greedy, self._target_BNV = False, target_BNV

    def everywhere(self, draft: DraftTree) -> Tensor:
        return self._target_BNV


def verified(walk: BlockWalk, scheme: Hybrid, tree: DraftTree, target_BNV: Tensor, uniforms_BU: Tensor) -> Verdict:
    return walk.run(scheme, tree, _Given(target_BNV), uniforms_BU)


def tree_of(
    topology: Topology, tokens_BN: Tensor, distributions: tuple[Tensor, ...], known: PartialVocabulary | None
) -> DraftTree:
    rows_N = plan_passes(topology, DEVICE, 0).distribution_rows_N
    return DraftTree.from_topology(topology, tokens_BN, distributions, rows_N, known)


def case(rows: int, partial_vocabulary: bool, seed: int, sharpness: float) -> tuple[Hybrid, DraftTree, Tensor, Tensor, Tensor]:
    """Make trees of the default shape from realistic logits: scheme, tree, logits, uniforms, one level's distributions."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    topology, scheme = parse_tree(TREE), Hybrid()
    random = partial(torch.randn, device=DEVICE, generator=generator)
    logits_BNV = sharpness * random(rows, topology.num_nodes, SIZE)
    tokens_D = torch.arange(0, SIZE, SIZE // KNOWN, device=DEVICE)
    known = PartialVocabulary(tokens_D, SIZE) if partial_vocabulary else None
    tokens_BN, distributions = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE), []
    for level in topology.levels[:-1]:
        count, width = len(level), len(topology.children[level[0]])
        guess_BGV = logits_BNV[:, level.start : level.stop] + 0.7 * random(rows, count, SIZE)
        distribution_BGD = torch.softmax(guess_BGV[..., tokens_D] if known else guess_BGV, -1)
        uniforms_RK = torch.rand(rows * count, width, device=DEVICE, generator=generator, dtype=torch.float64)
        column_BX = scheme.draw(distribution_BGD.flatten(0, 1), uniforms_RK).view(rows, -1)
        tokens_BN = torch.cat([tokens_BN, known.tokens(column_BX) if known else column_BX], 1)
        distributions.append(distribution_BGD)
    count = BlockWalk().uniforms(scheme, topology.depth)
    uniforms_BU = torch.rand(rows, count, device=DEVICE, generator=generator, dtype=torch.float64)
    return (
        scheme,
        tree_of(topology, tokens_BN, tuple(distributions), known),
        logits_BNV,
        uniforms_BU,
        distributions[2].flatten(0, 1),
    )


def verdicts() -> None:
    """Compare verdicts and drawings of kernels and of torch's operations, at the size of real distributions."""
    for partial_vocabulary, sharpness in itertools.product((True, False), (1.5, 4.0)):
        same = accepted = drawn = children = 0
        for seed in range(6):
            scheme, tree, logits_BNV, uniforms_BU, distribution_RV = case(4, partial_vocabulary, seed, sharpness)
            target_BNV = torch.softmax(logits_BNV, -1)
            numbers_RK = uniforms_BU[:1, : 4 * len(distribution_RV)].view(-1, 4)[: len(distribution_RV)]
            found = verified(BlockWalk(), scheme, tree, target_BNV, uniforms_BU), scheme.draw(distribution_RV, numbers_RK)
            with without_kernels():
                other = verified(BlockWalk(), scheme, tree, target_BNV, uniforms_BU), scheme.draw(distribution_RV, numbers_RK)
            valid_BD = torch.arange(6, device=DEVICE) <= found[0].accepted_B[:, None]
            equal_B = (found[0].path_BD == other[0].path_BD).all(-1) & (found[0].accepted_B == other[0].accepted_B)
            equal_B &= (found[0].tokens_BD * valid_BD == other[0].tokens_BD * valid_BD).all(-1) & (found[0].fault_B == 0)
            same, accepted = same + int(equal_B.sum()), accepted + int(found[0].accepted_B.sum())
            drawn, children = drawn + int((found[1] == other[1]).sum()), children + found[1].numel()
        print(
            f"{'part of' if partial_vocabulary else 'all'} tokens, logits of deviation {sharpness}: {same} of 24 verdicts the "
            f"same ({accepted / 24:.2f} accepted), {drawn} of {children} children",
            flush=True,
        )


def times() -> None:
    """Time drawing and verification alone, captured."""
    for rows, partial_vocabulary in ((1, True), (1, False), (8, True)):
        pieces = pieces_of(rows, partial_vocabulary)
        ours = {name: 1e6 * graph_seconds(piece) for name, piece in pieces.items()}
        with without_kernels():
            theirs = {name: 1e6 * graph_seconds(piece) for name, piece in pieces.items()}
        print(f"batch {rows}, {'part of' if partial_vocabulary else 'all'} tokens; µs by kernels (by torch):")
        print("  " + ", ".join(f"{name} {ours[name]:.0f} ({theirs[name]:.0f})" for name in pieces), flush=True)
        if rows == 1:
            spread(pieces["distributions and walk"])


def pieces_of(rows: int, partial_vocabulary: bool) -> dict[str, Callable[[], object]]:
    scheme, tree, logits_BNV, uniforms_BU, distribution_RV = case(rows, partial_vocabulary, 0, 4.0)
    warper = Warper(SamplingParams(), SIZE, [[1]] * rows, DEVICE)
    half_BNV = logits_BNV.bfloat16()

    def verify() -> Verdict:
        return BlockWalk().run(
            scheme, tree, TargetDistributions(half_BNV, lambda logits: logits, warper, whole=True), uniforms_BU
        )

    numbers_RK = uniforms_BU[:, :4].repeat_interleave(len(distribution_RV) // rows, 0)
    return {
        "distributions": lambda: warper.probs(half_BNV, half_BNV[..., :0].long()),
        "distributions and walk": verify,
        **{
            f"draw {width} of {len(distribution_RV)}": partial(scheme.draw, distribution_RV, numbers_RK[:, :width])
            for width in (4, 2, 1)
        },
    }


def spread(function: Callable[[], object]) -> None:
    """Print which kernels the time goes to."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)
    print("  " + ", ".join(f"{one.key[:28]} {one.count // 5}x{one.device_time_total / one.count:.1f}" for one in rows[:14]))


def rounds() -> None:
    """Time whole captured rounds of a model of the bundled one's sizes, with random weights, in turns."""
    target = random_model(SHAPE_135M)
    drafter = TreeDrafter(random_head(target), parse_tree(TREE))
    arms = [(0.0, "kernels"), (0.7, "kernels"), (1.0, "kernels"), (0.7, "torch"), (1.0, "torch")]
    found: dict[tuple[float, str], list[float]] = {}
    for _ in range(2):
        for temperature, form in arms:
            decoder = Decoder(target, drafter)
            start = time.perf_counter()
            with nullcontext() if form == "kernels" else without_kernels():
                whole, _, _ = round_seconds(decoder, SamplingParams(temperature=temperature), 512)
            found.setdefault((temperature, form), []).append(1e3 * whole)
            print(f"T={temperature:g} {form}: {1e3 * whole:.3f} ms, all of it {time.perf_counter() - start:.1f} s", flush=True)
    for (temperature, form), times_ms in found.items():
        print(f"T={temperature:g} {TREE} {form}: {min(times_ms):.3f} ms per round")


SECTIONS: dict[str, Callable[[], None]] = {
    "distributions": distributions,
    "verdicts": verdicts,
    "times": times,
    "rounds": rounds,
}

if __name__ == "__main__":
    main()
