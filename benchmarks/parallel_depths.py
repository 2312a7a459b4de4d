"""One pass for many depths: heads that propose all depths of a round at once, against the ordinary head, level by level.

    python benchmarks/parallel_depths.py --prompts-train train_prompts.jsonl.gz --prompts spec_bench.jsonl --folder DIR

All heads are trained from scratch on the text that `ablations.py` keeps in the folder, or that is written there now, with the
same seed, steps and batches. In a parallel head entries below the first depth know no parent: a learnt vector for each depth
takes the place of features and token, joined (as in P-EAGLE), alone or added to the entry that the round begins with. They
attend as in the ordinary head: to the text up to that entry, and to the depths between.

Heads are compared along answers of the target at T=0 and at T=1 to other prompts. At T=1 a candidate of a chain is accepted
with probability min(1, q/p) of the token that follows, which gives rounds their distribution exactly, as at T=0; n candidates
of a tree's node with `hybrid`'s acceptance, an estimate. α are conditional: given that all candidates before were accepted.
Speed-ups are tokens per pass over what a round costs by measured times: a level of the head for each depth, or one level.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablations import MIXED, SMOKE, add_training_options, keep, read_corpus, residuals, settings_for
from polydraft.draft import speedup
from polydraft.draft.costs import costs_of, measure
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.train import TrainSettings, training, writer
from polydraft.train.corpus import Corpus, make_corpus
from polydraft.train.head_pupil import HeadPupil
from polydraft.train.objective import loss_of
from polydraft.trees import parse_tree

SCHEMES = {0.0: "top", 1.0: "hybrid"}
"""By temperature."""


class ParallelPupil(HeadPupil):
    """A head whose entries below the first depth stand for what is not known yet."""

    def __init__(self, settings: TrainSettings, target, vocabulary, anchored: bool) -> None:
        super().__init__(settings, target, vocabulary)
        self._anchored = anchored
        vectors_D1H = torch.randn(self.depths - 1, 1, self.head.shape.hidden_size, generator=torch.Generator().manual_seed(0))
        # Of three axes, so that AdamW takes them, not Muon: they are no matrix. At the scale of joined entries, or near zero.
        self.vectors_D1H = nn.Parameter((0.02 if anchored else 0.5) * vectors_D1H.to(self.head.device))
        self.module = nn.ModuleList([self.head, nn.ParameterList([self.vectors_D1H])])

    def study(self, texts, depths: int):
        """Do as the ordinary head does, but for the entries."""
        real_entry, first, seen = self.head.entry, [], 0

        def entry(fused_BLH: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal seen
            if not first:
                joined_BLH, normed_BLH = real_entry(fused_BLH, tokens_BL)
                first.append(joined_BLH)
                return joined_BLH, normed_BLH
            seen += 1
            vector_1H = self.vectors_D1H[seen - 1].to(first[0].dtype)
            joined_BLH = vector_1H.expand_as(first[0])
            if self._anchored:
                joined_BLH = joined_BLH + functional.pad(first[0][:, :-seen], (0, 0, seen, 0))
            return joined_BLH, self.head.attention_norm(joined_BLH)

        self.head.entry = entry
        try:
            return super().study(texts, depths)
        finally:
            del self.head.entry


ARMS: dict[str, tuple[Callable | None, int]] = {
    "ordinary": (None, 0),
    "parallel": (lambda *parts: ParallelPupil(*parts, anchored=False), 0),
    "parallel, anchored": (lambda *parts: ParallelPupil(*parts, anchored=True), 0),
    "parallel, anchored, MLP 3072": (lambda *parts: ParallelPupil(*parts, anchored=True), 3072),
}
"""How the head is made, if not in the ordinary way, and the width of its MLP, 0 for the target's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training_options(parser)
    parser.add_argument("--json", type=Path, help="all results  [default: parallel-depths.json in the folder]")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], metavar="NAME", help=f"of {'; '.join(ARMS)}")
    parser.add_argument("--held-out", type=int, default=120_000, help="tokens of answers to measure on, at each temperature")
    parser.add_argument("--tree", default="4x2x2x1", help="its depth is that of all heads")
    parser.add_argument(
        "--large-pass", nargs="+", default=["1:4.1", "64:4.8"], help="tokens of a pass and its ms, of a larger target (7B)"
    )
    parser.add_argument("--large-level-ms", type=float, help="a level of that target's head  [default: as measured here]")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({**SMOKE, "held_out": 256})
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    target = load_model(options.target, device, dtype, invariant=False)
    corpus = read_corpus(options, MIXED, target)
    counts = [int(part) for part in options.tree.split("x")]
    held_out = {temperature: answers(options, target, temperature) for temperature in SCHEMES}
    results: dict[str, dict] = {}
    seconds: dict[int, dict] = {}
    for name in options.arms:
        make, mlp_size = ARMS[name]
        settings = settings_for(options)
        settings = replace(settings, size=replace(settings.size, rollouts=len(counts), mlp_size=mlp_size))
        start = time.perf_counter()
        pupil = training.make_pupil(settings, target, corpus)
        if make is not None:
            pupil = make(settings, target, pupil.teacher.vocabulary)
        held = train(pupil, settings, corpus)
        found: dict = {"steps": settings.steps, "seconds": time.perf_counter() - start, "held_out": [str(one) for one in held]}
        for temperature, texts in held_out.items():
            found[f"T={temperature:g}"] = measured(pupil, texts, counts, temperature)
        folder = options.folder / "parallel-depths" / name.replace(", ", "-").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        pupil.export(folder, {})  # of a parallel head without its vectors: its layer is what is timed
        if mlp_size not in seconds:
            seconds[mlp_size] = times(options, folder, device, dtype, parse_tree(options.tree).num_nodes)
        # The layer's own times; all else is the same for all, and measured once.
        found["table"] = {**next(iter(seconds.values())), "level": seconds[mlp_size]["level"]}
        levels = len(counts) if make is None else 1
        for temperature, scheme in SCHEMES.items():
            rate(found[f"T={temperature:g}"], found["table"], scheme, counts, levels, options)
        results[name] = found
        del pupil
        keep(
            options.json or options.folder / "parallel-depths.json",
            {"options": {key: str(value) for key, value in vars(options).items() if key not in ("folder", "json")}, **results},
        )
        print(json.dumps({name: {key: found[key] for key in ("seconds", "held_out", "table")}}), flush=True)
    print_table(results, counts)


