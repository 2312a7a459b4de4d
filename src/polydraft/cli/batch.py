"""`polydraft batch`."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from polydraft.batch.files import BatchOptions, PromptFile, ResultFile, Results, Totals, WorkerOptions
from polydraft.cli.options import Choices, GroupedCommand, needing, options_of, prepare, raw_option, shared_options, taken
from polydraft.cli.terminal import PhaseProgress, announce_start
from polydraft.errors import FailureError

_MOST_NAMED = 8
"""Bad rows that the error at the end names."""


@click.command("batch", cls=GroupedCommand)
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the results, one JSON object per line.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --out.")
@raw_option
@click.option("--json", "as_json", is_flag=True, help="Print the totals as one JSON object.")
@options_of(BatchOptions)
@options_of(WorkerOptions)
@shared_options
def command(prompts: Path, out: Path, resume: bool, raw: bool, as_json: bool, **options: Any) -> None:
    """Generate text for every row of the file PROMPTS.

    Rows are JSON lines (with a prompt, with messages, or in another known format), or plain text with one prompt per line.
    When a text ends, the next row takes its slot. Results have the order of the rows, each with its row number. A row that
    cannot be used gets an error as its result and does not stop the others. After an interruption, --resume continues after
    the last result; every row has its own seed, so its text stays the same. With --ray, workers on a cluster share the rows.
    """
    announce_start()
    from polydraft.batch.runner import BatchTask, generate_rows, write_all
    from polydraft.engine.stats import rest_line
    from polydraft.models.placement import TENSOR_PARALLEL, agreed, is_follower

    settings, workers = taken(BatchOptions, options), taken(WorkerOptions, options)
    choices = Choices(**options)
    sampling = choices.check()
    source = PromptFile(prompts, settings.max_row_bytes)
    names = ("target", "draft", "tree", "drafter", "scheme", "walk", "dtype")
    asked = {name: getattr(choices, name) for name in names}
    task = BatchTask(sampling=sampling, max_new_tokens=choices.max_new_tokens, seed=choices.seed, stop=choices.stop, raw=raw)
    described = {**asked, **dataclasses.asdict(task), **dataclasses.asdict(settings), "prompts": source.digest}
    follows = choices.device_map == TENSOR_PARALLEL and is_follower()
    results = Results() if follows else ResultFile(out, described, resume=resume)
    try:
        if workers.ray:
            with needing("workers need", "ray"):
                from polydraft.batch.sharing import rows_by_ray
            prepare(choices.threads)
            groups = rows_by_ray(choices.for_others("workers"), workers, source, results.last, task, settings)
        else:
            decoder = choices.decoder(batch=settings.slots)
            results.last = agreed(results.last)
            groups = generate_rows(decoder, source.rows(results.last), task, settings)
        with PhaseProgress() if not follows else nullcontext(lambda *_: None) as progress:

            def show(line: int, totals: Totals) -> None:
                bad = f", {totals.bad} bad" if totals.bad else ""
                progress("rows", line, source.lines, f"{totals.tokens_per_second:.1f} tokens/s{bad}")

            progress("rows", results.last, source.lines)
            totals = write_all(groups, results, show)
    except BaseException as error:
        results.close(quietly=True)
        if not isinstance(error, Exception):  # Ctrl-C or SIGTERM
            click.echo(f"{results.totals.rows} rows are in {out}; continue with --resume", err=True)
        raise
    results.close()
    if follows:
        return
    if as_json:
        click.echo(json.dumps(totals.figures()))
    else:
        per_pass = totals.new_tokens / totals.passes if totals.passes else 0.0
        click.echo(
            f"{totals.rows} rows, {totals.new_tokens} tokens, {totals.tokens_per_second:.1f} tokens/s, "
            f"{per_pass:.2f} tokens per target pass; in {out}",
            err=True,
        )
        if (line := rest_line(totals.resting_passes, totals.passes, totals.rested_because)) is not None:
            click.echo(line, err=True)
    if totals.bad:
        raise FailureError(f"{totals.bad} of {totals.rows} rows could not be used: {_bad_rows(out)}; their errors are in {out}")


def _bad_rows(out: Path) -> str:
    """Return the numbers of the first few bad rows."""
    numbers = []
    with out.open(encoding="utf-8") as file:
        for line in file:
            if '"error"' in line and "error" in (result := json.loads(line)):
                numbers.append(str(result["row"]))
                if len(numbers) > _MOST_NAMED:
                    return f"{', '.join(numbers[:_MOST_NAMED])}, ..."
    return ", ".join(numbers)
