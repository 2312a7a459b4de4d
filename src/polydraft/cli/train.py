"""`polydraft train`."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import machine_options, numbers, options_of, placed, with_options
from polydraft.cli.terminal import PhaseProgress, announce_start
from polydraft.errors import UsageError
from polydraft.options import PairOptions
from polydraft.output import check_empty, check_file
from polydraft.train import CorpusCacheSettings, DecisionSettings, DraftSize, HeadSize, TrainSettings

if TYPE_CHECKING:
    from polydraft.train.pupils import Acceptance
    from polydraft.train.training import Report

_DTYPES = "Number format: auto, float32 or bfloat16."
_TAPS = "Layers of the target to read besides the last, such as 8,15,23, or none  [default: of n layers, 2, n/4, n/2, 3n/4 and n-3]."
_shared = with_options([
    click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the draft."),
    options_of(TrainSettings, skip=("size",), prompt_limit={"flag": "--limit"}, texts={"flag": "--text"}),
    click.option("--resume", is_flag=True, help="Continue an interrupted training in --out."),
    machine_options(dtype={"help": _DTYPES}),
])  # fmt: skip


@click.group("train")
def command() -> None:
    """Train a draft for a target, from text that the target itself writes.

    'draft' distils a small language model. 'head' trains one layer on the target's hidden states: it learns faster and gets more
    tokens accepted, but works only with that target. Load either with --draft FOLDER. 'decision' trains a small model that
    ends drafting early; load it with --decision FOLDER. 'corpus-cache' counts n-grams for drafting without a model.
    """


@command.command("draft", short_help="Distil a small language model.")
@_shared
@options_of(DraftSize)
def draft(layers: int | None, width: int | None, **options: Any) -> None:
    """Distil a small causal language model with the target's tokenizer, or fine-tune one (--start)."""
    _train(DraftSize(layers=layers, width=width), options)


@command.command("head", short_help="Train a feature head on the target's hidden states.")
@_shared
@options_of(HeadSize, mlp_size={"flag": "--mlp"}, taps={"type": str, "multiple": False, "help": _TAPS})
def head(mlp_size: int, taps: str | None, rollouts: int, tree: str, **options: Any) -> None:
    """Train a feature head, as in EAGLE, on the target's hidden states, or fine-tune one (--start), also EAGLE-3 heads."""
    layers = None if taps is None else () if taps == "none" else numbers("--taps", taps, int, "8,15,23, or none")
    _train(HeadSize(mlp_size=mlp_size, taps=layers, rollouts=rollouts, tree=tree), options)


def _train(size: DraftSize | HeadSize, options: dict[str, Any]) -> None:
    out, resume = options.pop("out"), options.pop("resume")
    machine = {name: options.pop(name) for name in ("device", "dtype", "threads")}
    settings = TrainSettings(size=size, **options)
    announce_start()
    device, dtype = placed(**machine)

    from polydraft.models.loading import load_model
    from polydraft.train.forecast import forecast_of, needs_of
    from polydraft.train.training import begun, check_out, train, what_is_kept

    check_out(out, resume=resume)
    if resume and not begun(out):
        resume = False
        click.echo(f"{out} holds no training yet: this one starts from the beginning", err=True)
    target = load_model(settings.target, device, dtype, invariant=False)  # large batches need the fastest kernels
    words = " ".join(["polydraft", *sys.argv[1:]])
    first: Acceptance | None = None
    acceptance: tuple[Acceptance, ...] = ()
    with PhaseProgress() as progress:
        needs = None if resume else needs_of(settings, target, partial(progress, "estimating"))

        def observer(report: "Report") -> None:
            nonlocal acceptance, first, needs
            if needs is not None:
                click.echo(f"this will take {needs}", err=True)
                needs = None
            acceptance = report.acceptance or acceptance
            if report.phase == "training" and report.done == 0:
                first = report.acceptance[0]
            progress(report.phase, report.done, report.total, _note(report))

        try:
            folder = train(settings, target, out, resume=resume, command=words, observer=observer)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C or SIGTERM
                click.echo(what_is_kept(out), err=True)
            raise
    click.echo(f"draft written to {folder}")
    if settings.start is not None and first is not None:
        click.echo(f"held out, before and after: {first}; {acceptance[0]}")
    click.echo(forecast_of(str(folder), target, acceptance, size.tree if isinstance(size, HeadSize) else HeadSize().tree))
    click.echo(f'use it with: polydraft generate "Why is the sky blue?" --target {settings.target} --draft {folder}')


