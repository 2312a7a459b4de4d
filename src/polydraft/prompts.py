"""Prompts: built-in ones, files of known datasets or folders of them, and datasets of the Hugging Face hub.

The format of a record is recognised by its keys. All commands read prompts with this module; `polydraft batch` does so line by
line.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polydraft.errors import UsageError, unknown_name
from polydraft.prompt_records import Placed, Record, records_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    id: str
    """Unique within its source."""
    category: str
    """Category by which results are grouped."""
    text: str
    """The user's words, exactly as in the dataset; chat templates are applied elsewhere."""
    messages: tuple[Record, ...] = field(default=(), hash=False)
    """The conversation, if the prompt is one; `text` then joins its messages."""
    answers: tuple[str, ...] = ()
    """Right answers, any of which will do; empty if texts are not right or wrong, as with translations and summaries."""

    @property
    def content(self) -> str | list[Record]:
        """The conversation, or else the text, for `Decoder.encode`."""
        return list(self.messages) or self.text


@dataclass(frozen=True)
class PromptFormat:
    """How the records of a dataset hold their prompts."""

    keys: str
    """Keys that a record must have, for error messages."""
    text: Callable[[Record], object]
    """Returns the prompt; anything but a non-empty string means that the record has another format."""
    id_key: str = "id"
    answers: Callable[[Record], Iterable[object]] = lambda record: ()
    """Returns the right answers; anything that is not text is dropped."""


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
    """Return the instruction and its input, if any, without the preamble that Alpaca's own model was trained with."""
    instruction, extra = record.get("instruction"), record.get("input")
    return f"{instruction}\n\n{extra}" if _is_text(instruction) and _is_text(extra) else instruction


def _task(record: Record) -> object:
    """Return the task in words. The sanitized edition of MBPP calls it `prompt`; `test_list` tells it from HumanEval."""
    if "task_id" not in record:
        return None
    return record.get("text") or (record.get("prompt") if "test_list" in record else None)


def _translation(record: Record) -> object:
    """Return MCSD's instruction to translate from the first language into the second."""
    pair = record.get("translation")
    if not isinstance(pair, Mapping) or len(pair) != 2:
        return None
    source, into = (_LANGUAGES.get(code, code) for code in pair)
    text = next(iter(pair.values()))
    return f"Translate the input {source} sentence into {into}.\nInput: {text}\nOutput: " if _is_text(text) else None


def _article(record: Record) -> object:
    article = record.get("article")
    return f"Summarize: {article}" if _is_text(article) and _is_text(record.get("highlights")) else None


def _database_question(record: Record) -> object:
    """Return the question; these records do not have the database's tables."""
    database, question = record.get("db_id"), record.get("question")
    if not _is_text(record.get("query")) or not _is_text(database) or not _is_text(question):
        return None
    return f"Write an SQL query for the database {database!r}.\n\nQuestion: {question}\nSQL: "


def _trivia_answers(record: Record) -> list[object]:
    answer = record.get("answer")
    return [answer.get("value"), *(answer.get("aliases") or ())] if isinstance(answer, Mapping) else []


def _passage_answers(record: Record) -> list[object]:
    """Return the spans, in the format of the hub or of the original file."""
    answers = record.get("answers")
    if isinstance(answers, Mapping):
        return list(answers.get("text") or ())
    return [one.get("text") for one in answers if isinstance(one, Mapping)] if isinstance(answers, list) else []


