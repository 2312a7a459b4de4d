"""Prompts: our own, a file of a known dataset, or a dataset of the Hugging Face hub.

The content of a file tells whether it is JSON lines, JSON or text, and which dataset its records come from. All commands read
prompts with this module; `polydraft batch` gives it one line at a time.
"""

import gzip
import importlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from polydraft.errors import UsageError, first_line, unknown_name

BUILTIN = "builtin"
"""The source that needs neither a file nor the network."""
_BUILTIN_FILE = "builtin_prompts.jsonl"
_HUB = "hf:"
_ALLOWED = f"allowed: {BUILTIN!r}, the path of a file, or {_HUB}NAME[:SPLIT]"
_GZIP_MAGIC = b"\x1f\x8b"

Record = Mapping[str, Any]
"""One row of a dataset, keys as in its file."""
Placed = tuple[str, Any]
"""Where a record stands, in words ("line 3"), and the record."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    id: str
    """Unique within its source."""
    category: str
    """What results are grouped by."""
    text: str
    """What the user says, exactly as in the dataset; chat templates are applied elsewhere."""
    messages: tuple[Record, ...] = field(default=(), hash=False)
    """The conversation, if the prompt is one; `text` is then what its messages say."""

    @property
    def content(self) -> str | list[Record]:
        """The conversation or the text, as `Decoder.encode` takes it."""
        return list(self.messages) or self.text


@dataclass(frozen=True)
class PromptFormat:
    """How the records of a dataset hold their prompts."""

    keys: str
    """Keys that a record needs, for error messages."""
    text: Callable[[Record], object]
    """Returns the prompt, or anything but a non-empty string if the record has another format."""
    id_key: str = "id"


def _conversation(record: Record) -> object:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UsageError(f"has no role and content in message {number} of its messages; allowed: objects with both")
    said = [message["content"] for message in messages if isinstance(message["content"], str)]
    return "\n\n".join(said) or json.dumps(messages, ensure_ascii=False)


def _first_turn(record: Record) -> object:
    turns = record.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None


def _passage_and_question(record: Record) -> object:
    context, question = record.get("context"), record.get("question")
    return f"{context}\n\nQuestion: {question}" if _is_text(context) and _is_text(question) else None


def _instruction(record: Record) -> object:
    """Return the instruction and its input, if it has one, without the preamble that Alpaca's own model was trained with."""
    instruction, extra = record.get("instruction"), record.get("input")
    return f"{instruction}\n\n{extra}" if _is_text(instruction) and _is_text(extra) else instruction


def _task(record: Record) -> object:
    """Return the task in words; the sanitized edition of MBPP calls it `prompt`, and differs from HumanEval by `test_list`."""
    if "task_id" not in record:
        return None
    return record.get("text") or (record.get("prompt") if "test_list" in record else None)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_CONVERSATION = "messages"
FORMATS = {
    _CONVERSATION: PromptFormat("messages", _conversation),
    "mt_bench": PromptFormat("question_id+turns", _first_turn, "question_id"),  # and Spec-Bench
    "squad": PromptFormat("context+question", _passage_and_question),
    "gsm8k": PromptFormat("question+answer", lambda record: record.get("question") if "answer" in record else None),
    "alpaca": PromptFormat("instruction", _instruction),
    "mbpp": PromptFormat("task_id+text", _task, "task_id"),
    "humaneval": PromptFormat(
        "task_id+prompt", lambda record: record.get("prompt") if "task_id" in record else None, "task_id"
    ),
    "prompt": PromptFormat("prompt", lambda record: record.get("prompt")),
    "text": PromptFormat("text", lambda record: record.get("text")),
}
"""By name, which is also the category of records without one. The first that fits is used: more specific ones come first."""


def _from_records(placed: Iterable[Placed], source: str) -> list[Prompt]:
    """Turn records into prompts, each by the first format that fits, with unique ids.

    A missing id becomes `CATEGORY-NUMBER`; a repeated one gets `@NUMBER`, the number being the record's.
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, (place, record) in enumerate(placed, start=1):
        prompt = prompt_of(record, f"{place} of prompt source {source!r}")
        name = prompt.id or f"{prompt.category}-{number}"
        name = f"{name}@{number}" if name in seen else name
        seen.add(name)
        prompts.append(replace(prompt, id=name))
    return prompts


def prompt_of(record: object, where: str) -> Prompt:
    """Turn a record into a prompt by the first format that fits; `where` is what errors call its place."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{where} is a JSON {_json_type(record)}; allowed: a JSON object; fix or remove it")
    for name, form in FORMATS.items():
        try:
            text = form.text(record)
        except UsageError as error:
            raise UsageError(f"{where} {error}; fix or remove it") from None
        if not isinstance(text, str) or not text.strip():
            continue
        known, category = record.get(form.id_key), " ".join(str(record.get("category") or "").split())
        prompt = Prompt(
            id="" if known is None else str(known).strip(),
            category=category or name,
            text=text,
            messages=tuple(record["messages"]) if name == _CONVERSATION else (),
        )
        try:  # JSON's \ud800 escapes pass the parser and would only fail in the tokenizer or the report
            f"{prompt.id}{prompt.category}{prompt.text}".encode()
        except UnicodeEncodeError:
            raise UsageError(f"{where} has half a surrogate pair; allowed: valid Unicode; fix or remove it") from None
        return prompt
    found = ", ".join(repr(str(key)[:40]) for key in itertools.islice(record, 12)) or "none"
    keys = ", ".join(f"{form.keys} ({name})" for name, form in FORMATS.items())
    raise UsageError(f"{where} has no prompt; its keys: {found}; expected non-empty: {keys}; fix or remove it")