def train(pupil: HeadPupil, settings: TrainSettings, corpus: Corpus):
    """Take all steps, as `polydraft train head` does; return the acceptance on held-out text of the same making."""
    pupil.prime(corpus.test())
    parameters = list(pupil.module.parameters())
    optimizers = training.make_optimizers(settings, parameters)
    for step in range(settings.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = settings.learning_rate * training._rate(step / settings.steps)
        loss = training.take_step(settings, pupil, corpus, step, optimizers, parameters)
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
    return training.evaluate(pupil, corpus)


def answers(options: argparse.Namespace, target, temperature: float) -> Corpus:
    """Let the target answer other prompts, at one temperature."""
    settings = settings_for(options)
    asked = {"prompts": options.prompts, "prompt_limit": 8 if options.smoke else None, "made_up": 0.0, "seed": 7}
    settings = replace(settings, **asked, tokens=options.held_out)
    usual, writer.ANSWER_TEMPERATURES = writer.ANSWER_TEMPERATURES, (temperature,)
    try:
        return make_corpus(settings, target)
    finally:
        writer.ANSWER_TEMPERATURES = usual


@torch.no_grad()
def measured(pupil: HeadPupil, corpus: Corpus, counts: list[int], temperature: float) -> dict:
    """Return conditional acceptance by depth, and tokens per pass of chains and trees of every depth, along the texts."""
    # By depth: weighted acceptances of one candidate, and the weights, which are how often drafting comes there.
    sums_D2 = torch.zeros(len(counts), 2, dtype=torch.float64)
    chains: dict[int, list] = {depth: [] for depth in range(1, len(counts) + 1)}
    trees: dict[int, list] = {depth: [] for depth in range(1, len(counts) + 1)}
    generator = torch.Generator().manual_seed(0)
    for group in corpus.groups:
        for first in range(0, len(group.tokens_NL), 8):
            texts = group.rows(slice(first, first + 8))
            with training._autocast(pupil):
                lesson = pupil.study(texts, len(counts))
            mean_DR, one_DR, many_DR = tables(pupil, lesson, texts, counts, temperature)
            follows_R = lesson.follows_R.cpu()
            reach_R = torch.ones(len(follows_R), dtype=torch.float64)
            for depth in range(len(counts)):
                sums_D2[depth] += torch.stack([(reach_R * mean_DR[depth]).sum(), reach_R.sum()])
                reach_R = functional.pad((reach_R * one_DR[depth])[:-1], (1, 0)) * follows_R
            uniforms_DR = torch.rand(one_DR.shape, generator=generator, dtype=torch.float64)
            for depth in chains:
                chains[depth] += rounds((uniforms_DR < one_DR)[:depth], follows_R, len(counts))
                trees[depth] += rounds((uniforms_DR < many_DR)[:depth], follows_R, len(counts))
    alphas = (sums_D2[:, 0] / sums_D2[:, 1].clamp(min=1e-9)).tolist()
    return {"alpha": alphas, "chain": [ratio(chains[d]) for d in chains], "tree": [ratio(trees[d]) for d in trees]}


def tables(pupil: HeadPupil, lesson, texts, counts: list[int], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return by depth and position: acceptance on average over tokens, of the token that follows, and of several candidates."""
    device, vocabulary = pupil.head.device, pupil.teacher.vocabulary
    asked_BL = functional.pad(texts.answer_NL[:, 2:], (0, 2))
    token_R = functional.pad(texts.tokens_NL[:, 2:], (0, 2))[asked_BL].to(device).long()  # that which the distribution was of
    column_R, known_R = token_R, torch.ones_like(token_R).bool()
    if vocabulary is not None:
        column_R = torch.searchsorted(vocabulary.tokens_D, token_R).clamp(max=len(vocabulary.tokens_D) - 1)
        known_R = vocabulary.tokens_D[column_R] == token_R
    mean_DR, one_DR, many_DR = torch.zeros(3, len(counts), len(token_R), dtype=torch.float64).unbind()
    for depth, (count, (rows_R, outputs_RH)) in enumerate(zip(counts, lesson.outputs, strict=True)):
        probs_RD, logits_RD = lesson.distributions.probs_RD[rows_R], pupil.logits(outputs_RH).float()
        if temperature == 0:
            hits_RK = logits_RD.topk(count).indices == lesson.distributions.best_R[rows_R][:, None]
            mean_R = one_R = hits_RK[:, 0]
            many_R = hits_RK.any(-1)
        else:
            draft_RD = logits_RD.softmax(-1)
            mean_R = torch.minimum(probs_RD, draft_RD).sum(-1)
            ours_R, theirs_R = (
                distribution_RD.gather(1, column_R[rows_R, None])[:, 0] for distribution_RD in (draft_RD, probs_RD)
            )
            one_R = (ours_R / theirs_R.clamp(min=1e-30)).clamp(max=1) * known_R[rows_R]
            many_R = loss_of("tv", probs_RD, logits_RD, torch.zeros_like(mean_R), count)[1]
        for table_DR, part_R in ((mean_DR, mean_R), (one_DR, one_R), (many_DR, many_R)):
            table_DR[depth, rows_R.cpu()] = part_R.double().cpu()
    return mean_DR, one_DR, many_DR


def rounds(accepted_DR: Tensor, follows_R: Tensor, margin: int) -> list[tuple[int, int]]:
    """Go along the answers round by round; return tokens and rounds of each. Those that an end may cut do not count."""
    accepted, found = accepted_DR.tolist(), []
    edges = [*(~follows_R).nonzero()[:, 0].tolist(), len(follows_R)]
    for place, end in pairwise(edges):
        tokens = passes = 0
        while place + margin <= end:
            length = next((depth for depth, level in enumerate(accepted) if not level[place + depth]), len(accepted))
            tokens, passes, place = tokens + length + 1, passes + 1, place + length + 1
        found.append((tokens, passes))
    return [pair for pair in found if pair[1]]


def ratio(pairs: list[tuple[int, int]]) -> dict:
    tokens, passes = (sum(pair[place] for pair in pairs) for place in (0, 1))
    error = sum(one**2 for one in residuals({"prompts": pairs})) ** 0.5 / len(pairs) if pairs else 0.0
    return {"tau": tokens / max(passes, 1), "error": error, "rounds": passes}


def times(options: argparse.Namespace, folder: Path, device, dtype, nodes: int) -> dict:
    """Return seconds of target passes, of a level of the head, and of verification, as decoding has them."""
    with torch.no_grad():
        target = load_model(options.target, device, dtype)
        return measure(target.model, load_draft(str(folder), target), nodes)


def rate(found: dict, table: dict, scheme: str, counts: list[int], levels: int, options: argparse.Namespace) -> None:
    """Add speed-ups over plain decoding to every depth of chain and tree; `levels` is 1, or the deepest of all."""
    large_passes = {size: float(ms) / 1000 for size, ms in (pair.split(":") for pair in options.large_pass)}
    large = {**table, "target": large_passes}
    if options.large_level_ms is not None:
        large["level"] = dict.fromkeys(table["level"], options.large_level_ms / 1000)
    for form in ("chain", "tree"):
        for depth, one in enumerate(found[form], start=1):
            tree = "x".join(map(str, counts[:depth])) if form == "tree" else "x".join(["1"] * depth)
            for name, costs in (("here", costs_of(table, scheme)), ("large", costs_of(large, scheme))):
                one[name] = speedup(max(one["tau"], 1.0), min(depth, levels), parse_tree(tree).num_nodes, costs)


def print_table(results: dict[str, dict], counts: list[int]) -> None:
    print("\nTokens per pass at full depth; speed-ups over plain decoding at the best depth, which stands in brackets")
    print("| head | T | α by depth | chain | tree | chain, here | tree, here | chain, large | tree, large |")
    print("|" + "---|" * 9)
    for name, found in results.items():
        for temperature in SCHEMES:
            part = found[f"T={temperature:g}"]
            cells = [name, f"{temperature:g}", " ".join(f"{one:.3f}" for one in part["alpha"])]
            cells += [f"{part[form][-1]['tau']:.3f} ± {part[form][-1]['error']:.3f}" for form in ("chain", "tree")]
            for place in ("here", "large"):
                for form in ("chain", "tree"):
                    best = max(range(len(counts)), key=lambda depth: part[form][depth][place])
                    cells.append(f"{part[form][best][place]:.2f} ({best + 1})")
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