def _last_line(record: Record) -> list[object]:
    """Return the result, which follows ``####`` in the worked solution."""
    _, marked, result = str(record.get("answer")).rpartition("####")
    return [result] if marked else []


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_CONVERSATION = "messages"
_LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "et": "Estonian", "fi": "Finnish", "fr": "French", "gu": "Gujarati",
    "hi": "Hindi", "kk": "Kazakh", "lt": "Lithuanian", "lv": "Latvian", "ro": "Romanian", "ru": "Russian", "tr": "Turkish",
    "zh": "Chinese",
}  # fmt: skip
"""Languages of WMT, by code."""
FORMATS = {
    _CONVERSATION: PromptFormat("messages", _conversation),
    "mt_bench": PromptFormat("question_id+turns", _first_turn, "question_id"),  # and Spec-Bench, SPEED-Bench
    "squad": PromptFormat("context+question", _passage_and_question, answers=_passage_answers),
    "triviaqa": PromptFormat(
        "question+answer.value",
        lambda record: record.get("question") if _trivia_answers(record) else None,
        "question_id",
        _trivia_answers,
    ),
    "gsm8k": PromptFormat(
        "question+answer", lambda record: record.get("question") if "answer" in record else None, answers=_last_line
    ),
    "spider": PromptFormat("db_id+question+query", _database_question, answers=lambda record: [record.get("query")]),
    "wmt": PromptFormat("translation", _translation),
    "cnn_dailymail": PromptFormat("article+highlights", _article),
    "alpaca": PromptFormat("instruction", _instruction),
    "mbpp": PromptFormat("task_id+text", _task, "task_id"),
    "humaneval": PromptFormat(
        "task_id+prompt", lambda record: record.get("prompt") if "task_id" in record else None, "task_id"
    ),
    "prompt": PromptFormat("prompt", lambda record: record.get("prompt")),
    "text": PromptFormat("text", lambda record: record.get("text")),
}
"""Formats by name, which is also the category of records without one. The first that fits is used: specific ones come first."""


def _from_records(placed: Iterable[Placed], source: str) -> list[Prompt]:
    """Turn records into prompts with unique ids.

    A missing id becomes `CATEGORY-NUMBER`, and a repeated one gets `@NUMBER`, with the number of the record.
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
    """Turn a record into a prompt by the first format that fits; errors call its place `where`."""
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
            answers=tuple(dict.fromkeys(str(one).strip() for one in form.answers(record) if _is_text(one))),
        )
        try:  # JSON's \ud800 escapes pass the parser, but would fail in the tokenizer or the report
            f"{prompt.id}{prompt.category}{prompt.text}{''.join(prompt.answers)}".encode()
        except UnicodeEncodeError:
            raise UsageError(f"{where} has half a surrogate pair; allowed: valid Unicode; fix or remove it") from None
        return prompt
    found = ", ".join(repr(str(key)[:40]) for key in itertools.islice(record, 12)) or "none"
    keys = ", ".join(f"{form.keys} ({name})" for name, form in FORMATS.items())
    raise UsageError(f"{where} has no prompt; its keys: {found}; expected non-empty: {keys}; fix or remove it")


def _json_type(value: object) -> str:
    """Return what JSON calls the type of a value."""
    names = {str: "string", list: "array", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def load_prompts(source: str, limit: int | None = None, categories: Sequence[str] = ()) -> list[Prompt]:
    """Load the prompts of a source.

    Parameters
    ----------
    source : str
        `builtin`; the path of a JSON lines, JSON or text file, possibly gzipped, or of a Parquet file, with records in a format
        of `FORMATS`; a folder of such files, whose names are the categories of records without one; or `hf:NAME[:SPLIT]` for a
        dataset of the Hugging Face hub, where NAME may be `OWNER/NAME/CONFIG`, and SPLIT is by default `test`, or else the
        first split. If there is a file of this name, it is read instead.
    limit : int, optional
        Most prompts, 1 or more; None for all.
    categories : sequence of str
        Categories to keep; empty for all.

    Returns
    -------
    list of Prompt
        At least one prompt, in the source's order. With a limit, one of each category in turn, so that categories have equal
        shares, and a smaller limit gives the beginning of what a larger one gives.

    Raises
    ------
    UsageError
        If the source cannot be read, holds no prompt or a malformed one, or an argument is out of range.
    """
    if limit is not None and limit < 1:
        raise UsageError(
            f"prompt limit {limit} is out of range; allowed: whole numbers from 1; leave it out to use every prompt"
        )
    prompts = _from_records(records_of(source), source)
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
    if limit is None:
        return prompts
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return list(itertools.islice((prompt for prompt in turns if prompt is not None), limit))


def check_text(text: str) -> None:
    """Refuse text that is not valid Unicode, such as bytes of another encoding that a shell passed on."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid UTF-8 (at character {error.start}); give it in UTF-8") from None
