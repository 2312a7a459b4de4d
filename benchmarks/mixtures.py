"""A server's scheduler under mixed requests, speculation on against off, in 24 combinations.

python benchmarks/mixtures.py --target inflated:7b --prompts spec_bench.jsonl --out mixtures.json     # a GPU, 3 minutes

Each cell is a number of clients that ask again as soon as they are answered. Their texts have one of four choices of
temperature, and one of six kinds: alike, with seeds, short and long, half with a penalty, half with a grammar, or all of it.
Texts may end early, so tokens are counted as they come. Arms alternate, lap by lap; the ratio is that of their medians.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from polydraft import SamplingParams, load
from polydraft.engine import Decoder
from polydraft.prompts import load_prompts
from polydraft.sampling.grammar import Grammar, Grammars
from polydraft.serve.lane import LaneOptions
from polydraft.serve.request import AUTO, OFF, Request
from polydraft.serve.scheduler import Scheduler

LONGEST, CHUNK = 512, 256
TEMPERATURES = {"0": (0.0,), "0.7": (0.7,), "1": (1.0,), "mixed": (0.0, 0.7, 1.0)}
KINDS = {
    "alike": "",
    "seeds": "s",
    "short and long": "l",
    "half with a penalty": "p",
    "half with a grammar": "g",
    "all of it": "slpg",
}
"""What clients have besides a temperature: seeds, lengths, penalties, grammars."""
LINE = Grammar.regex(r"[A-Za-z0-9 .,:;!?'()*\n-]+")


@dataclass
class Cell:
    """One combination of temperatures and kind."""

    temperatures: tuple[float, ...]
    kind: str
    tokens: int

    def length(self, number: int, turn: int) -> int:
        """Return how long a client's text may be."""
        spread = 4 if "l" in self.kind else 2  # a quarter to twice the mean, or half to one and a half
        least, most = self.tokens // spread, self.tokens * (spread + 2) // 4 if spread == 2 else 2 * self.tokens
        return random.Random(1000 * turn + number).randint(least, most)

    def params(self, number: int) -> SamplingParams:
        """Return a client's sampling parameters."""
        penalty = 1.1 if "p" in self.kind and number % 2 else 1.0
        return SamplingParams(temperature=self.temperatures[number % len(self.temperatures)], repetition_penalty=penalty)

    def constrained(self, number: int) -> bool:
        """Return whether a client's texts follow a grammar."""
        return "g" in self.kind and number // 2 % 2 == 1


async def ask(
    scheduler: Scheduler, arm: str, cell: Cell, prompts: list[list[int]], number: int, turns: int, rules: Grammars
) -> int:
    """Ask some times, one after the other; return how many tokens came."""
    decoder, found = scheduler.decoder, 0
    for turn in range(turns):
        prompt = prompts[(number + turn) % len(prompts)]
        constrained = cell.constrained(number)
        text = decoder.sequence(
            prompt,
            cell.params(number),
            seed=1000 * turn + number,
            max_new_tokens=cell.length(number, turn),
            max_positions=LONGEST,
            grammar=rules.processor(rules.compiled(LINE), len(prompt)) if constrained else None,
        )
        request = Request([text], arm, asyncio.get_running_loop(), constrained=constrained)
        scheduler.submit(request)
        while True:
            progress = await request.events.get()
            if progress.error is not None:
                raise progress.error
            found += len(progress.emitted.token_ids)
            if progress.emitted.stop_reason is not None:
                break
    return found


async def measured(options: argparse.Namespace, decoder: Decoder, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Time all cells."""
    rules = Grammars(decoder.tokenizer, decoder.target.vocab_size, decoder.eos_token_ids)
    warm = [SamplingParams(temperature=temperature) for temperature in TEMPERATURES["mixed"]]
    size = LaneOptions(slots=options.streams, slot_tokens=LONGEST, chunk_tokens=CHUNK)
    arms = {OFF: decoder.replace(drafter=None), AUTO: decoder}
    schedulers = {arm: Scheduler(one, size, max_queue=options.streams, warm_up=warm) for arm, one in arms.items()}
    for scheduler in schedulers.values():
        scheduler.start()
    while not all(scheduler.ready for scheduler in schedulers.values()):
        await asyncio.sleep(0.1)
    print("warmed up", flush=True)
    found: dict[str, dict[str, float]] = {}
    for kind, parts in KINDS.items():
        for name, temperatures in TEMPERATURES.items():
            cell = Cell(temperatures, parts, options.tokens)
            rates: dict[str, list[float]] = {arm: [] for arm in arms}
            for lap in range(options.laps + 1):  # the first lap captures what the warm-up did not
                for arm, scheduler in schedulers.items():
                    start = time.perf_counter()
                    clients = [ask(scheduler, arm, cell, prompts, one, options.turns, rules) for one in range(options.streams)]
                    tokens = sum(await asyncio.gather(*clients))
                    if lap:
                        rates[arm].append(tokens / (time.perf_counter() - start))
            off, auto = (statistics.median(rates[arm]) for arm in arms)
            found[f"{kind}, T={name}"] = {"off": off, "auto": auto, "ratio": auto / off}
            print(f"{kind:20} T={name:6} off {off:7.0f}, auto {auto:7.0f} tokens/s: {auto / off:.2f}x", flush=True)
    for scheduler in schedulers.values():
        await asyncio.to_thread(scheduler.drain, 5.0)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="inflated:7b")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--laps", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    decoder = load(options.target, draft=options.draft)
    texts = [decoder.encode(prompt.text, chat=True) for prompt in load_prompts(options.prompts, 64)]
    prompts = [text for text in texts if len(text) + 2 * options.tokens < LONGEST]
    found = asyncio.run(measured(options, decoder, prompts))
    print(f"least {min(cell['ratio'] for cell in found.values()):.2f}x, of {len(found)} cells", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
