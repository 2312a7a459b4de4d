"""`polydraft bench`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.bench.options import BenchOptions, method_options
from polydraft.bench.serving import ServingLoad
from polydraft.cli.options import in_range, options_of, prepare
from polydraft.errors import FailureError, UsageError

if TYPE_CHECKING:
    from polydraft.bench.session import BenchSession

_BEHIND = (
    f"Options behind a method, as in mcsd:4x2x1,walk=node: {', '.join(one.short for one in method_options(grams=True))}; "
    "what they mean: polydraft generate --help. Static trees have attention=flat too."
)


@click.group("bench", invoke_without_command=True, epilog=_BEHIND)
@options_of(
    BenchOptions,
    source={"flag": "--prompts"},
    shard={"metavar": "I/N"},
    methods={"type": str, "multiple": False, "default": "ar sd:5 mcsd:4x2x1 hf", "show_default": True},
    threads={"callback": in_range},
)
@click.option(
    "--reproduce",
    default=None,
    help="Measure papers again: mcsd, optimal, self-draft, improved, dsbd, several with commas, or all. --prompts may be a "
    "folder of prompt sets.",
)
@click.option(
    "--size",
    type=click.Choice(["smoke", "page"]),
    default="smoke",
    show_default=True,
    help="How much --reproduce measures: a try, or what docs/papers shows.",
)
@click.option(
    "--untimed",
    is_flag=True,
    help="Leave out what is timed, so that several --reproduce can share a machine; --resume adds it.",
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder for results.json and report.html.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run in --out.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Measure methods on the same prompts, arms interleaved in one process, against plain decoding (ar).

    Methods: ar, sd:LENGTH, mcsd:TREE, fork:WIDTHxDEPTH, dynamic:NODES[:DEPTH]; without a draft: self-draft:NUMBERxLENGTH,
    ngram, lookup, suffix, corpus; combinations such as lookup+mcsd:4x2x1; target-init:WIDTHxDEPTH, which is lossy; beams:
    beam:W, beam-search:W, dsbd:W,width=..,depth=..,threshold=.. (see docs/beams.md); peers: hf, hf-assisted, hf-lookup,
    hf-compiled, hf-beam:W, llama.cpp, llama.cpp,lib=PATH (a build of your own), xllamacpp. At temperature 0 all texts but
    those of lossy methods, beams and llama.cpp are checked against ar's while measuring.

    A long run can be shared: N processes, each with --shard I/N, its own --out and its own cores (taskset), all other options
    alike; then `polydraft bench merge OUT DIR...`.
    """
    if context.invoked_subcommand is None:
        given = {name for name in options if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
        _bench(given, **options)


@command.command("diff", short_help="Say what changed between two results.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def diff(before: Path, after: Path) -> None:
    """Say what changed beyond noise between two results (folders or results.json files)."""
    from polydraft.bench.diff import compare, format_diff, load_results

    click.echo(format_diff(compare(load_results(before), load_results(after))))


@command.command("serve", short_help="Measure a server under load.")
@options_of(ServingLoad)
@click.option("--prompts", "source", default="builtin", show_default=True, help="Prompt file, dataset, or our own prompts.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="File for the figures, as JSON; a page beside it.")
def serve(source: str, out: Path | None, **options: Any) -> None:
    """Measure a running server: time to the first token, between tokens and in all, throughput, and goodput under limits.

    Arms run one after the other, on the same prompts and arrivals. transformers and llama.cpp start a peer's server for its
    turn; any other server is measured by its --url with --arms as-is.
    """
    from polydraft.bench.report.serving import render_load
    from polydraft.bench.serving import format_load, run_load
    from polydraft.output import write_text
    from polydraft.prompts import load_prompts

    load = ServingLoad(**options)
    prompts = [prompt.text for prompt in load_prompts(source, load.requests)]
    found = run_load(load, prompts, lambda arm, done: click.echo(f"\r{arm}: {done} of {load.requests}", err=True, nl=False))
    click.echo(err=True)
    for arm in found:
        click.echo(format_load(arm))
    if out is not None:
        measured = {"options": {**vars(load), "api_key": None}, "arms": found}
        write_text(out, json.dumps(measured, indent=1) + "\n")
        write_text(out.with_suffix(".html"), render_load(measured))
    for arm in found:
        if arm["errors"] == arm["requests"]:
            raise FailureError(f"arm {arm['arm']} gave no answer ({arm['first_error']}); the others' figures stand above")


@command.command("merge", short_help="Join the shards of one run.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--reproduce", default=None, help="The shards were measured with --reproduce PAPER: write its tables too.")
def merge(out: Path, folders: tuple[Path, ...], reproduce: str | None) -> None:
    """Join the shards in the folders DIR into one benchmark in the new folder OUT, with the statistics of their union.

    All N shards must be there, finished, and begun with equal settings on the same machine.
    """
    from polydraft.bench.reproduction import merge_reproduction
    from polydraft.bench.shards import merge_shards

    if reproduce is None:
        _show(merge_shards(out, folders, _command_line()), out)
        return
    _show_reproduction(merge_reproduction(reproduce, out, folders, _command_line()), out)


def _bench(given: set[str], **options: Any) -> None:
    prepare(options["threads"])
    paper: str | None = options.pop("reproduce")
    size: str = options.pop("size")
    untimed: bool = options.pop("untimed")
    out: Path | None = options.pop("out")
    resume: bool = options.pop("resume")
    if out is None:
        raise UsageError("--out is missing; name a folder for results.json and report.html")
    if paper is not None:
        _reproduce(paper, size, given, options, out, resume=resume, untimed=untimed)
        return
    from polydraft.bench.session import BenchSession
    from polydraft.output import check_folder

    chosen = BenchOptions(**{**options, "methods": tuple(options["methods"].split())})
    check_folder(out, resume=resume)
    _show(_run(BenchSession(chosen), out, resume), out)


def _reproduce(
    names: str, size: str, given: set[str], options: dict[str, Any], out: Path, *, resume: bool, untimed: bool
) -> None:
    """Measure papers again, several in folders of their own, with models that are loaded once."""
    from polydraft.bench.reproduction import Reproduction
    from polydraft.bench.session import Models
    from polydraft.papers import PAPERS

    chosen, models = PAPERS.names() if names == "all" else names.split(","), Models()
    places = {name: out / name if len(chosen) > 1 else out for name in chosen}
    papers = [Reproduction(name, size, options, given, models) for name in chosen]
    for paper in papers:
        paper.check(places[paper.name], resume=resume)
    found = {}
    for paper in papers:
        place = places[paper.name]
        found[paper.name] = paper.run(place, lambda session, folder: _run(session, folder, resume), untimed=untimed)
    for name, results in found.items():
        _show_reproduction(results, places[name])


def _run(session: "BenchSession", out: Path, resume: bool) -> dict[str, Any]:
    """Measure once."""
    with _Progress(session.runner.total) as progress:
        try:
            return session.run(out, resume=resume, command=_command_line(), progress=progress)
        except KeyboardInterrupt:
            click.echo(f"interrupted; what was measured is kept: add --resume to go on in {out}", err=True)
            raise


def _command_line() -> list[str]:
    return ["polydraft", *sys.argv[1:]]


def _show(results: dict[str, Any], out: Path) -> None:
    """Print the table; a wrong text or a failed method ends in an error, once everything is written."""
    from polydraft.cli.terminal import output_console, results_table

    output_console().print(results_table(results))
    click.echo(f"{out / 'results.json'} and {out / 'report.html'} written")
    differing = [name for name, figures in results["methods"].items() if figures["differences"]]
    if differing:
        raise FailureError(f"greedy texts of {', '.join(differing)} differ from ar's other than at near-ties; see {out}")
    failed = {name: figures["error"] for name, figures in results["methods"].items() if figures["status"] != "ok"}
    if failed:
        reason = next(iter(failed.values()))
        raise FailureError(f"methods failed: {', '.join(failed)} ({reason}); the others' results are in {out}")


def _show_reproduction(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Print a paper's tables, whatever failed, and then say what did."""
    from polydraft.papers import FILE

    click.echo((out / FILE).read_text(encoding="utf-8"))
    click.echo(f"{out / FILE} written")
    for name, one in results.items():
        _show(one, out / name)


class _Progress:
    """A bar with time left on a terminal; a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._total, self._count = total, 0
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
            disable=self._plain,
        )  # fmt: skip
        self._task = self._bar.add_task("measuring", total=total)

    def __enter__(self) -> "_Progress":
        self._bar.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._bar.__exit__(*details)

    def __call__(self, measurement: Any) -> None:
        self._count += 1
        self._bar.update(self._task, advance=1, description=measurement.method if measurement else "measuring")
        if self._plain and (self._count % max(self._total // 20, 1) == 0 or self._count == self._total):
            click.echo(json.dumps({"measured": self._count, "of": self._total}), err=True)
