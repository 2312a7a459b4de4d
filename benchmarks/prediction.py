"""How much faster predicted outputs make a rewrite, and what a wrong prediction costs.

    python benchmarks/prediction.py [--target smollm2] [--draft none] [--dtype float32] [--threads 2] [--tokens 400]
        [--rounds 4] [--prompts 6]

Each prompt is answered plainly first, at temperature 0. The prediction is that answer with a tenth of its lines edited: a word
replaced, the line left out, or another one put in. The wrong prediction is the edited answer to another prompt. Arms take
turns. A ratio is of seconds after the prompt was read, per prompt and turn: a geometric mean with its 95 % interval by
bootstrap over prompts. With --draft, `draft` decodes with that draft and no prediction; `wrong` is compared with it.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter

import torch

import polydraft
from polydraft import SamplingParams
from polydraft.engine import Decoder, Generation

PROMPTS = (
    "Write a Python class for a bank account, with deposit, withdraw and transfer methods and docstrings.",
    "Write a Python module with ten short functions about strings, each with a docstring and an example.",
    "Write an HTML page about the planets, with one table row per planet.",
    "Write a JSON list of twelve European countries with their capitals, populations and areas.",
    "Write a step-by-step recipe for apple pie, with a list of ingredients, one step per line.",
    "Write a shell script that makes a backup of a folder, with a comment above each line.",
)
CHANGED = 0.1
SAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    options = parser.parse_args()
    if options.prompts < 2:
        parser.error("a wrong prediction is another prompt's answer; give at least --prompts 2")
    torch.set_num_threads(options.threads)
    decoder = polydraft.load(options.target, draft=options.draft, dtype=options.dtype)
    plain, prompts = decoder.replace(drafter=None), PROMPTS[: options.prompts]
    answers = [answered(plain, prompt, options.tokens).text for prompt in prompts]
    right = [edited(answer, random.Random(number)) for number, answer in enumerate(answers)]
    wrong = [right[number - 1] for number in range(len(right))]
    nothing: list[str | None] = [None] * len(prompts)
    arms: dict[str, tuple[Decoder, list]] = {"plain": (plain, nothing), "right": (decoder, right), "wrong": (decoder, wrong)}
    if options.draft != "none":
        arms["draft"] = decoder, nothing
    for arm in arms:  # costs are measured, code is compiled
        answered(arms[arm][0], prompts[0], 32, arms[arm][1][0])
    found: dict[str, list[list[Generation]]] = {arm: [] for arm in arms}
    for turn in range(options.rounds):
        for arm, (own, predictions) in arms.items():
            given = zip(prompts, predictions, strict=True)
            found[arm].append([answered(own, prompt, options.tokens, prediction) for prompt, prediction in given])
        print(f"turn {turn + 1} of {options.rounds}", file=sys.stderr)
    beside = "plain" if options.draft == "none" else "draft"
    pairs = [("plain", arm) for arm in arms if arm not in ("plain", "wrong")] + [(beside, "wrong")]
    ratios = {f"{base} / {arm}": compared(found[base], found[arm]) for base, arm in pairs}
    for name, (mean, low, high) in ratios.items():
        print(f"{name}: {mean:.3f} ({low:.3f} to {high:.3f})")
    for arm in arms:
        print(f"{arm}: {summary(found[arm][-1])}")
    equal = all([one.text for one in turn] == answers for turns in found.values() for turn in turns)
    print("all texts are the plain ones" if equal else "some texts differ from the plain ones, as near-ties may")
    print(json.dumps({"options": vars(options), "ratios": ratios}))


def answered(decoder: Decoder, prompt: str, tokens: int, prediction: str | None = None) -> Generation:
    sampling = SamplingParams(temperature=0, prediction=prediction)
    return decoder.generate(prompt, sampling=sampling, max_new_tokens=tokens, chat=True)


def edited(text: str, chance: random.Random) -> str:
    """Edit a tenth of the lines, one at least."""
    lines = text.splitlines(keepends=True)
    filled = [number for number, line in enumerate(lines) if line.strip()]
    for number in chance.sample(filled, max(round(CHANGED * len(filled)), 1)):
        words, kind = lines[number].split(" "), chance.choice(("word", "less", "more"))
        if kind == "word":
            words[chance.choice([place for place, word in enumerate(words) if word.strip()])] = "renamed"
            lines[number] = " ".join(words)
        else:
            lines[number] = "" if kind == "less" else lines[number] + lines[chance.choice(filled)]
    return "".join(lines)


def compared(base: list[list[Generation]], arm: list[list[Generation]]) -> tuple[float, float, float]:
    """Return how many times faster an arm is, with the interval."""
    seconds = [[[one.stats.decode_seconds for one in turn] for turn in turns] for turns in (base, arm)]
    by_prompt = zip(*(zip(*turns, strict=True) for turns in seconds), strict=True)
    logs = [sum(math.log(one / other) for one, other in zip(*pair, strict=True)) / len(base) for pair in by_prompt]
    chance = random.Random(0)
    means = sorted(sum(chance.choices(logs, k=len(logs))) / len(logs) for _ in range(SAMPLES))
    return math.exp(sum(logs) / len(logs)), math.exp(means[SAMPLES // 40]), math.exp(means[-SAMPLES // 40])


def summary(results: list[Generation]) -> str:
    stats = [one.stats for one in results]
    tokens, passes = sum(one.new_tokens for one in stats), sum(one.passes for one in stats)
    candidates = sum(one.candidates for one in stats)
    seconds = sum(one.decode_seconds for one in stats)
    sources = dict(sum((one.tokens_by_source for one in stats), Counter[str]()))
    return (
        f"{tokens / seconds:.1f} tokens per second, {tokens / passes:.2f} per pass, {candidates / passes:.1f} candidates per "
        f"pass, {candidates} in all, {sources}"
    )


if __name__ == "__main__":
    main()
