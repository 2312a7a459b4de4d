"""Prompt files as people have them: which container (JSON lines, JSON, text) and which dataset's records, told by content."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polydraft.errors import UsageError
from polydraft.registry import Registry

Record = Mapping[str, Any]
"""One row of a dataset, keys as in its file."""
Placed = tuple[str, Any]
"""Where a record stands, in words ("line 3"), and the record."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt to measure with."""

    id: str
    """Unique within its source."""
    category: str
    """What results are grouped by."""
    text: str
    """What the user says, exactly as the dataset has it; a chat template is applied elsewhere."""


PromptFormat = Callable[[Record], BenchPrompt | None]
"""Turns a record into a prompt; None where the record is not of this format. An empty `id` is filled in by the reader."""
FORMATS: Registry[PromptFormat] = Registry("prompt format")
"""Tried in order of registration: a format with more telling keys stands before one that would also fit."""
_KEYS: dict[str, str] = {}


def _format(name: str, *keys: str) -> Callable[[PromptFormat], PromptFormat]:
    """Register a format, and the keys that an error message says it needs."""
    _KEYS[name] = "+".join(keys)
    return FORMATS.register(name)


def _prompt(record: Record, name: str, text: object, id_key: str = "id") -> BenchPrompt | None:
    """Build the prompt if `text` is one; the category falls back to the format's name."""
    if not isinstance(text, str) or not text.strip():
        return None
    known = record.get(id_key)
    return BenchPrompt(
        id="" if known is None else str(known).strip(),
        category=" ".join(str(record.get("category") or "").split()) or name,
        text=text,
    )


@_format("mt_bench", "question_id", "turns")
def mt_bench(record: Record) -> BenchPrompt | None:
    """Spec-Bench and MT-bench: the first turn."""
    turns = record.get("turns")
    return _prompt(record, "mt_bench", turns[0], "question_id") if isinstance(turns, list) and turns else None


@_format("squad", "context", "question")
def squad(record: Record) -> BenchPrompt | None:
    """SQuAD: the passage, then the question."""
    context, question = record.get("context"), record.get("question")
    if not all(isinstance(part, str) and part.strip() for part in (context, question)):
        return None
    return _prompt(record, "squad", f"{context}\n\nQuestion: {question}")


@_format("gsm8k", "question", "answer")
def gsm8k(record: Record) -> BenchPrompt | None:
    """GSM8K: the question."""
    return _prompt(record, "gsm8k", record.get("question")) if "answer" in record else None


@_format("alpaca", "instruction")
def alpaca(record: Record) -> BenchPrompt | None:
    """Alpaca: the instruction and, where there is one, its input; without the preamble that Alpaca's own model wants."""
    instruction, extra = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and instruction.strip() and isinstance(extra, str) and extra.strip():
        instruction = f"{instruction}\n\n{extra}"
    return _prompt(record, "alpaca", instruction)


@_format("mbpp", "task_id", "text")
def mbpp(record: Record) -> BenchPrompt | None:
    """MBPP: the task in words; the sanitized edition calls it `prompt` and is told by its `test_list`."""
    if "task_id" not in record:
        return None
    text = record.get("text") or (record.get("prompt") if "test_list" in record else None)
    return _prompt(record, "mbpp", text, "task_id")


@_format("humaneval", "task_id", "prompt")
def humaneval(record: Record) -> BenchPrompt | None:
    """HumanEval: the function's head and docstring."""
    return _prompt(record, "humaneval", record.get("prompt"), "task_id") if "task_id" in record else None


@_format("prompt", "prompt")
def own(record: Record) -> BenchPrompt | None:
    """Our own: `prompt`, with an `id` and a `category` if it likes."""
    return _prompt(record, "prompt", record.get("prompt"))


@_format("text", "text")
def text(record: Record) -> BenchPrompt | None:
    """Plain text: what a line of a text file becomes."""
    return _prompt(record, "text", record.get("text"))


