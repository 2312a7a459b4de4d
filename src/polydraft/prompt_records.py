"""Read records of prompts from a file, all files of a folder, or a dataset of the Hugging Face hub.

Whether a file is JSON lines, JSON or text is recognised by its content.
"""

import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from polydraft.errors import UsageError, first_line

BUILTIN = "builtin"
"""The source that needs neither a file nor the network."""
_BUILTIN_FILE = "builtin_prompts.jsonl"
_HUB = "hf:"
_ALLOWED = f"allowed: {BUILTIN!r}, the path of a file or a folder, or {_HUB}NAME[:SPLIT]"
_PARQUET = ".parquet"
GZIP_MAGIC = b"\x1f\x8b"

Record = Mapping[str, Any]
"""One row of a dataset, keys as in its file."""
Placed = tuple[str, Any]
"""Where a record is, in words ("line 3"), and the record."""


def records_of(source: str) -> Iterator[Placed]:
    """Read all records of a source, see `polydraft.prompts.load_prompts`."""
    if source == BUILTIN:
        content = resources.files("polydraft").joinpath(_BUILTIN_FILE).read_text(encoding="utf-8")
        return _placed_records(content, source, json_expected=True)
    path = os.path.expanduser(source)
    if source.startswith(_HUB) and not os.path.exists(path):
        return _hub_records(source)
    return _folder_records(path, source) if os.path.isdir(path) else _file_records(path, source)


def _folder_records(path: str, source: str) -> Iterator[Placed]:
    """Read all files of records in a folder, in the order of their names."""
    files = sorted(
        file for file in Path(path).iterdir() if file.is_file() and (names_json(file.name) or _is_parquet(file.name))
    )
    if not files:
        raise UsageError(
            f"prompt folder {source!r} has no files of prompts; allowed: .jsonl, .json, gzipped or not, and .parquet; "
            "name a folder that has some, or a file"
        )
    for file in files:
        for place, record in _file_records(str(file), str(file)):
            own = isinstance(record, Mapping) and not record.get("category")
            yield f"{place} of {file.name}", {**record, "category": file.name.split(".")[0]} if own else record


def _file_records(path: str, source: str) -> Iterator[Placed]:
    if _is_parquet(path) and os.path.isfile(path):
        yield from _parquet_records(path, source)
    else:
        yield from _placed_records(_read_text(path, source), source, json_expected=names_json(path))


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(_PARQUET)


def _parquet_records(path: str, source: str) -> Iterator[Placed]:
    """Read a table with the package `pyarrow`."""
    remedy = "pip install pyarrow, or convert it to JSON lines"
    parquet = _optional_module("pyarrow.parquet", f"prompt file {source!r}", remedy)
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # Arrow raises all kinds of errors
        raise UsageError(
            f"prompt file {source!r} cannot be read ({first_line(error)}); allowed: a complete Parquet file; download it again"
        ) from None
    yield from ((f"record {number}", row) for number, row in enumerate(rows, start=1))


def _optional_module(name: str, source: str, remedy: str) -> Any:
    """Import a module of a package that is not a dependency."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UsageError(f"{source} needs the package {package!r}, which cannot be imported; {remedy}") from None


def names_json(path: str) -> bool:
    """Whether a file's name promises JSON, so that a broken first line is an error and not a prompt."""
    return path.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson"))


def _read_text(path: str, source: str) -> str:
    """Read a file as text; unpack it if its content is gzip."""
    try:
        if not path:  # Path would take it for the current directory
            raise FileNotFoundError
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"prompt file {source!r} not found; {_ALLOWED}; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(
            f"prompt file {source!r} cannot be read ({reason}); {_ALLOWED}; check the file and its permissions"
        ) from None
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(
                f"prompt file {source!r} is broken ({first_line(error)}); allowed: a complete gzip file; download it again"
            ) from None
    try:
        return content.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line} of prompt file {source!r} is not UTF-8; allowed: UTF-8 text, gzipped or not; convert it with iconv"
        ) from None