def _json_type(value: object) -> str:
    """Name a parsed value as JSON does."""
    names = {str: "string", list: "array", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _placed_records(content: str, source: str, json_expected: bool) -> Iterator[Placed]:
    """Read JSON lines, a JSON array, an object with such an array under `data`, or plain text with one prompt per line.

    The first characters tell which. `source` is what error messages call the file; with `json_expected`, what does not look
    like JSON is refused.
    """
    # Not splitlines(): U+2028 and its kind stand unescaped inside JSON strings.
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
    """Tell JSON lines from one JSON object: a line that is complete, then one that opens an object."""
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


def load_prompts(source: str, limit: int | None = None, categories: Sequence[str] = ()) -> list[Prompt]:
    """Load the prompts of a source.

    Parameters
    ----------
    source : str
        `builtin`; the path of a JSON lines, JSON or text file, possibly gzipped, whose records are of a format in
        `FORMATS`; or `hf:NAME[:SPLIT]` for a dataset of the Hugging Face hub, where NAME may be
        `OWNER/NAME/CONFIG` and SPLIT is `test` unless the dataset has none (then its first). A file goes before the hub.
    limit : int, optional
        At most this many prompts, at least 1; all where None.
    categories : sequence of str
        Keep these only; all where empty.

    Returns
    -------
    list of Prompt
        At least one, in the source's order. With a limit, one of each category in turn: categories count alike as far as they
        go, and a smaller limit gives the beginning of what a larger one gives.

    Raises
    ------
    UsageError
        If the source cannot be read, holds no prompt or a malformed one, or an argument is out of range.
    """
    if limit is not None and limit < 1:
        raise UsageError(
            f"prompt limit {limit} is out of range; allowed: whole numbers from 1; leave it out to use every prompt"
        )
    prompts = _load(source)
    if not prompts:
        raise UsageError(
            f"prompt source {source!r} holds no prompts; allowed: at least one; "
            f"give it one prompt per line, or records of a known format ({', '.join(FORMATS)})"
        )
    if categories:
        known = {prompt.category for prompt in prompts}
        for category in categories:
            if category not in known:
                raise unknown_name("prompt category", category, known)
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    return prompts if limit is None else _round_robin(prompts, limit)


def _round_robin(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """Take one prompt of each category in turn, categories in order of first appearance."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return list(itertools.islice((prompt for prompt in turns if prompt is not None), limit))


def _load(source: str) -> list[Prompt]:
    """Read all prompts of a source."""
    if source == BUILTIN:
        content = resources.files("polydraft").joinpath(_BUILTIN_FILE).read_text(encoding="utf-8")
        return _from_records(_placed_records(content, source, json_expected=True), source)
    path = os.path.expanduser(source)
    if source.startswith(_HUB) and not os.path.exists(path):
        return _load_from_hub(source)
    return _from_records(_placed_records(_read_text(path, source), source, json_expected=names_json(path)), source)


def names_json(path: str) -> bool:
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
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(
            f"prompt file {source!r} cannot be read ({reason}); {_ALLOWED}; check the file and its permissions"
        ) from None
    if content.startswith(_GZIP_MAGIC):
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


def _load_from_hub(source: str) -> list[Prompt]:
    """Read a dataset through the `datasets` package, which is not a dependency of ours."""
    name, _, split = source.removeprefix(_HUB).partition(":")
    parts = name.split("/")
    if not all(parts) or len(parts) > 3:
        raise UsageError(f"prompt source {source!r} names no dataset; allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]")
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
            f"prompt source {source!r} cannot be loaded ({first_line(error)}); "
            f"allowed: {_HUB}[OWNER/]NAME[/CONFIG][:SPLIT]; check the name, the split and the network, or give a file"
        ) from None
    if isinstance(rows, dict):  # no split was asked for: all of them
        rows = rows["test"] if "test" in rows else next(iter(rows.values()), ())
    return _from_records(((f"record {number}", row) for number, row in enumerate(rows, start=1)), source)


def check_text(text: str) -> None:
    """Refuse what is no Unicode text, such as bytes in another encoding that came in by a shell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid UTF-8 (at character {error.start}); give it in UTF-8") from None