def parse_prompts(content: str, source: str, json_expected: bool = False) -> list[BenchPrompt]:
    """Read the prompts of a file's text.

    Parameters
    ----------
    content : str
        JSON lines, a JSON array, a JSON object with such an array under `data`, or plain text with a prompt a line.
    source : str
        What error messages call the file.
    json_expected : bool
        Whether to refuse what does not look like JSON, instead of reading it as plain text.

    Returns
    -------
    list of BenchPrompt
        In the file's order; possibly empty.
    """
    return read_records(_placed_records(content, source, json_expected), source)


def read_records(placed: Iterable[Placed], source: str) -> list[BenchPrompt]:
    """Turn records into prompts, each by the first format that fits, with unique ids.

    Parameters
    ----------
    placed : iterable of (str, object)
        Where each record stands, for error messages, and the record.
    source : str
        What error messages call the place the records come from.

    Returns
    -------
    list of BenchPrompt
        A missing id becomes `CATEGORY-NUMBER`; a repeated one gets `@NUMBER`, the number being the record's.
    """
    prompts: list[BenchPrompt] = []
    seen: set[str] = set()
    for number, (place, record) in enumerate(placed, start=1):
        prompt = _recognise(record, f"{place} of prompt source {source!r}")
        name = prompt.id or f"{prompt.category}-{number}"
        name = f"{name}@{number}" if name in seen else name
        seen.add(name)
        prompts.append(replace(prompt, id=name))
    return prompts


def _recognise(record: object, where: str) -> BenchPrompt:
    """Apply the first format that fits."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{where} is a JSON {_json_type(record)}; allowed: a JSON object; fix or remove it")
    for name in FORMATS:
        prompt = FORMATS.get(name)(record)
        if prompt is None:
            continue
        try:  # JSON's \ud800 escapes pass the parser and would only fail in the tokenizer or the report
            f"{prompt.id}{prompt.category}{prompt.text}".encode()
        except UnicodeEncodeError:
            raise UsageError(f"{where} has half a surrogate pair; allowed: valid Unicode; fix or remove it") from None
        return prompt
    found = ", ".join(repr(str(key)[:40]) for key in itertools.islice(record, 12)) or "none"
    keys = ", ".join(f"{keys} ({name})" for name, keys in _KEYS.items())
    raise UsageError(f"{where} has no prompt; its keys: {found}; expected non-empty: {keys}; fix or remove it")


def _json_type(value: object) -> str:
    """Name a parsed value as JSON does."""
    names = {str: "string", list: "array", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _placed_records(content: str, source: str, json_expected: bool) -> Iterator[Placed]:
    """Find the container by its first characters, and open it."""
    # Not splitlines(): U+2028 and its kind stand unescaped inside JSON strings.
    lines = [(f"line {number}", line.strip()) for number, line in enumerate(content.split("\n"), start=1)]
    lines = [(place, line) for place, line in lines if line]
    start = "".join(line for _, line in lines[:2])
    # "[INST] Hello" is a line of text, "[{" and "[\n{" are not.
    in_array = start.startswith("[") and start[1:].lstrip()[:1] in ("{", '"', "[", "]", "")
    if in_array or (start.startswith("{") and not _is_json_lines(lines)):
        yield from _document_records(_loads(content, None, source), lines[0][0])
    elif json_expected or start.startswith("{"):
        for place, line in lines:
            yield from _flattened(place, _loads(line, place, source))
    else:
        yield from ((place, {"text": line}) for place, line in lines)


def _is_json_lines(lines: list[Placed]) -> bool:
    """Tell JSON lines from one JSON object: a line that does not ask to be continued, then one that opens an object."""
    return len(lines) > 1 and not lines[0][1].endswith(("{", "[", ",", ":")) and lines[1][1].startswith("{")


def _loads(content: str, place: str | None, source: str) -> Any:
    """Parse JSON; `place` is None for a whole document, whose parser knows the line."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or (str(error).splitlines() or [type(error).__name__])[0]
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        where = place or f"line {getattr(error, 'lineno', 1)}"
        raise UsageError(
            f"{where} of prompt source {source!r} is malformed JSON ({reason}{column}); "
            "allowed: JSON lines, a JSON array, or plain text with a prompt a line; fix or remove it"
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
    """Unfold an article of the original SQuAD files: paragraphs → qas, each with its paragraph's context."""
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
