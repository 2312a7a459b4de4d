"""Entry point of the command line."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

import click

import polydraft
from polydraft.errors import PolydraftError, UsageError, unknown_name

_COMMANDS = {
    "analyze": "Compare what each scheme accepts with the theoretical best.",
    "batch": "Generate text for a whole file of prompts.",
    "bench": "Benchmark decoding methods against each other.",
    "certify": "Check that a rule, a decoder or an endpoint is lossless.",
    "chat": "Chat with the target model.",
    "export": "Export a draft for other engines.",
    "generate": "Generate text from one prompt.",
    "info": "Show what is installed, or what a model needs and what would make it faster.",
    "serve": "Serve the target over the OpenAI API.",
    "train": "Train a draft for your target.",
    "tune": "Find the best drafting settings for this machine, and keep them.",
}
_OF_THE_LABORATORY = ("analyze", "bench")


class _LazyGroup(click.Group):
    """A group whose commands are modules that are imported only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        room = "lab.commands" if cmd_name in _OF_THE_LABORATORY else "cli"
        command: click.Command = import_module(f"polydraft.{room}.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise unknown_name("command", args[0], _COMMANDS)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would always print an empty line, but only terminals need one, since they show ^C.
            if sys.stderr.isatty():
                click.echo(err=True)
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(polydraft.__version__, prog_name="polydraft")
def cli() -> None:
    """Many drafts, one target, exact output.

    Makes Hugging Face causal language models generate several tokens per forward pass without changing what they
    generate. Try: polydraft generate "Why is the sky blue?" --compare
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0, 2 for wrong usage, 1 for failures, 130 or 143 after a signal; errors take one line."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if sys.stdout is None:  # the caller closed it, so all output would be lost silently
        return _complain("standard output is closed, so nothing was done; send it to a file or a pipe", 1)
    # On CPUs without bfloat16, torch prints this harmless warning with 15 lines of its stack.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    try:
        with _leaving_in_order():
            result: Any = cli.main(args=arguments, prog_name="polydraft", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except (UsageError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        return _complain(message, 2)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", 130)
    except _Terminated:
        return _complain("terminated", 128 + signal.SIGTERM)
    except (PolydraftError, click.ClickException) as error:
        return _complain(str(error), 1)
    except BrokenPipeError:  # the reader is gone
        _drop_output()
        return 1
    except UnicodeEncodeError as error:
        _drop_output()
        return _complain(f"the output cannot be written in {error.encoding}; set PYTHONIOENCODING=utf-8", 1)
    except OSError as error:  # most often a full disk
        _drop_output()
        what = f"cannot read or write {error.filename}" if error.filename else "input or output failed"
        return _complain(f"{what} ({error.strerror or error})", 1)


class _Terminated(BaseException):
    """SIGTERM was received."""


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Turn the first SIGTERM into an exception, so that half-written files are removed; a second one ends the process at once.

    Commands that handle the signal themselves, such as `serve`, replace this handler.
    """

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _drop_output() -> None:
    """Redirect broken standard output, because flushing it at exit would fail again."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # standard output is not a file
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _complain(message: str, code: int) -> int:
    with suppress(OSError):  # if standard error is closed too, the exit code still shows the failure
        click.echo(f"polydraft: error: {' '.join(message.split())}", err=True)
    return code
