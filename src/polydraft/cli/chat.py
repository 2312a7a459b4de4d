"""`polydraft chat`."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import Choices, GroupedCommand, shared_options
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.cli.terminal import TokenPrinter
    from polydraft.engine import Decoder, Generation
    from polydraft.sampling import SamplingParams

_HELP = "/reset forgets the conversation, /stats shows the figures of the last answer, /exit or end of input ends the program"


@click.command("chat", cls=GroupedCommand)
@shared_options
@click.option("--system", default=None, help="System message that opens the conversation.")
def command(system: str | None, **options: Any) -> None:
    """Chat with the target. It remembers what it has read, so each turn takes time for the new text only.

    Each line of standard input is one turn. /reset forgets the conversation, /stats shows the figures of the last
    answer, /exit ends the program.
    """
    from polydraft.cli.terminal import TokenPrinter, output_console, standard_input, summary_line

    choices = Choices(**options)
    params = choices.check()
    source = standard_input()
    decoder = choices.decoder()
    decoder.encode_chat([{"role": "user", "content": "hello"}])  # refuses a model without a chat template before any input

    console = output_console()
    interactive = source.isatty() and console.is_terminal
    printer = TokenPrinter(console)
    if interactive:
        console.print(_HELP, style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    stats = None
    while (line := _read_line(interactive)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
        elif line == "/stats":
            click.echo(summary_line(stats) if stats else "no answer yet")
        elif line.startswith("/"):
            click.echo(f"unknown command {line}; {_HELP}", err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                result = _answer(decoder, messages, choices, params, printer)
            except UsageError as error:
                if not interactive:
                    raise
                messages.pop()  # drop a turn that does not fit, and keep the conversation
                click.echo(f"polydraft: error: {error}; /reset forgets the conversation", err=True)
                continue
            stats = result.stats
            messages.append({"role": "assistant", "content": result.text})


def _answer(
    decoder: "Decoder", messages: list[dict[str, str]], choices: Choices, params: "SamplingParams", printer: "TokenPrinter"
) -> "Generation":
    """Print an answer as it is generated; Ctrl-C ends the answer, not the conversation."""
    from polydraft.cli.terminal import play

    request = choices.request(params) | {"seed": choices.seed + len(messages)}
    stream = decoder.stream(decoder.encode_chat(messages), keep=True, **request)
    with suppress(KeyboardInterrupt):
        play(stream, printer)
    return stream.results()[0]


def _read_line(interactive: bool) -> str | None:
    """Return the next line, stripped, or None at the end of input."""
    from polydraft.cli.terminal import not_text, read_line

    while True:
        try:
            line = input("> ") if interactive else read_line()
            return None if line is None else line.strip()
        except (EOFError, KeyboardInterrupt):
            return None
        except UnicodeDecodeError as error:  # from the prompt, where the user can try again
            click.echo(f"polydraft: error: {not_text(error)}", err=True)
