"""How much the benchmark harness adds: the `ar` arm inside it against the engine called directly, alternating.

python benchmarks/harness.py
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from polydraft.engine import Decoder
from polydraft.lab.bench.options import BenchOptions
from polydraft.lab.bench.session import BenchSession

REPEAT = 8


def main() -> None:
    options = BenchOptions(methods=("ar",), limit=1, max_new_tokens=48, threads=2)
    session = BenchSession(options)
    prompt, token_ids = session.prompts[0]
    decoder = Decoder(session.loaded.model, eos_token_ids=session.loaded.eos_token_ids)
    inside, direct = [], []
    for turn in range(REPEAT + 1):
        with tempfile.TemporaryDirectory() as folder:
            results = session.run(Path(folder), resume=False, command=[], progress=lambda _: None)
        start = time.perf_counter()
        result = decoder.generate(token_ids, sampling=session.bench.params, max_new_tokens=options.max_new_tokens, seed=0)
        seconds = time.perf_counter() - start
        if turn:
            inside.append(1 / results["methods"]["ar"]["tokens_per_second"])
            direct.append(seconds / len(result.token_ids))
    ratio = statistics.median(one / other for one, other in zip(inside, direct, strict=True))
    print(json.dumps({"prompt": prompt.id, "repeats": REPEAT, "harness / direct, median time per token": round(ratio, 4)}))


if __name__ == "__main__":
    main()
