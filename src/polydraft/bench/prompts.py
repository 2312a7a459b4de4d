"""Prompts to measure with: our own, a file of a known dataset, or a dataset of the Hugging Face hub."""

import gzip
import importlib
import os
import zlib
from collections.abc import Sequence
from importlib import resources
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from polydraft.bench.prompt_formats import FORMATS, BenchPrompt, parse_prompts, read_records
from polydraft.errors import UsageError, unknown_name

__all__ = ["BUILTIN", "BenchPrompt", "load_prompts"]

BUILTIN = "builtin"
"""The source that needs neither a file nor the network."""
_BUILTIN_FILE = "builtin_prompts.jsonl"
_HUB = "hf:"
_ALLOWED = f"allowed: {BUILTIN!r}, the path of a file, or {_HUB}NAME[:SPLIT]"
_GZIP_MAGIC = b"\x1f\x8b"


def load_prompts(source: str, limit: int | None = None, categories: Sequence[str] = ()) -> list[BenchPrompt]:
    """Load the prompts of a source.

    Parameters
    ----------
    source : str
        `builtin`; the path of a JSON lines, JSON or text file, possibly gzipped, whose records are of a format in
        `polydraft.bench.prompt_formats.FORMATS`; or `hf:NAME[:SPLIT]` for a dataset of the Hugging Face hub, where NAME may be
        `OWNER/NAME/CONFIG` and SPLIT is `test` unless the dataset has none (then its first). A file goes before the hub.
    limit : int, optional
        At most this many prompts, at least 1; all where None.
    categories : sequence of str
        Keep these only; all where empty.

    Returns
    -------
    list of BenchPrompt
        At least one, in the source's order; with a limit, one of each category in turn, so that categories count alike as far
        as they reach, and a smaller limit gives the beginning of what a larger one gives.

    Raises
    ------
    UsageError
        If the source cannot be read, holds no prompt or a malformed one, or an argument is out of range.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"prompt limit is {limit}; allowed: 1 or more; leave it out to use every prompt")
    prompts = _load(source)
    if not prompts:
        raise UsageError(
            f"prompt source {source!r} holds no prompts; allowed: at least one; "
            f"give it a prompt a line, or records of a known format ({', '.join(FORMATS)})"
        )
    if categories:
        known = {prompt.category for prompt in prompts}
        for category in categories:
            if category not in known:
                raise unknown_name("prompt category", category, known)
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    return prompts if limit is None else _round_robin(prompts, limit)


def _round_robin(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """Take one prompt of each category in turn, categories in order of first appearance."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return list(islice((prompt for prompt in turns if prompt is not None), limit))


def _load(source: str) -> list[BenchPrompt]:
    """Find out what kind of source it is, and read all of it."""
    if source == BUILTIN:
        content = resources.files("polydraft.bench").joinpath(_BUILTIN_FILE).read_text(encoding="utf-8")
        return parse_prompts(content, source, json_expected=True)
    path = os.path.expanduser(source)
    if source.startswith(_HUB) and not os.path.exists(path):
        return _load_from_hub(source)
    return parse_prompts(_read_text(path, source), source, json_expected=_names_json(path))


def _names_json(path: str) -> bool:
    """Whether the name promises JSON, so that a broken first line is an error and not a prompt."""
    return path.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson"))


def _read_text(path: str, source: str) -> str:
    """Read a file, unpacked if it is gzip by content."""
    try:
        if not path:  # which Path would take for the current directory
            raise FileNotFoundError
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"prompt file {source!r} not found; {_ALLOWED}; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"prompt source {source!r} is a directory; {_ALLOWED}; name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise UsageError(f"prompt file {source!r} cannot be read ({reason}); {_ALLOWED}; check it and its rights") from None
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            reason = _first_line(error)
            raise UsageError(
                f"prompt file {source!r} is broken gzip ({reason}); allowed: whole files; fetch it again"
            ) from None
    try:
        return content.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line} of prompt file {source!r} is not UTF-8; allowed: UTF-8 text, gzipped or not; convert it with iconv"
        ) from None


def _load_from_hub(source: str) -> list[BenchPrompt]:
    """Read a dataset through the `datasets` package, which is not a dependency of ours."""
    name, _, split = source.removeprefix(_HUB).partition(":")
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise UsageError(f"prompt source {source!r} names no dataset; allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]; name one")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(
            f"prompt source {source!r} needs the package 'datasets', which cannot be imported; "
            f"{_ALLOWED}; pip install datasets, or name a file"
        ) from None
    config = parts[2] if len(parts) == 3 else None
    try:
        rows: Any = datasets.load_dataset("/".join(parts[:2]), config, split=split or None)
    except Exception as error:  # the hub's client, its HTTP library and each dataset's reader raise what they like
        raise UsageError(
            f"prompt source {source!r} cannot be loaded ({_first_line(error)}); "
            f"allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]; check name, split and network, or name a file"
        ) from None
    if isinstance(rows, dict):  # no split was asked for: all of them
        rows = rows["test"] if "test" in rows else next(iter(rows.values()), ())
    return read_records(((f"record {number}", row) for number, row in enumerate(rows, start=1)), source)


def _first_line(error: Exception) -> str:
    """Shorten what an error says to one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
