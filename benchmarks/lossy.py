"""How far improved-MCSD's target-initialised rule is from the target's distribution.

    python benchmarks/lossy.py                                     # total variation on tables, a minute
    python benchmarks/lossy.py --model smollm2 --prompts FILE --limit 40 --max-new-tokens 64   # log-likelihood shift

On tables the distribution of a whole text is known; its distance from what was sampled is compared with that of a lossless
fork, which is sampling noise. On a model the text's mean log-likelihood under the target shows which way the text moves.
"""

import argparse
import itertools
import statistics

import torch

import polydraft
from polydraft.beam import text_log_probs
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models import TabularModel
from polydraft.papers.target_init import TargetInit
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.trees import Topology

WIDTHS = (1, 2, 4, 16)
TABLE_WIDTHS = (1, 2, 3)
TOKENS, SAMPLES, PAIRS = 3, 6_000, 3


def exact_distribution(model: TabularModel, prompt: list[int]) -> torch.Tensor:
    """Probability of every text of `TOKENS` tokens."""
    distribution = torch.zeros([model.vocab_size] * TOKENS, dtype=torch.float64)
    for text in itertools.product(range(model.vocab_size), repeat=TOKENS):
        chance = 1.0
        for place, token in enumerate(text):
            chance *= float(torch.softmax(model.logits_after([*prompt, *text[:place]]).double(), -1)[token])
        distribution[text] = chance
    return distribution


def distance(decoder: Decoder, distribution: torch.Tensor, prompt: list[int], seed: int) -> float:
    """Total variation between the distribution and sampled texts."""
    counts = torch.zeros_like(distribution)
    for result in decoder.generate([prompt] * SAMPLES, max_new_tokens=TOKENS, seed=seed):
        counts[tuple(result.token_ids)] += 1
    return float((counts / SAMPLES - distribution).abs().sum() / 2)


def tables() -> None:
    print(f"texts of {TOKENS} tokens, {SAMPLES} samples, mean of {PAIRS} random pairs; total variation from the target")
    print(f"{'V':>3} {'D':>3} {'fork:3xD':>9} " + " ".join(f"{'lossy W=' + str(width):>12}" for width in TABLE_WIDTHS))
    prompt = [0, 1]
    for vocabulary, depth in ((3, 1), (3, 3), (4, 2)):
        found: dict[str, list[float]] = {}
        for pair in range(PAIRS):
            target = TabularModel.random(vocabulary, order=2, seed=pair, sharpness=1.5)
            draft = target.mixed_with(TabularModel.random(vocabulary, order=2, seed=100 + pair, sharpness=1.5), 0.5)
            distribution = exact_distribution(target, prompt)
            fork = Decoder(target, TreeDrafter(draft, Topology.fork(3, depth)))
            found.setdefault("fork", []).append(distance(fork, distribution, prompt, pair))
            for width in TABLE_WIDTHS:
                lossy = Decoder(target, TargetInit(draft, Topology.fork(width, depth)), lossless=False)
                found.setdefault(str(width), []).append(distance(lossy, distribution, prompt, pair))
        cells = [f"{statistics.mean(found[str(width)]):>12.3f}" for width in TABLE_WIDTHS]
        print(f"{vocabulary:>3} {depth:>3} {statistics.mean(found['fork']):>9.3f} " + " ".join(cells), flush=True)


def model(name: str, source: str, limit: int, new_tokens: int, depth: int) -> None:
    plain = polydraft.load(name, "none")
    prompts = [plain.encode(prompt.text, chat=True) for prompt in load_prompts(source, limit)]
    decoders = {"plain": plain}
    decoders |= {
        f"target-init:{width}x{depth}": polydraft.load(name, tree=f"fork:{width}x{depth}", lossy="target-init")
        for width in WIDTHS
    }
    print(f"{'method':>18} {'log p/token':>14} {'± s.e.':>8} {'shift':>8} {'± s.e.':>8} {'tokens/pass':>12}")
    base: list[float] = []
    for label, decoder in decoders.items():
        scores, passes, tokens = [], 0, 0
        for seed, prompt in enumerate(prompts):
            result = decoder.generate(prompt, sampling=SamplingParams(), max_new_tokens=new_tokens, seed=seed)
            scores.append(statistics.fmean(text_log_probs(plain.target, prompt, [result.token_ids])[0]))
            passes, tokens = passes + result.stats.passes, tokens + result.stats.block_tokens
        base = base or scores
        shift = [score - other for score, other in zip(scores, base, strict=True)]
        error, moved = (statistics.stdev(values) / len(values) ** 0.5 for values in (scores, shift))
        print(
            f"{label:>18} {statistics.mean(scores):>14.3f} {error:>8.3f} {statistics.mean(shift):>+8.3f} {moved:>8.3f} "
            f"{tokens / passes:>12.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="for example smollm2; without it, tables")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=5)
    options = parser.parse_args()
    if options.model:
        model(options.model, options.prompts, options.limit, options.max_new_tokens, options.depth)
    else:
        tables()


if __name__ == "__main__":
    main()
