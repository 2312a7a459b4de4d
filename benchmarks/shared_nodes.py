"""How many more tokens a round brings whose rows share out their nodes, than one whose rows have as many each: counted.

    python benchmarks/shared_nodes.py --prompts spec_bench.jsonl [--limit 60] [--temperatures 0 0.7 1] [--rows 16 64]

Prompts are `--limit` of the file, evenly spread. Texts are written one by one with long chains. What a batch would have
accepted follows from them: its rows are rounds drawn at random, cut to as many nodes as they would have kept. Nothing is timed,
so any machine will do. Intervals are over prompts.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft import SamplingParams, load
from polydraft.draft import TreeDrafter
from polydraft.draft.budget import keep_likeliest
from polydraft.draft.static_builder import StaticBuilder
from polydraft.draft.static_plan import LevelPlan
from polydraft.prompts import load_prompts
from polydraft.trees import parse_tree

_LEVELS = 4
_MEANS = (0.5, 1.0, 2.0, 3.0)
"""Candidates per row."""


class Watched(StaticBuilder):
    """A builder that notes how sure the draft was at each level, and how many of its candidates were accepted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sure: list[float] = []
        self.rounds: list[tuple[list[float], int]] = []

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> Tensor | None:
        """Note the chance of the likeliest child."""
        self.sure = self.sure[: self._drawn]
        probs_BGV = super().draw(level, logits_BGV, tokens_BN, uniforms_BU)
        known_BGV = logits_BGV.float().softmax(-1) if probs_BGV is None else probs_BGV
        self.sure.append(float(known_BGV.max()))
        return probs_BGV

    def advance(self, emitted: Any) -> None:
        """Note what was accepted."""
        super().advance(emitted)
        if emitted[0]:
            self.rounds.append((self.sure, min(len(emitted[0]) - 1, _LEVELS)))


class Watching(TreeDrafter):
    """Draws chains by builders that are watched."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, parse_tree(f"chain:{_LEVELS}"))
        self.builders: list[Watched] = []

    def builder(self, params: Any, target: Any) -> Watched:
        """Return one that is watched."""
        self.builders.append(Watched(self.source(len(params)), self.topology, params, target.vocab_size))
        return self.builders[-1]


def accepted(chances_RL: Tensor, accepted_R: Tensor, rows: int, mean: float, generator: torch.Generator) -> tuple[float, float]:
    """Return accepted tokens per row: where rows share candidates out, and where each has as many."""
    shared = alike = 0.0
    for _ in range(times := 200):
        some = torch.randint(len(accepted_R), (rows,), generator=generator)
        count = rows + round(rows * mean)
        kept_K = keep_likeliest(chances_RL[some], torch.ones(rows, dtype=torch.bool), count)
        depths_R = torch.bincount(kept_K // (_LEVELS + 1), minlength=rows) - 1
        shared += float(torch.minimum(depths_R, accepted_R[some]).float().mean()) / times
        # Half a candidate each: every second row has one.
        depths_R = torch.full((rows,), int(mean)) + (torch.rand(rows, generator=generator) < mean % 1)
        alike += float(torch.minimum(depths_R, accepted_R[some]).float().mean()) / times
    return shared, alike


def main() -> None:
    """Count for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    decoder = load("smollm2")
    everything = [prompt.text for prompt in load_prompts(args.prompts)]
    prompts = everything[:: max(len(everything) // args.limit, 1)][: args.limit]
    print("T    rows  candidates  tokens per round: shared  alike  shared / alike (95 %)")
    for temperature in args.temperatures:
        watching = Watching(decoder.drafter.model)
        watched = decoder.replace(drafter=watching, graphs=False)
        texts: list[list[tuple[list[float], int]]] = []
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature)
            watching.builders.clear()
            watched.generate(prompt, chat=True, sampling=sampling, max_new_tokens=64, seed=seed)
            texts.append([one for builder in watching.builders for one in builder.rounds])
        for rows in args.rows:
            for mean in _MEANS:
                ratios, generator = list[float](), torch.Generator().manual_seed(0)
                shared, alike = 0.0, 0.0
                picker = np.random.default_rng(0)
                for resample in range(101):
                    order = range(len(texts)) if resample == 0 else picker.integers(len(texts), size=len(texts))
                    rounds = [one for text in order for one in texts[text]]
                    chances_RL, accepted_R = torch.tensor([one[0] for one in rounds]), torch.tensor([one[1] for one in rounds])
                    found = accepted(chances_RL, accepted_R, rows, mean, generator)
                    if resample == 0:
                        shared, alike = (1 + one for one in found)
                    else:
                        ratios.append((1 + found[0]) / (1 + found[1]))
                low, high = np.quantile(ratios, [0.025, 0.975])
                ratio = f"{shared / alike:.3f} ({low:.3f}-{high:.3f})"
                print(f"{temperature:<4g} {rows:4} {mean:11g} {shared:25.2f} {alike:6.2f}  {ratio}", flush=True)


if __name__ == "__main__":
    main()
