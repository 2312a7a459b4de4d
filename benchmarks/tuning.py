"""How much `polydraft tune` loses by trying few trees: its pick against that of a contest among many more.

python benchmarks/tuning.py --json tuning.json                                         # the bundled model, on any machine
python benchmarks/tuning.py --target inflated:7b --temperatures 0 1 --batch-sizes 1 8 32   # 7B's shape, on a GPU

Three contests for each temperature and batch size: the usual candidates, the usual and many others, and the two winners alone,
beside plain decoding. The last one says how far the usual pick is behind.
"""

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

from polydraft.options import AUTO
from polydraft.tune import TuneOptions
from polydraft.tune.contest import Candidate
from polydraft.tune.tuning import Result, Tuning, Use

OTHERS = (
    *("chain:1", "chain:3", "chain:5", "chain:7"),
    *("2x1", "2x2", "4x1", "3x2", "2x2x2", "4x4"),
    *("2x1x1x1", "3x1x1x1", "2x2x1x1", "2x2x2x1", "4x2x1x1x1", "3x2x1x1x1", "6x3x2x1x1"),
    *("best:16x4", "best:32x6", "best:64x6"),
)
"""Trees that `tune` does not try."""


class Contest(Tuning):
    """A contest of chosen trees beside plain decoding."""

    def __init__(self, options: TuneOptions, chosen: list[Candidate], usual: bool) -> None:
        super().__init__(options)
        self._chosen, self._usual = chosen, usual

    def candidates(self, use: Use) -> list[Candidate]:
        plain, *usual = super().candidates(use)
        entered = {one.name: one for one in (*(usual if self._usual else ()), *self._chosen)}
        return [plain, *entered.values()]


def again(result: Result) -> Candidate:
    """Return what was picked, as a candidate that has run no lap."""
    return Candidate(result.name, result.tree, result.drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default=AUTO)
    parser.add_argument("--device", default=AUTO)
    parser.add_argument("--dtype", default=AUTO)
    parser.add_argument("--prompts", default="builtin", help="a file; the built-in ones otherwise")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each contest")
    parser.add_argument("--json", type=Path, help="write the figures here, as they come")
    given = vars(parser.parse_args())
    file, temperatures, sizes = given.pop("json"), given.pop("temperatures"), given.pop("batch_sizes")
    given["source"] = given.pop("prompts")
    figures = []
    for temperature in temperatures:
        for size in sizes:
            options = TuneOptions(**given, temperatures=(temperature,), batch_sizes=(size,))
            (usual,) = Tuning(options).run()
            (best,) = Contest(options, [Candidate(tree, tree) for tree in OTHERS], usual=True).run()
            winners = {one.name: again(one) for one in (usual, best) if one.tree != "none" or one.drafter != AUTO}
            duel = Contest(options, list(winners.values()), usual=False)
            duel.run()
            rates = {(one.tree, one.drafter): one for one in duel.results}
            own, other = (rates[one.tree, one.drafter] for one in (usual, best))
            behind = 1 - own.speedup / other.speedup
            print(
                f"T={temperature:g} batch size {size}: {own.name} {own.speedup:.3f}x ({own.low:.3f}-{own.high:.3f}), best of "
                f"many {other.name} {other.speedup:.3f}x ({other.low:.3f}-{other.high:.3f}): {100 * behind:.1f} % behind",
                flush=True,
            )
            figures.append({"pick": asdict(own), "best": asdict(other), "behind": behind})
            if file is not None:
                file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
