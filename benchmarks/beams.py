"""Beams with and without drafts: speed, tokens per pass, energy, likelihood; each arm over all prompts in one go.

python benchmarks/beams.py --prompts PROMPTS
python benchmarks/beams.py --target inflated:13b --draft smollm2-head --device cuda --prompts PROMPTS --limit 16

An arm takes all prompts one after the other, so that energy counters, which tick slowly, mean something. Arms take turns; a
first turn, in which passes are captured, does not count. Times exclude prefill, energy includes it. The gain of
an arm is its speed over that of the last plain one above it. Names of arms: `search`, `search:16x4` (width x depth of drafts),
`search:16x4,twins`, `sample`, `sample:16x3`, `sample:6x3,threshold=0.7,min_width=2,beams=3`, `sample:16x4,draws=iid`.
"""

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import polydraft
from polydraft.lab.bench.meters import EnergyMeter, synchronised_clock

ARMS = [
    *("search", "search:16x2", "search:16x4", "search:24x3", "search:16x4,twins"),
    *("sample", "sample:8x2", "sample:16x3", "sample:6x3,threshold=0.7,beams=3"),
    *("sample:draws=iid", "sample:16x4,draws=iid", "sample:32x4,draws=iid"),
]


@dataclass
class Turn:
    """One arm over all prompts, once."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    joules: float | None = None
    log_probs: list[float] = field(default_factory=list)


def parsed(arm: str, beams: int) -> dict[str, Any]:
    """Return the options that an arm's name means."""
    mode, _, rest = arm.partition(":")
    options: dict[str, Any] = {"mode": mode, "beams": beams}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name == "twins":
            options["twins"] = True
        elif name == "threshold":
            options["width_threshold"] = float(value)
        elif name in ("beams", "min_width"):
            options[name] = int(value)
        elif name == "draws":
            options["draws"] = value
        else:
            options["draft_width"], options["draft_depth"] = map(int, name.split("x"))
    return options


def drafts(options: dict[str, Any]) -> bool:
    return "draft_width" in options or "twins" in options


def take_turn(decoder: polydraft.BeamDecoder, prompts: list[str], options: dict[str, Any], meter: EnergyMeter) -> Turn:
    """Let an arm decode all prompts."""
    turn, device = Turn(), decoder.decoder.target.device
    start, joules = synchronised_clock(device), meter.joules()
    for number, prompt in enumerate(prompts):
        stream = decoder.stream(prompt, chat=True, seed=number, **options)
        for _ in stream:
            pass
        result = stream.result()
        turn.tokens += len(result.best.token_ids)
        turn.passes += result.stats.rounds
        turn.seconds -= result.stats.seconds["prefill"]
        turn.log_probs += result.best.log_probs
    turn.seconds += synchronised_clock(device) - start
    spent = meter.joules()
    turn.joules = spent - joules if spent is not None and joules is not None else None
    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-head")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    chosen = parser.parse_args()
    lines = chosen.prompts.read_text(encoding="utf-8").splitlines()[: chosen.limit]
    prompts = [json.loads(line)["prompt"] for line in lines]
    decoder = polydraft.load(chosen.target, chosen.draft, device=chosen.device, dtype=chosen.dtype)
    drafted, plain = polydraft.BeamDecoder(decoder), polydraft.BeamDecoder(decoder.replace(drafter=None))
    meter = EnergyMeter(decoder.target.device)
    distribution = polydraft.SamplingParams(top_k=10, top_p=0.8)
    turns: dict[str, list[Turn]] = {arm: [] for arm in chosen.arms}
    for number in range(1 + chosen.turns):
        for arm in chosen.arms:
            options = {**parsed(arm, chosen.beams), "max_new_tokens": chosen.tokens}
            if options["mode"] == "sample":
                options["sampling"] = distribution
            turn = take_turn(drafted if drafts(options) else plain, prompts, options, meter)
            if number:
                turns[arm].append(turn)
    name = torch.cuda.get_device_name() if decoder.target.device.type == "cuda" else "CPU"
    print(f"{chosen.target} on {name}, {len(prompts)} prompts, {chosen.tokens} tokens, {chosen.turns} turns, W={chosen.beams}")
    print(f"{'arm':38} tokens/s  gain  tokens/pass  passes  ms/pass  J/token  energy gain  log-likelihood")
    base: tuple[float, float | None] = (1.0, None)
    for arm, own in turns.items():
        speed = statistics.median(turn.tokens / turn.seconds for turn in own)
        energy = statistics.median(turn.joules / turn.tokens for turn in own) if own[0].joules is not None else None
        if not drafts(parsed(arm, chosen.beams)):
            base = speed, energy
        last = own[-1]
        spent = f"{energy:7.3f}  {base[1] / energy if base[1] else 1:11.2f}" if energy else f"{'-':>7}  {'-':>11}"
        print(
            f"{arm:38} {speed:8.1f}  {speed / base[0]:4.2f}  {last.tokens / last.passes:11.3f}  {last.passes:6d}  "
            f"{1e3 * last.seconds / last.passes:7.2f}  {spent}  {statistics.fmean(last.log_probs):14.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