def _hub_records(source: str) -> Iterator[Placed]:
    """Read a dataset with the package `datasets`."""
    name, _, split = source.removeprefix(_HUB).partition(":")
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise UsageError(f"prompt source {source!r} does not name a dataset; allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]")
    datasets = _optional_module("datasets", f"prompt source {source!r}", f"{_ALLOWED}; pip install datasets, or name a file")
    config = parts[2] if len(parts) == 3 else None
    try:
        rows: Any = datasets.load_dataset("/".join(parts[:2]), config, split=split or None)
    except Exception as error:  # hub client, HTTP library and dataset readers raise all kinds of errors
        raise UsageError(
            f"prompt source {source!r} cannot be loaded ({first_line(error)}); "
            f"allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]; check the name, the split and the network, or give a file"
        ) from None
    if isinstance(rows, dict):  # no split was asked for: all of them
        rows = rows["test"] if "test" in rows else next(iter(rows.values()), ())
    return ((f"record {number}", row) for number, row in enumerate(rows, start=1))


def _placed_records(content: str, source: str, json_expected: bool) -> Iterator[Placed]:
    """Read JSON lines, a JSON array, an object with such an array under `data`, or plain text with one prompt per line.

    The first characters tell which of them it is. Errors call the file `source`; with `json_expected`, text that does not look
    like JSON is refused.
    """
    # Not splitlines(): JSON strings may contain U+2028 and similar characters unescaped.
    lines = [(f"line {number}", line.strip()) for number, line in enumerate(content.split("\n"), start=1)]
    lines = [(place, line) for place, line in lines if line]
    start = "".join(line for _, line in lines[:2])
    if in_array(start) or (start.startswith("{") and not _is_json_lines(lines)):
        yield from _document_records(_loads(content, None, source), lines[0][0])
    else:
        is_json = json_expected or start.startswith("{")
        for place, line in lines:
            yield from _flattened(place, record_in(line, is_json, place, source))


def in_array(start: str) -> bool:
    """Whether a text that begins like this is a JSON array: "[INST] Hello" is a line of text, "[{" is not."""
    return start.startswith("[") and start[1:].lstrip()[:1] in ("{", '"', "[", "]", "")


def record_in(line: str, is_json: bool, place: str, source: str) -> Any:
    """Return the record that a line holds."""
    return _loads(line, place, source) if is_json else {"text": line}


def _is_json_lines(lines: list[Placed]) -> bool:
    """Tell JSON lines from one JSON object: a complete line is followed by one that opens an object."""
    return len(lines) > 1 and not lines[0][1].endswith(("{", "[", ",", ":")) and lines[1][1].startswith("{")


def _loads(content: str, place: str | None, source: str) -> Any:
    """Parse JSON; `place` is None for a whole document, whose parser knows the line."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or first_line(error)
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        where = place or f"line {getattr(error, 'lineno', 1)}"
        raise UsageError(
            f"{where} of prompt source {source!r} is malformed JSON ({reason}{column}); "
            "allowed: JSON lines, a JSON array, or plain text with one prompt per line; fix or remove it"
        ) from None


def _document_records(document: Any, start: str) -> Iterator[Placed]:
    """Yield the numbered records of a JSON array or of the array under `data`, or a lone object that begins at `start`."""
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        document = document["data"]
    if not isinstance(document, list):
        yield from _flattened(start, document)
        return
    for number, record in enumerate(document, start=1):
        yield from _flattened(f"record {number}", record)


def _flattened(place: str, record: Any) -> Iterator[Placed]:
    """Flatten an article of the original SQuAD files: paragraphs → qas, each with its paragraph's context."""
    paragraphs = record.get("paragraphs") if isinstance(record, dict) else None
    if not isinstance(paragraphs, list):
        yield place, record
        return
    for p, paragraph in enumerate(paragraphs, start=1):
        questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(questions, list):
            yield f"{place}, paragraph {p}", paragraph
            continue
        for q, question in enumerate(questions, start=1):
            row = {**question, "context": paragraph.get("context")} if isinstance(question, dict) else question
            yield f"{place}, paragraph {p}, question {q}", row
