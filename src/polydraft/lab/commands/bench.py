"""`polydraft bench`."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from polydraft.cli.options import options_of, prepare, prompts_option
from polydraft.cli.terminal import PhaseProgress, announce_start, figures_table, output_console, sources_text
from polydraft.errors import FailureError, UsageError
from polydraft.lab.bench.options import BenchOptions, method_options
from polydraft.lab.bench.serving import ServingLoad
from polydraft.options import PairOptions

if TYPE_CHECKING:
    from polydraft.lab.bench.session import BenchSession

_PAGE = ".html"
_EPILOGUE = (
    f"Options of a method, as in mcsd:4x2x1,walk=node: {', '.join(one.short for one in method_options(grams=True))}; "
    "'polydraft generate --help' explains them. Static trees also take attention=flat."
)


@click.group("bench", invoke_without_command=True, epilog=_EPILOGUE)
@options_of(PairOptions)
@options_of(
    BenchOptions,
    skip=("target", "draft"),
    source={"flag": "--prompts"},
    shard={"metavar": "I/N"},
    methods={"type": str, "multiple": False, "default": "ar sd:5 mcsd:4x2x1 hf", "show_default": True},
)
@click.option(
    "--reproduce",
    default=None,
    help="Reproduce papers: mcsd, optimal, self-draft, improved, dsbd, several separated by commas, or all. --prompts may be a "
    "folder of prompt sets.",
)
@click.option(
    "--size",
    type=click.Choice(["smoke", "page"]),
    default="smoke",
    show_default=True,
    help="How much --reproduce measures: smoke is a quick test, page is what docs/papers shows.",
)
@click.option(
    "--runs",
    default="all",
    show_default=True,
    help="Which runs of --reproduce: all, counted, timed, or names, separated by commas. Processes with counted runs may share "
    "a machine and --out. With --methods, only these methods are measured.",
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder for results.json and report.html; required.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --out.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Benchmark methods on the same prompts, interleaved in one process, against plain decoding (ar).

    Methods: ar; auto, the default of polydraft.load; sd:LENGTH, mcsd:TREE, fork:WIDTHxDEPTH, dynamic:NODES[:DEPTH]; without a
    draft: self-draft:NUMBERxLENGTH, ngram, lookup, suffix, corpus; combinations such as lookup+mcsd:4x2x1;
    target-init:WIDTHxDEPTH, which is lossy; beams: beam:W, beam-search:W, dsbd:W,width=..,depth=..,threshold=.. (see
    docs/beams.md); peers: hf, hf-assisted, hf-lookup, hf-compiled, hf-beam:W, llama.cpp, llama.cpp,lib=PATH (your own build),
    xllamacpp. At temperature 0, texts are compared with ar's, except those of lossy methods, beams and llama.cpp.

    To split a long run, start N processes with the same options, but give each its own --shard I/N, --out and cores (taskset);
    then run `polydraft bench merge OUT DIR...`.
    """
    if context.invoked_subcommand is None:
        given = {name for name in options if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
        _bench(given, **options)


@command.command("diff", short_help="Show what changed between two results.")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def diff(before: Path, after: Path) -> None:
    """Show what changed beyond noise between two results (folders or results.json files)."""
    from polydraft.lab.bench.diff import compare, format_diff, load_results

    click.echo(format_diff(compare(load_results(before), load_results(after))))


@command.command("serve", short_help="Measure a server under load.")
@options_of(ServingLoad)
@prompts_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="JSON file for the figures; an HTML page goes beside it."
)
def serve(source: str, out: Path | None, **options: Any) -> None:
    """Measure a running server: time to first token, between tokens and in total, throughput, and goodput under limits.

    Arms run one after the other, with the same prompts and arrival times. The arms transformers and llama.cpp start their own
    servers; to measure any other server, give its --url and --arms as-is.
    """
    from polydraft.lab.bench.report import render_load
    from polydraft.lab.bench.serving import format_load, run_load
    from polydraft.output import check_file, write_text
    from polydraft.prompts import load_prompts

    load = ServingLoad(**options)
    if out is not None:
        check_file(out)
        if out.suffix == _PAGE:
            raise UsageError(f"--out {out} is the name of the page; name the JSON file, such as {out.with_suffix('.json')}")
    prompts = [prompt.content for prompt in load_prompts(source, load.requests)]
    with PhaseProgress() as progress:
        found = run_load(load, prompts, lambda arm, done: progress(arm, done, load.requests))
    for arm in found:
        click.echo(format_load(arm))
    if out is not None:
        measured = {"options": {**vars(load), "api_key": None}, "arms": found}
        remedy = "the figures are above"
        write_text(out, json.dumps(measured, indent=1) + "\n", remedy=remedy)
        write_text(out.with_suffix(_PAGE), render_load(measured), remedy=remedy)
    for arm in found:
        if arm["errors"] == arm["requests"]:
            raise FailureError(f"arm {arm['arm']} gave no answer ({arm['first_error']}); the figures of the others are above")


@command.command("merge", short_help="Join the shards of one run.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--reproduce", default=None, help="Paper that the shards reproduce; also writes its tables.")
def merge(out: Path, folders: tuple[Path, ...], reproduce: str | None) -> None:
    """Join the shards in the folders DIR into one benchmark in the new folder OUT, with statistics over all of them.

    Give all N shards; each must be finished, and all must have been started with the same settings on the same machine.
    """
    from polydraft.lab.bench.reproduction import merge_reproduction
    from polydraft.lab.bench.shards import merge_shards

    if reproduce is None:
        _show(merge_shards(out, folders, _command_line()), out)
        return
    _show_reproduction(merge_reproduction(reproduce, out, folders, _command_line()), out)


