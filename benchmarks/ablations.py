"""Parts of the recipe for heads changed one at a time: tokens per pass on the same prompts, by kind of prompt.

    python benchmarks/ablations.py --prompts-train train_prompts.jsonl.gz --prompts spec_bench.jsonl --folder build/ablations

The target writes the text once; then each variant is trained from scratch in a process of its own, by what `polydraft train
head` calls, with the same seed, steps and batches, and decodes the prompts. Variants run in order of importance, several at a
time. `--folder` keeps everything: started again, the script skips finished variants and continues with the rest. `± s.e.` is
the standard error over prompts of the difference from the default. `another seed` shows how much chance alone changes.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from polydraft.draft import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.engine.stats import TARGET
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.output import written_whole
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.train import HeadSize, TrainSettings, head_pupil, training
from polydraft.train.corpus import Corpus, make_corpus
from polydraft.trees import parse_tree

MIXED, MADE_UP, SHORT = "mixed", "made-up", "short"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SMOKE = {"tokens": 512, "length": 64, "steps": 4, "batch": 2, "limit": 4, "new_tokens": 8, "parallel": 2}


@dataclass(frozen=True)
class Variant:
    """What differs from the default recipe."""

    name: str
    settings: dict = field(default_factory=dict)
    size: dict = field(default_factory=dict)
    text: str = MIXED
    tap_norms: bool = True
    tree_phase: bool = True
    """Whether the last part of training is for a tree's candidates; depths are weighted by the tree's reach in any case."""
    draft: str | None = None
    """A head to evaluate as it is, without training."""


DEFAULT = Variant("default")
VARIANTS = (
    DEFAULT,
    Variant("another seed", settings={"seed": 1}),
    Variant("loss kl", settings={"loss": "kl"}),
    Variant("one candidate to the end", tree_phase=False),
    Variant("one depth", size={"rollouts": 1}),
    Variant("AdamW", settings={"optimizer": "adamw"}),
    Variant("made-up text only", text=MADE_UP),
    Variant("no tap norms", tap_norms=False),
    Variant("loss kl+tv", settings={"loss": "kl+tv"}),
    Variant("loss tv", settings={"loss": "tv"}),
    Variant("short texts only", settings={"prompts": None}, text=SHORT),  # without prompts the window is the shorter one too
    Variant("last layer only", size={"taps": ()}),
    Variant("12,288 tokens", settings={"vocabulary": 12_288}),
    Variant("three depths", size={"rollouts": 3}),
    Variant("MLP of twice the width", size={"mlp_size": 3072}),
    Variant("AdamW, twice the rate", settings={"optimizer": "adamw", "learning_rate": 2e-3}),
    Variant("twice the rate", settings={"learning_rate": 2e-3}),
    Variant("shipped head", draft="smollm2-head"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training_options(parser)
    parser.add_argument("--json", type=Path, help="all results  [default: ablations.json in the folder]")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"these variants: {'; '.join(names)}")
    parser.add_argument("--limit", type=int, default=60, help="prompts to measure on, as many of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=40, help="texts decoded at a time")
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--verifier", default="hybrid+block", help="scheme+walk")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--parallel", type=int, default=3, help="variants at a time")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; variants still running then are stopped")
    parser.add_argument("--variant-minutes", type=float, default=5.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(SMOKE)
    if options.child is not None:
        run_child(options)
    else:
        run_all(options)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Declare what every experiment that trains heads takes."""
    parser.add_argument("--prompts-train", default="builtin", help="prompts whose answers, by the target, heads learn from")
    parser.add_argument("--prompts", default="builtin", help="prompts to measure on")
    parser.add_argument("--folder", type=Path, required=True, help="for text, heads, logs and results")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3_200_000, help="of text to train on")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test that it runs")


# ------------------------------------------------------------------------------------------------ one process per variant


def run_all(options: argparse.Namespace) -> None:
    """Run each variant in a process of its own, and save the results as they come in."""
    deadline = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # leave no process behind
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [variant for variant in VARIANTS if options.only is None or variant.name in options.only]
    waiting = [variant.name for variant in chosen if "done" not in result_of(options, variant.name)]
    running: dict[str, tuple[subprocess.Popen, float]] = {}
    if not corpus_file(options, MIXED).exists():
        running[MIXED] = start_child(options, MIXED)
    try:
        while (running or waiting) and time.monotonic() < deadline:
            while waiting and MIXED not in running and len(running) < options.parallel:
                name = waiting.pop(0)
                running[name] = start_child(options, name)
            for name, (process, began) in list(running.items()):
                seconds = time.monotonic() - began
                if process.poll() is None and seconds < 60 * options.variant_minutes:
                    continue
                stop(process)
                del running[name]
                print(f"{name}: {'done' if process.returncode == 0 else 'failed'} after {seconds:.0f} s", flush=True)
                if process.returncode:
                    print((place_of(options, name) / "log.txt").read_text()[-2000:], flush=True)
                    if name == MIXED:
                        raise SystemExit("the text could not be written")
                gather(options, chosen)
            time.sleep(0.2)
    finally:
        for name, (process, _) in running.items():
            stop(process)
            print(f"{name}: cut off", flush=True)
    print_table(gather(options, chosen), options)


