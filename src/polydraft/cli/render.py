"""How tokens and figures look on a terminal and in a pipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polydraft.beam.stream import BeamStream
from polydraft.engine import Stats, Stream, TokenEvent

DRAFTED_STYLE = "green"
_FEW = 0.5
"""Share of rounds with drafts below which the mean round says little about them."""


def output_console() -> Console:
    """Return a console for standard output; a pipe is as wide as a table needs."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


class TokenPrinter:
    """Print a stream of tokens: drafted ones in colour on a terminal, plain text in a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        if console.is_terminal:
            legend = Text("drafted tokens are ", style="dim").append("green", style=DRAFTED_STYLE)
            console.print(legend.append(", the target's own plain", style="dim"))

    def print(self, event: TokenEvent) -> None:
        """Print what became certain with one token."""
        style = DRAFTED_STYLE if event.source != "target" else ""
        if self._console.is_terminal:
            self._console.print(Text(event.text, style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(event.text)
        self._console.file.flush()

    def finish(self) -> None:
        """End the line."""
        self._console.file.write("\n")
        self._console.file.flush()


def play(stream: Stream | BeamStream, printer: TokenPrinter | None) -> None:
    """Run a stream to its end, and print its tokens as they come; Ctrl-C closes it first."""
    try:
        for event in stream:
            if printer is not None:
                printer.print(event)
    except KeyboardInterrupt:
        stream.close()
        raise
    finally:
        if printer is not None:
            printer.finish()


def summary_line(stats: Stats) -> str:
    """Return the figures of one run in a line."""
    return (
        f"{stats.new_tokens} tokens in {stats.decode_seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.tokens_per_pass:.2f} tokens a target pass"
        + (f", acceptance {stats.acceptance_rate:.2f}" if stats.offers_by_depth else "")
        + (f"; from {sources}" if (sources := sources_text(stats.tokens_by_source)) else "")
    )


def sources_text(tokens_by_source: Mapping[str, int], unit: str = "") -> str:
    """Say how many tokens each source proposed, if there is more to say than that a draft did."""
    counts = {source: count for source, count in tokens_by_source.items() if count}
    if counts.keys() <= {"model", "head"}:
        return ""
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{source} {count}{unit}" for source, count in ordered)


def comparison_table(rows: Sequence[tuple[str, Stats]]) -> Table:
    """Compare runs; the first row is the baseline."""
    title = "same prompt, same run; a pass is one forward of the target"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("decoding", overflow="fold")
    for heading in ("tokens", "tokens/s", "speed-up", "tokens/pass", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    baseline = rows[0][1].tokens_per_second
    for name, stats in rows:
        speed_up = stats.tokens_per_second / baseline if baseline else 0.0
        acceptance = f"{stats.acceptance_rate:.2f}" if stats.offers_by_depth else "-"
        table.add_row(
            name,
            str(stats.new_tokens),
            f"{stats.tokens_per_second:.1f}",
            f"{speed_up:.2f}x",
            f"{stats.tokens_per_pass:.2f}",
            acceptance,
        )
    return table


def rested(stats: Stats) -> bool:
    """Whether most rounds had no drafts."""
    return _offered(stats) < _FEW * stats.rounds


def _offered(stats: Stats) -> int:
    return stats.offers_by_depth[0] if stats.offers_by_depth else 0


def break_even_line(plain: Stats, drafted: Stats) -> str:
    """Say what a round with drafts costs on this machine, and so what it must yield to pay; or that few rounds had any."""
    if rested(drafted):
        return (
            f"{_offered(drafted)} of {drafted.rounds} rounds had drafts; for the others there was nothing to propose, or it "
            "was not expected to pay on this machine"
        )
    plain_round = plain.decode_seconds / plain.rounds
    drafted_round = drafted.decode_seconds / drafted.rounds
    drafting, target = (drafted.seconds[phase] / drafted.rounds / plain_round for phase in ("draft", "target"))
    return (
        f"a round with drafts takes {drafted_round / plain_round:.1f} plain passes on this machine (drafting {drafting:.1f}, "
        f"target {target:.1f}), so it pays above {drafted_round / plain_round:.1f} tokens/pass"
    )


def results_table(results: dict[str, Any]) -> Table:
    """Return the headline table of a benchmark."""
    settings = results["settings"]
    title = (
        f"{settings['target']}, draft {settings['draft']}, T={settings['temperature']}, {settings['prompts']['count']} prompts"
    )
    if "inflated" in settings:
        title += f"\n{settings['inflated']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    for heading in ("tokens/s", "speed-up (95 %)", "tokens/pass", "accepted", "same text"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    sources = {name: _shares(figures) for name, figures in results["methods"].items()}
    if any(sources.values()):
        table.add_column("drafted by", overflow="fold")
    for name, figures in results["methods"].items():
        low, high = figures["speedup_low"], figures["speedup_high"]
        speed_up = "-" if low is None else f"{figures['speedup']:.2f} ({low:.2f}-{high:.2f})"
        cells = [_number(figures[key]) for key in ("tokens_per_second", "tokens_per_pass", "acceptance_rate")]
        status = _identity(figures) if figures["status"] == "ok" else "failed"
        told = [sources[name]] if any(sources.values()) else []
        table.add_row(name, cells[0], speed_up, *cells[1:], status, *told)
    return table


def _shares(figures: dict[str, Any]) -> str:
    """Say what share of the tokens each n-gram cache and draft proposed."""
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