def _note(report: "Report") -> str:
    """Return loss and held-out acceptance in a few words."""
    note = "" if report.loss is None else f"loss {report.loss:.3f}"
    if report.acceptance:
        note = f"{note}  held out: {report.acceptance[0]}".strip()
        if len(report.acceptance) > 1:
            note += f", depth {len(report.acceptance)}: {report.acceptance[-1].greedy_1:.2f}"
    return note


@command.command("decision", short_help="Train a model that ends drafting early.")
@options_of(PairOptions)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the decision model.")
@options_of(DecisionSettings)
@machine_options(dtype={"help": _DTYPES})
def decision(target: str, draft: str, out: Path, device: str, dtype: str, threads: int | None, **options: Any) -> None:
    """Train a model that decides when to stop drafting, from real rounds of the target and its draft.

    Use it with --decision FOLDER. It works only with the draft that it was trained for.
    """
    settings = DecisionSettings(**options)
    check_empty(out)
    announce_start()

    from polydraft.defaults import default_draft
    from polydraft.models.loading import load_draft, load_model
    from polydraft.models.translation import refuse_translated
    from polydraft.train.decision_training import train_decision

    name = default_draft(target, draft)
    if name == "none":
        raise UsageError("a decision model needs a draft; pass --draft NAME, a folder, or early-exit:k")
    place = placed(device, dtype, threads)
    loaded = load_model(target, *place)
    model = load_draft(name, loaded)
    assert model is not None
    refuse_translated(model, "a decision model")
    with PhaseProgress() as progress:
        progress("traces", 0, settings.traces)
        quality = train_decision(settings, loaded, model, out, progress)
    click.echo(
        f"decision model written to {out}: AUC {quality.auc:.3f}, calibration error {quality.calibration_error:.3f} on "
        f"{quality.count} held-out tokens, {quality.accepted:.0%} of them accepted; use it with: --decision {out}"
    )


@command.command("corpus-cache", short_help="Count the n-grams of a corpus.")
@click.argument("more_texts", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File for the cache.")
@options_of(CorpusCacheSettings, texts={"flag": "--text"}, generate={"metavar": "TOKENS", "show_default": False})
@machine_options(
    device={"help": "With --generate: auto, cpu, cuda, cuda:1, ..."},
    dtype={"help": "With --generate: auto, float32 or bfloat16."},
)
def corpus_cache(
    texts: tuple[Path, ...],
    more_texts: tuple[Path, ...],
    out: Path,
    device: str,
    dtype: str,
    threads: int | None,
    **options: Any,
) -> None:
    """Count what usually follows a few tokens, for drafting from n-grams (--drafter self-draft or corpus).

    The corpus may be larger than memory. The cache works only with the tokenizer that it was made for.

    \b
    Examples:
      polydraft train corpus-cache --tokenizer smollm2 --text news.txt.gz code.txt --out my.grams
      polydraft train corpus-cache --generate 2000000 --sampling-rows 4096 --max-bytes 3000000 --out my.grams
    """  # noqa: D301 (\b keeps click from filling the lines)
    announce_start()
    settings = CorpusCacheSettings(texts=(*texts, *more_texts), **options)
    check_file(out)

    from polydraft.train.corpus_cache import make_corpus_cache

    place = placed(device, dtype, threads)
    with PhaseProgress() as progress:
        trie = make_corpus_cache(settings, out, progress, *place)
    click.echo(
        f"corpus cache written to {out}: {len(trie.tokens_N):,} n-grams of up to {len(trie.level_sizes)} tokens, of "
        f"{trie.corpus_tokens:,} tokens of text, {out.stat().st_size:,} bytes; use it with: --drafter self-draft --corpus {out}"
    )
