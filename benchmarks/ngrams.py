"""Host time of n-gram caches: reading a prompt, reading a round's tokens, proposing.

python benchmarks/ngrams.py
python benchmarks/ngrams.py --text FILE --corpus FILE.grams

Without --text the text is Zipf-distributed with stretches that come again; with it, the beginning of a file in the bundled
target's tokens. Without --corpus the corpus cache is counted from further text of the same kind. Times are medians over the
rounds of one text, the worst being the 99th percentile; the aim is below 500 µs per round for proposing, 20 ms for a prompt.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polydraft.draft.trie import Limits, grow
from polydraft.models.bundled import bundled_folder
from polydraft.ngrams import GRAM_CACHES, GramMemory, GramOptions
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import save_trie
from polydraft.train.corpus_cache import blocks_of

VOCABULARY = 49_152
CONTEXTS = (512, 4096)
ROUNDS, ROUND_TOKENS = 200, 3
LIMITS = Limits(nodes=20, depth=12, width=8, least=0.04)  # as a drafter has on a CPU


def made_up(seed: int, size: int) -> list[int]:
    """Text whose tokens are Zipf-distributed, and in which a quarter comes again."""
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < size:
        text += [min(int(draw.paretovariate(0.6)), VOCABULARY) - 1 for _ in range(draw.randint(4, 24))]
        start = draw.randrange(len(text))
        text += text[start : start + draw.randint(2, 8)]
    return text[:size]


def tokens_of(file: Path, size: int) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer, tokens = AutoTokenizer.from_pretrained(bundled_folder()), []
    for block in blocks_of(file):
        tokens += tokenizer(block, verbose=False)["input_ids"]
        if len(tokens) >= size:
            break
    return tokens[:size]


def count_corpus(file: Path) -> Path:
    with GramCounter(VOCABULARY) as counter:
        for seed in range(20):
            counter.add(made_up(1000 + seed, 20_000))
            counter.end_text()
        save_trie(counter.count("0" * 16, max_bytes=3_000_000), file)
    return file


def timed(work: Callable[[], object]) -> float:
    start = time.thread_time()  # not the time that other programs had the core
    work()
    return (time.thread_time() - start) * 1e6


def measure(memory: GramMemory, text: list[int], context: int) -> list[float]:
    """Microseconds: reading a prompt, a round's tokens, proposing; then the worst of the last two."""
    prompt = [timed(lambda: (memory.reset(), memory.read(text[:context]))) for _ in range(5)]
    reads, proposals = [], []
    for number in range(ROUNDS):
        start = context + number * ROUND_TOKENS
        tokens = text[start : start + ROUND_TOKENS]
        reads.append(timed(lambda tokens=tokens: memory.read(tokens)))
        proposals.append(timed(lambda: grow(0, [""], [memory], LIMITS)))
    worst = [sorted(times)[int(0.99 * len(times))] for times in (reads, proposals)]
    return [min(prompt), statistics.median(reads), statistics.median(proposals), *worst]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--corpus", type=Path, default=None)
    arguments = parser.parse_args()
    size = max(CONTEXTS) + ROUNDS * ROUND_TOKENS
    text = tokens_of(arguments.text, size) if arguments.text else made_up(0, size)
    with tempfile.TemporaryDirectory() as folder:
        options = GramOptions(corpus=arguments.corpus or count_corpus(Path(folder) / "corpus.grams"))
        print(f"tries of {LIMITS.nodes} candidates, {ROUND_TOKENS} tokens per round; µs")
        print(f"{'cache':<10}{'context':>8}{'prompt':>10}{'read':>8}{'propose':>9}{'read p99':>10}{'propose p99':>13}")
        for name in GRAM_CACHES:
            memory = GRAM_CACHES.get(name)(options).open()
            for context in CONTEXTS:
                prompt, read, propose, read_worst, propose_worst = measure(memory, text, context)
                print(
                    f"{name:<10}{context:>8}{prompt:>10.0f}{read:>8.1f}{propose:>9.1f}{read_worst:>10.1f}{propose_worst:>13.1f}"
                )


if __name__ == "__main__":
    main()
