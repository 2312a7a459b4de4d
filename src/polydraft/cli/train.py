"""`polydraft train`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.machine import DEVICE, THREADS, set_threads
from polydraft.cli.option_list import with_options
from polydraft.cli.train_corpus import command as _corpus_cache
from polydraft.cli.train_decision import command as _decision
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.train import Report

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--target", default="smollm2", show_default=True, help="Model to draft for: smollm2 (bundled), a folder, or a hub name."),
    click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the draft."),
    click.option("--vocabulary", type=int, default=0, show_default=True, help="Draft only this many frequent tokens, which is faster; 0 for all."),
    click.option("--prompts", default=None, help="File of prompts, or 'builtin', that the target answers  [default: it makes up its own]."),
    click.option("--limit", "prompt_limit", type=int, default=None, help="Use at most so many prompts."),
    click.option("--text", "texts", multiple=True, help="File of plain text to train on instead; may be given several times."),
    click.option("--tokens", type=int, default=2_000_000, show_default=True, help="Tokens of text to train on."),
    click.option("--length", type=int, default=384, show_default=True, help="Tokens of one text."),
    click.option("--steps", type=int, default=2_000, show_default=True, help="Training steps."),
    click.option("--batch-size", type=int, default=32, show_default=True, help="Texts a step."),
    click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Peak learning rate."),
    click.option("--loss", default="kl", show_default=True, help="kl, tv (total variation) or kl+tv, on the target's full law."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same draft (on the same machine)."),
    click.option("--save-every", type=int, default=200, show_default=True, help="Steps between checkpoints."),
    click.option("--evaluate-every", type=int, default=100, show_default=True, help="Steps between measurements of acceptance."),
    click.option("--sampling-rows", type=int, default=256, show_default=True, help="Texts that the target writes side by side."),
    click.option("--resume", is_flag=True, help="Go on with an interrupted training in --out."),
    DEVICE,
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16."),
    THREADS,
]  # fmt: skip


_shared = with_options(_OPTIONS)


@click.group("train", short_help="Train a draft for your target.")
def command() -> None:
    """Train a draft for a target, from text that the target writes itself.

    'draft' distils a small language model; 'head' trains one layer on the target's hidden states, which learns faster and
    accepts more, but serves that one target only. Both are loaded with --draft FOLDER. 'decision' trains a small model that ends
    drafting early, for --decision FOLDER. 'corpus-cache' counts n-grams for drafting without a model.
    """


command.add_command(_corpus_cache)
command.add_command(_decision)


@command.command("draft")
@_shared
@click.option("--layers", type=int, default=3, show_default=True, help="Layers of the draft.")
@click.option("--width", type=int, default=256, show_default=True, help="Hidden size of the draft, a multiple of 32.")
def draft(layers: int, width: int, **options: Any) -> None:
    """Distil a small causal language model with the target's tokenizer."""
    from polydraft.train import DraftSize

    _train(DraftSize(layers=layers, width=width), options)


@command.command("head")
@_shared
@click.option("--mlp", "mlp_size", type=int, default=0, show_default=True, help="Width of the head's MLP; 0 for the target's.")
@click.option(
    "--taps",
    default=None,
    help="Layers of the target to read besides the last, such as 8,15,23; 'none' for none  [default: at 1/4, 1/2 and 3/4].",
)
@click.option("--rollouts", type=int, default=4, show_default=True, help="Depths to train at, all but the first on the head's own outputs.")  # fmt: skip
def head(mlp_size: int, taps: str | None, rollouts: int, **options: Any) -> None:
    """Train a feature head, in the manner of EAGLE, on the target's hidden states."""
    from polydraft.train import HeadSize

    _train(HeadSize(mlp_size=mlp_size, taps=_layers(taps), rollouts=rollouts), options)


def _layers(taps: str | None) -> tuple[int, ...] | None:
    if taps is None:
        return None
    try:
        return () if taps == "none" else tuple(int(part) for part in taps.split(","))
    except ValueError:
        raise UsageError(f"--taps {taps!r} is not a list of layers; write numbers such as 8,15,23, or none") from None


def _train(size: Any, options: dict[str, Any]) -> None:
    from polydraft.cli.options import arrange_messages
    from polydraft.cli.progress import PhaseProgress
    from polydraft.models.loading import load_model
    from polydraft.models.placement import resolve_device, resolve_dtype
    from polydraft.train import TrainSettings, train

    out, resume = options.pop("out"), options.pop("resume")
    device, dtype, threads = options.pop("device"), options.pop("dtype"), options.pop("threads")
    settings: TrainSettings = TrainSettings(size=size, **options)
    settings.check()
    set_threads(threads)
    arrange_messages()
    place = resolve_device(device)
    target = load_model(settings.target, place, resolve_dtype(dtype, place))
    words = " ".join(["polydraft", *sys.argv[1:]])
    with PhaseProgress() as progress:

        def observer(report: "Report") -> None:
            progress(report.phase, report.done, report.total, _note(report))

        folder = train(settings, target, out, resume=resume, command=words, observer=observer)
    click.echo(f"draft written to {folder}; use it with: --target {settings.target} --draft {folder}")


def _note(report: "Report") -> str:
    """Say in a few words how training goes."""
    note = "" if report.loss is None else f"loss {report.loss:.3f}"
    if report.acceptance:
        note = f"{note}  held out: {report.acceptance[0]}".strip()
        if len(report.acceptance) > 1:
            note += f", depth {len(report.acceptance)}: {report.acceptance[-1].greedy_1:.2f}"
    return note