def start_child(options: argparse.Namespace, name: str) -> tuple[subprocess.Popen, float]:
    place = place_of(options, name)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--child", name], stdout=log, stderr=log)
    return process, time.monotonic()


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def place_of(options: argparse.Namespace, name: str) -> Path:
    return options.folder / "".join(letter if letter.isalnum() else "-" for letter in name)


def result_of(options: argparse.Namespace, name: str) -> dict:
    file = place_of(options, name) / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}


def keep(file: Path, found: dict) -> None:
    with written_whole(file) as partial:
        partial.write_text(json.dumps(found, indent=1))


def gather(options: argparse.Namespace, chosen: list[Variant]) -> dict:
    """Save all results so far, those of unfinished variants included."""
    asked = {key: str(value) for key, value in vars(options).items() if key not in ("folder", "json", "child")}
    results = {variant.name: found for variant in chosen if (found := result_of(options, variant.name))}
    keep(options.json or options.folder / "ablations.json", {"options": asked, "variants": results})
    return results


# ------------------------------------------------------------------------------------------------------------ in a process


def run_child(options: argparse.Namespace) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // options.parallel, 1))
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.child == MIXED:
        read_corpus(options, MIXED, load_model(options.target, device, dtype, invariant=False))
        return
    variant = next(variant for variant in VARIANTS if variant.name == options.child)
    place = place_of(options, variant.name)
    found: dict = {}
    draft = variant.draft
    if draft is None:
        start = time.perf_counter()
        found["held_out"] = train_variant(variant, place / "head", options, device, dtype)
        found["training_seconds"] = time.perf_counter() - start
        keep(place / "result.json", found)
        draft = str(place / "head")
    start = time.perf_counter()
    with torch.no_grad():
        target = load_model(options.target, device, dtype)
        head = load_draft(draft, target)
        prompts = balanced(options)
        for temperature in options.temperatures:
            found[f"T={temperature:g}"] = evaluate(target, head, prompts, temperature, options)
            keep(place / "result.json", found)
    found["evaluation_seconds"] = time.perf_counter() - start
    found["done"] = True
    keep(place / "result.json", found)
    shutil.rmtree(place / "head" / "training", ignore_errors=True)


def settings_for(options: argparse.Namespace, variant: Variant = DEFAULT) -> TrainSettings:
    usual = {
        "target": options.target,
        "prompts": options.prompts_train,
        "prompt_limit": max(int(0.75 * options.tokens / options.length), 1),  # so that each kind has its share
        "tokens": options.tokens,
        "length": options.length,
        "steps": options.steps,
        "batch_size": options.batch,
        "save_every": 50,
        "sampling_rows": 2048,
    }
    return TrainSettings(size=HeadSize(**{"tree": options.tree, **variant.size}), **{**usual, **variant.settings})


def corpus_file(options: argparse.Namespace, name: str) -> Path:
    return options.folder / f"{name}.safetensors"


def read_corpus(options: argparse.Namespace, name: str, target) -> Corpus:
    """Read a corpus from the folder; make it if it is missing."""
    file = corpus_file(options, name)
    if not file.exists():
        settings, start = settings_for(options), time.perf_counter()
        if name == SHORT:
            mixed = Corpus.load(corpus_file(options, MIXED))
            corpus = Corpus(mixed.groups[:1], mixed.source)
        else:
            asked = settings if name == MIXED else replace(settings, prompts=None)
            corpus = make_corpus(asked, target)
        file.parent.mkdir(parents=True, exist_ok=True)
        corpus.save(file)
        seconds = time.perf_counter() - start
        groups = ", ".join(f"{len(group.tokens_NL)} of {group.tokens_NL.shape[1]}" for group in corpus.groups)
        print(f"{name}: {corpus.num_tokens:,} tokens, {groups}, in {seconds:.0f} s: {corpus.source}", flush=True)
    return Corpus.load(file)


