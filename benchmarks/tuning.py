"""How well `polydraft tune` predicts: what it expects of some twenty settings against what they give, and what its pick costs.

python benchmarks/tuning.py --json tuning.json                                  # 7B's shape; some 20 minutes on an H200
python benchmarks/tuning.py --target smollm2 --batches 1 8 --prompts FILE       # the bundled model, on any machine

One `Tuning` per temperature, as `polydraft tune --batches 1,8,32` makes it, picks and predicts. Then all its settings, and
some that it has no figures for, write the same prompts, a few at a time beside plain decoding, in turns and warm.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from polydraft.defaults import default_draft
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.options import AUTO
from polydraft.tune import tuning as tuning_module
from polydraft.tune.options import TuneOptions
from polydraft.tune.rounds import Use
from polydraft.tune.tuning import Choice, Tuning

SHAPES = (
    *((1,) * depth for depth in range(1, 6)),
    (2, 1),
    (2, 2),
    (4, 1),
    (2, 1, 1, 1),
    (4, 2, 1),
    (3, 2, 1, 1, 1),
    (2, 2, 2, 1),
    (4, 2, 2, 1, 1),
)
"""Chains and static trees that are rated beside those that tuning finds by itself."""
UNRATED = {
    "cuda": ("dynamic:64:7:fixed/load:4x2x1x1x1", "dynamic:32:6:fixed/load:4x2x1x1x1", "load:4x2x2x1x1"),
    "cpu": ("dynamic:16", "load:4x2x1"),
}
"""Defaults and trees that follow the load: run only."""
TOGETHER = 4
"""Settings that take turns beside plain decoding: each has memories of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="inflated:7b")
    parser.add_argument("--draft", default=AUTO)
    parser.add_argument("--device", default=AUTO)
    parser.add_argument("--dtype", default=AUTO)
    parser.add_argument("--prompts", default="builtin", help="a file; the built-in ones otherwise")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--settings", type=int, help="measure so many at most, spread over all")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing new after that")
    parser.add_argument("--json", type=Path, help="write the figures here, as they come")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    tuning_module._LISTED = SHAPES
    place = resolve_device(options.device)
    number_format = resolve_dtype(options.dtype, place)
    loaded = load_model(options.target, place, number_format)
    draft = load_draft(default_draft(options.target) if options.draft == AUTO else options.draft, loaded)
    figures: dict[str, Any] = {"target": options.target, "device": str(place), "dtype": str(number_format), "uses": []}
    if place.type == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
    for temperature in options.temperatures:
        asked = TuneOptions(
            target=options.target,
            draft=options.draft,
            device=options.device,
            dtype=options.dtype,
            source=options.prompts,
            limit=options.limit,
            raw=options.raw,
            temperatures=(temperature,),
            batches=tuple(options.batches),
            max_new_tokens=options.max_new_tokens,
        )
        start = time.monotonic()
        tuning = Tuning(asked, loaded=loaded, draft=draft)
        picks = tuning.run()
        tuned = time.monotonic() - start
        print(f"T={temperature:g}: tuning took {tuned:.0f} s", flush=True)
        for batch, pick in zip(options.batches, picks, strict=True):
            use: dict[str, Any] = {"temperature": temperature, "batch": batch, "tuning_seconds": tuned}
            use["pick"] = {"tree": pick.tree, "drafter": pick.drafter, "expected": pick.expected, "measured": pick.measured}
            use["rows"] = []
            figures["uses"].append(use)
            measure(tuning, use, options, until, lambda: written(options.json, figures))
            judged(use)
            written(options.json, figures)
    overall(figures)
    written(options.json, figures)


def written(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))


