"""A system prompt that requests share: tokens that the target reads, and time to first token, with and without kept copies.

    python benchmarks/prefixes.py [--target smollm2] [--draft auto] [--system 1000] [--own 30] [--requests 4] [--repeat 3]

Requests arrive together first; one more comes later, when others have had the slots. Arms take turns.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import polydraft
from polydraft.engine import Decoder
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import SamplingParams
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.request import Request

_BUDGET = 10**9
_NEW_TOKENS = 4


class Measured:
    """A lane, and what its requests wait for."""

    def __init__(self, decoder: Decoder, slots: int, length: int, prefixes: Prefixes | None) -> None:
        self._decoder, self.read = decoder, 0
        self._lane = Lane(decoder, LaneOptions(slots=slots, slot_tokens=length, chunk_tokens=256), prefixes=prefixes)
        context = self._lane._opened().workspace.memory.context
        prefill = context.prefill

        def counted(texts: Sequence[Sequence[int]], observer: Any = None) -> None:
            self.read += sum(map(len, texts))
            prefill(texts, observer)

        context.prefill = counted

    def ask(self, prompts: Sequence[list[int]]) -> tuple[float, int]:
        """Return the mean seconds to a first token of requests that arrive together, and tokens that the target reads."""
        self.read, firsts, start = 0, dict[Request, float](), time.perf_counter()
        for prompt in prompts:
            sequence = self._decoder.sequence(prompt, SamplingParams(temperature=0), seed=0, max_new_tokens=_NEW_TOKENS)
            self._lane.waiting.add(Request([sequence]))
        while self._lane.busy:
            for request, progress in self._lane.step():
                if progress.emitted.token_ids:
                    firsts.setdefault(request, time.perf_counter() - start)
        return statistics.fmean(firsts.values()), self.read


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt")
    parser.add_argument("--own", type=int, default=30, help="tokens that each request has of its own")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    decoder = polydraft.load(options.target, draft=options.draft)
    size = decoder.target.vocab_size

    def prompts(turn: int, system: int) -> list[list[int]]:
        stem = [(7 * place + place // 31 + 1000 * system) % size for place in range(options.system)]
        return [
            [*stem, *((11 * place + 97 * request + 13 * turn) % size for place in range(options.own))]
            for request in range(options.requests)
        ]

    for turn in range(options.repeat):
        times: dict[str, tuple[float, float]] = {}
        for name, prefixes in (("without", None), ("with", Prefixes(_BUDGET))):
            length = options.system + options.own + 2 * _NEW_TOKENS
            lane = Measured(decoder, options.requests, length, prefixes)
            lane.ask(prompts(0, -1))
            together, read = lane.ask(prompts(turn, turn))
            lane.ask(prompts(turn, -2))  # others, which take the slots
            later, read_later = lane.ask(prompts(turn + 1, turn)[:1])
            times[name] = together, later
            print(f"{name}: together {read} tokens read, {together:.2f} s; later {read_later}, {later:.2f} s", flush=True)
        ratios = [without / found for without, found in zip(times["without"], times["with"], strict=True)]
        print(f"time to first token: together {ratios[0]:.1f}×, later {ratios[1]:.1f}× shorter", flush=True)


if __name__ == "__main__":
    main()