def train_variant(variant: Variant, out: Path, options: argparse.Namespace, device, dtype) -> list[dict]:
    """Train a head as the command line does, on an existing corpus; return its acceptance on held-out text."""
    target = load_model(options.target, device, dtype, invariant=False)
    corpus = read_corpus(options, variant.text, target)
    if not (out / "training" / "corpus.safetensors").exists():
        (out / "training").mkdir(parents=True, exist_ok=True)
        corpus.save(out / "training" / "corpus.safetensors")
    if not variant.tree_phase:
        training._LAST_PHASE = 1.0
    if not variant.tap_norms:
        shape_for = head_pupil.shape_for
        head_pupil.shape_for = lambda *arguments: replace(shape_for(*arguments), tap_norm=TapNorm.NONE)

    def observer(report: training.Report) -> None:
        if report.phase == "training":
            shown = f"loss {report.loss:.4f}" if report.loss is not None else ""
            print(f"step {report.done}: {shown}  {report.acceptance[0] if report.acceptance else ''}", flush=True)

    training.train(
        settings_for(options, variant), target, out, resume=True, command="benchmarks/ablations.py", observer=observer
    )
    return json.loads((out / "config.json").read_text())["acceptance"]


def balanced(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return equally many prompts of each kind; all of MT-bench is one kind."""
    kinds: dict[str, list[str]] = {}
    for prompt in load_prompts(options.prompts, 10**9):  # with a limit they come in turn, one of each category
        kinds.setdefault("MT-bench" if prompt.category in MT_BENCH else prompt.category, []).append(prompt.text)
    if options.smoke:
        kinds = dict(list(kinds.items())[:2])
    most = max(options.limit // len(kinds), 1)
    return {kind: texts[:most] for kind, texts in kinds.items()}


def evaluate(target, head, prompts: dict[str, list[str]], temperature: float, options: argparse.Namespace) -> dict:
    scheme, walk = options.verifier.split("+")
    parts = Parts(draft=head, topology=parse_tree(options.tree), scheme=scheme)
    ends = target.eos_token_ids
    decoder = Decoder(target.model, make_drafter(parts), tokenizer=target.tokenizer, eos_token_ids=ends, walk=walk)
    kinds, single = {}, []
    for number, (kind, texts) in enumerate(prompts.items()):
        total = SimpleNamespace(tokens=0, passes=0)
        for first in range(0, len(texts), options.rows):
            results = decoder.generate(
                texts[first : first + options.rows],
                sampling=SamplingParams(temperature=temperature),
                max_new_tokens=options.new_tokens,
                seed=1000 * number + first,
                chat=True,
            )
            stats = results[0].stats  # of the whole batch
            total.tokens, total.passes = total.tokens + stats.block_tokens, total.passes + stats.passes
            # A round ends with a token of the target's own, unless the text ended within it.
            single += [
                (len(result.sources), result.sources.count(TARGET) + (result.sources[-1] != TARGET)) for result in results
            ]
        kinds[kind] = {"tokens": total.tokens, "passes": total.passes, "tau": total.tokens / total.passes}
    tokens, passes = (sum(found[key] for found in kinds.values()) for key in ("tokens", "passes"))
    return {"tau": tokens / passes, "kinds": kinds, "prompts": single}


# -------------------------------------------------------------------------------------------------------------- the table


def print_table(results: dict, options: argparse.Namespace) -> None:
    heads = [f"T={temperature:g}" for temperature in options.temperatures]
    kinds = list(next((found[head]["kinds"] for found in results.values() for head in heads if head in found), {}))
    print(f"\n{options.steps} steps of {options.batch} texts; tokens per pass, tree {options.tree}, {options.verifier}")
    columns = ["variant", *(f"{head} | difference ± s.e." for head in heads), *kinds, "held out α@1"]
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * (len(columns) + len(heads)))
    default = results.get(DEFAULT.name, {})
    for name, found in results.items():
        cells = [name]
        for head in heads:
            cells += [f"{found[head]['tau']:.3f}", difference(found[head], default.get(head))] if head in found else ["", ""]
        for kind in kinds:
            cells.append(" / ".join(f"{found[head]['kinds'][kind]['tau']:.2f}" for head in heads if head in found))
        level = found.get("held_out", [None])[0]
        cells.append(f"{level['greedy_1']:.3f} / {level['sampled_1']:.3f}" if level else "")
        print(f"| {' | '.join(cells)} |")
    print(f"Kinds: {' / '.join(heads)}.")


def difference(found: dict, default: dict | None) -> str:
    if default is None or found is default:
        return ""
    spread = [ours - theirs for ours, theirs in zip(residuals(found), residuals(default), strict=True)]
    error = math.sqrt(sum(one**2 for one in spread)) / len(spread)
    return f"{found['tau'] - default['tau']:+.3f} ± {error:.3f}"


def residuals(found: dict) -> list[float]:
    """Return how much each prompt moves the ratio of tokens to passes, times the number of prompts."""
    tokens, passes = (sum(pair[place] for pair in found["prompts"]) for place in (0, 1))
    mean = passes / len(found["prompts"])
    return [(own - tokens / passes * rounds) / mean for own, rounds in found["prompts"]]


if __name__ == "__main__":
    main()