def measure(tuning: Tuning, use: dict[str, Any], options: argparse.Namespace, until: float, keep: Any) -> None:
    """Run all settings at one batch, and put down what was expected of them."""
    batch, temperature = use["batch"], use["temperature"]
    choices: list[Choice | None] = [one for one in tuning.choices if one.kind != "plain"]
    settings = [(one.tree, one.drafter, one) for one in choices if one is not None]
    if tuning._draft is not None:
        settings += [(tree, AUTO, None) for tree in UNRATED[tuning._place.type] if batch > 1 or "load:" not in tree]
    if options.settings is not None and len(settings) > options.settings:
        picked = use["pick"]["tree"], use["pick"]["drafter"]
        step = len(settings) / options.settings
        kept = {int(number * step) for number in range(options.settings)}
        settings = [one for number, one in enumerate(settings) if number in kept or one[:2] == picked]
    asked = Use(temperature=temperature, max_new_tokens=options.max_new_tokens, seed=options.limit)
    for first in range(0, len(settings), TOGETHER):
        group = settings[first : first + TOGETHER]
        if time.monotonic() > until:
            use["cut off"] = True
            print("no time left", flush=True)
            return
        try:
            decoders = [tuning._decoder("none"), *(tuning._decoder(tree, drafter) for tree, drafter, _ in group)]
            plain, *runs = (run.rounds() for run in tuning._turns(decoders, asked, batch, "measured"))
        # One setting that has no room, or fails, is no reason to lose the others.
        except Exception as error:
            print(f"T={temperature:g} batch {batch} {[one[0] for one in group]}: {error!r}", file=sys.stderr, flush=True)
            use.setdefault("failed", []).append([[one[0] for one in group], repr(error)])
            continue
        finally:
            decoders = []
            gc.collect()
            if tuning._place.type == "cuda":
                torch.cuda.empty_cache()
        for (tree, drafter, choice), run in zip(group, runs, strict=True):
            measured = run.rate / plain.rate
            row = {
                "kind": "unrated" if choice is None else choice.kind,
                "name": tree if choice is None else choice.name,
                "tree": tree,
                "drafter": drafter,
                "expected": None if choice is None else choice.expected[batch],
                "measured": measured,
                "tokens_expected": None if choice is None else choice.tokens,
                "tokens_measured": run.tokens,
                "ms_per_round": 1e3 * run.seconds,
                "plain_ms": 1e3 * plain.seconds,
                "tokens_per_second": run.rate,
            }
            told = "      -        -  "
            if choice is not None:
                row["error"] = choice.expected[batch] / measured - 1
                told = f"{choice.expected[batch]:7.3f}x {100 * row['error']:+7.1f} %"
            use["rows"].append(row)
            print(
                f"T={temperature:g} batch {batch:2} {row['kind']:12} {row['name']:26} measured {measured:6.3f}x, expected "
                f"{told}  {run.tokens:5.2f} tokens/pass, {1e3 * run.seconds:7.2f} ms/round, plain {1e3 * plain.seconds:7.2f}",
                flush=True,
            )
        keep()


def judged(use: dict[str, Any]) -> None:
    """Say how far predictions were off, and how far the pick is from the best that was measured."""
    rows = use["rows"]
    errors = [abs(row["error"]) for row in rows if "error" in row]
    static = [abs(row["error"]) for row in rows if row["kind"] in ("chain", "static tree")]
    if not errors:
        return
    use["median_error"] = statistics.median(errors)
    use["median_error_static"] = statistics.median(static) if static else None
    rates = {(row["tree"], row["drafter"]): row["measured"] for row in rows} | {("none", AUTO): 1.0}
    best = max(rates, key=lambda one: rates[one])
    picked = use["pick"]["tree"], use["pick"]["drafter"]
    use["best"] = {"tree": best[0], "drafter": best[1], "measured": rates[best]}
    use["behind_best"] = None if picked not in rates else 1 - rates[picked] / rates[best]
    behind = "was not measured" if picked not in rates else f"{rates[picked]:.3f}x, {100 * use['behind_best']:.1f} % behind"
    print(
        f"T={use['temperature']:g} batch {use['batch']}: median error {100 * use['median_error']:.1f} % of {len(errors)} "
        f"settings (aim 10); pick {picked[0]} {picked[1]} {behind} the best of {len(rows) + 1}, {best[0]} {best[1]} "
        f"{rates[best]:.3f}x (aim 3)\n",
        flush=True,
    )


def overall(figures: dict[str, Any]) -> None:
    errors = [abs(row["error"]) for use in figures["uses"] for row in use["rows"] if "error" in row]
    behind = [use["behind_best"] for use in figures["uses"] if use.get("behind_best") is not None]
    if not errors or not behind:
        return
    figures["median_error"], figures["behind_best"] = statistics.median(errors), behind
    print(
        f"all: median error {100 * statistics.median(errors):.1f} % of {len(errors)} settings; picks behind the best by "
        f"{', '.join(f'{100 * one:.1f}' for one in behind)} %",
        flush=True,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