def _bench(
    given: set[str], *, reproduce: str | None, size: str, runs: str, out: Path | None, resume: bool, **options: Any
) -> None:
    if out is None:
        raise UsageError("--out is missing; name a folder for results.json and report.html")
    announce_start()
    prepare(options["threads"])
    if reproduce is not None:
        _reproduce(reproduce, size, given, options, out, resume=resume, runs=runs.split(","))
        return
    from polydraft.lab.bench.session import BenchSession
    from polydraft.output import check_folder

    chosen = BenchOptions(**{**options, "methods": tuple(options["methods"].split())})
    check_folder(out, resume=resume)
    _show(_run(BenchSession(chosen), out, resume), out)


def _reproduce(
    names: str, size: str, given: set[str], options: dict[str, Any], out: Path, *, resume: bool, runs: list[str]
) -> None:
    """Reproduce papers, each in its own folder if there are several; models are loaded once."""
    from polydraft.lab.bench.reproduction import Reproduction, check_choice
    from polydraft.lab.bench.session import Models
    from polydraft.lab.papers import PAPERS

    chosen, models = list(PAPERS) if names == "all" else names.split(","), Models()
    places = {name: out / name if len(chosen) > 1 else out for name in chosen}
    check_choice(chosen, runs, options["methods"].split() if "methods" in given else ())
    made = [Reproduction(name, size, options, given, models, runs) for name in chosen]
    papers = [paper for paper in made if paper.runs]
    if not papers:
        raise UsageError(f"none of the runs {','.join(runs)} of {names} has a method among {options['methods']}")
    for paper in papers:
        paper.check(places[paper.name], resume=resume)
    found = {}
    for paper in papers:
        place = places[paper.name]
        found[paper.name] = paper.run(place, lambda session, folder: _run(session, folder, resume))
    for name, results in found.items():
        _show_reproduction(results, places[name])


def _run(session: "BenchSession", out: Path, resume: bool) -> dict[str, Any]:
    """Run one benchmark with a progress bar."""
    total, count = session.runner.total, 0
    with PhaseProgress() as progress:

        def show(measurement: Any) -> None:
            nonlocal count
            count += 1
            progress("measuring", count, total, measurement.method if measurement else "")

        begin = partial(progress, "measuring", count, total)
        try:
            return session.run(out, resume=resume, command=_command_line(), progress=show, begin=begin)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C or SIGTERM
                click.echo(f"interrupted; what was measured is kept: add --resume to continue in {out}", err=True)
            raise


def _command_line() -> list[str]:
    return ["polydraft", *sys.argv[1:]]


def _show(results: dict[str, Any], out: Path) -> None:
    """Print the table; then raise an error if a text is wrong or a method has failed."""
    output_console().print(results_table(results))
    click.echo(f"{out / 'results.json'} and {out / 'report.html'} written")
    differing = [name for name, figures in results["methods"].items() if figures["differences"]]
    if differing:
        raise FailureError(f"greedy texts of {', '.join(differing)} differ from ar's, and not only at near-ties; see {out}")
    failed = {name: figures["error"] for name, figures in results["methods"].items() if figures["status"] != "ok"}
    if failed:
        reason = next(iter(failed.values()))
        raise FailureError(f"methods failed: {', '.join(failed)} ({reason}); the others' results are in {out}")


def _show_reproduction(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Print a paper's tables, then each of its benchmarks, as `_show` does."""
    from polydraft.lab.papers import FILE

    click.echo((out / FILE).read_text(encoding="utf-8"))
    click.echo(f"{out / FILE} written")
    for name, one in results.items():
        _show(one, out / name)


def results_table(results: dict[str, Any]) -> Table:
    """Return the headline table of a benchmark."""
    settings = results["settings"]
    title = (
        f"{settings['target']}, draft {settings['draft']}, T={settings['temperature']}, {settings['prompts']['count']} prompts"
    )
    if "inflated" in settings:
        title += f"\n{settings['inflated']}"
    table = figures_table("method", ("tokens/s", "speed-up (95 %)", "tokens/pass", "accepted", "same text"), title)
    sources = {name: _shares(figures) for name, figures in results["methods"].items()}
    if any(sources.values()):
        table.add_column("drafted by", overflow="fold")
    graded = any(figures.get("exact_match") is not None for figures in results["methods"].values())
    if graded:
        table.add_column("exact match", justify="right")
    for name, figures in results["methods"].items():
        low, high = figures["speedup_low"], figures["speedup_high"]
        speed_up = _number(figures["speedup"]) + ("" if low is None else f" ({low:.2f}-{high:.2f})")
        cells = [_number(figures[key]) for key in ("tokens_per_second", "tokens_per_pass", "acceptance_rate")]
        status = _identity(figures) if figures["status"] == "ok" else "failed"
        extra = [sources[name]] if any(sources.values()) else []
        extra += [_number(figures.get("exact_match"))] if graded else []
        table.add_row(name, cells[0], speed_up, *cells[1:], status, *extra)
    return table


def _shares(figures: dict[str, Any]) -> str:
    """Write the share of the tokens that each n-gram cache and draft proposed."""
    counts, own = figures.get("tokens_by_source", {}), ("target", "unknown")
    drafted = {source: count for source, count in counts.items() if source not in own}
    return sources_text({source: round(100 * count / sum(counts.values())) for source, count in drafted.items()}, unit=" %")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _identity(figures: dict[str, Any]) -> str:
    if figures["identical"] is None:
        return "-"
    ties, others = figures["near_tie_differences"], figures["differences"]
    return f"{figures['identical']}" + (f" +{ties} ties" if ties else "") + (f", {others} NOT" if others else "")
