"""Options about the machine that work runs on, the same for every command."""

import click

from polydraft.errors import UsageError

_MOST_THREADS = 1024


def _not_too_many(context: click.Context, parameter: click.Parameter, threads: int | None) -> int | None:
    """Refuse what would end the process without a word, or with a page of them."""
    if threads is not None and threads > _MOST_THREADS:
        raise UsageError(f"--threads {threads} is out of range; allowed: whole numbers from 1 to {_MOST_THREADS}")
    return threads


DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
DTYPE = click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, float16.")
THREADS = click.option(
    "--threads", type=int, default=None, callback=_not_too_many, help="CPU threads  [default: torch's choice]."
)


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that torch would fail on."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is out of range; allowed: whole numbers from 1")


def set_threads(threads: int | None) -> None:
    """Give torch so many threads, or leave it its choice."""
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
