"""Prompts load from every format we name, spread evenly under a limit, and bad sources are refused in one line."""

import errno
import gzip
import json
import os
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from polydraft.errors import UsageError
from polydraft.prompts import FORMATS, Prompt, load_prompts

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
RECORDS = {
    "prompt": [
        ({"id": "a-1", "category": "greeting", "prompt": "Say hello."}, Prompt("a-1", "greeting", "Say hello.")),
        ({"prompt": "Say hello."}, Prompt("prompt-1", "prompt", "Say hello.")),
    ],
    "mt_bench": [
        ({"question_id": 7, "category": "odd", "turns": ["One?", "Two?"]}, Prompt("7", "odd", "One?")),
        ({"question_id": 0, "category": "", "turns": ["One?"], "reference": ["x"]}, Prompt("0", "mt_bench", "One?")),
    ],
    "alpaca": [
        ({"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"}, Prompt("alpaca-1", "alpaca", "Sort.\n\n3 1 2")),
        ({"instruction": "Sing.", "input": "", "output": "La."}, Prompt("alpaca-1", "alpaca", "Sing.")),
    ],
    "messages": [
        ({"messages": TALK, "id": 7}, Prompt("7", "messages", "Be brief.\n\nHi.", tuple(TALK))),
        ({"messages": TALK, "prompt": "other"}, Prompt("messages-1", "messages", "Be brief.\n\nHi.", tuple(TALK))),
    ],
    "gsm8k": [
        ({"question": "1 + 1?", "answer": "Add.\n#### 2"}, Prompt("gsm8k-1", "gsm8k", "1 + 1?", answers=("2",))),
        ({"question": "1 + 1?", "answer": "two"}, Prompt("gsm8k-1", "gsm8k", "1 + 1?")),
    ],
    "triviaqa": [
        (
            {"question_id": "t1", "question": "Who?", "answer": {"value": "Al", "aliases": ["Al", "Alan"]}},
            Prompt("t1", "triviaqa", "Who?", answers=("Al", "Alan")),
        ),
    ],
    "spider": [
        (
            {"db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM t"},
            Prompt(
                "spider-1",
                "spider",
                "Write an SQL query for the database 'shop'.\n\nQuestion: How many?\nSQL: ",
                answers=("SELECT count(*) FROM t",),
            ),
        ),
    ],
    "wmt": [
        (
            {"translation": {"en": "Good day.", "de": "Guten Tag."}},
            Prompt("wmt-1", "wmt", "Translate the input English sentence into German.\nInput: Good day.\nOutput: "),
        ),
    ],
    "cnn_dailymail": [
        (
            {"article": "It rained.", "highlights": "Rain.", "id": "c1"},
            Prompt("c1", "cnn_dailymail", "Summarize: It rained."),
        ),
    ],
    "humaneval": [
        (
            {"task_id": "Mine/0", "prompt": "def f():\n", "entry_point": "f", "test": ""},
            Prompt("Mine/0", "humaneval", "def f():\n"),
        ),
    ],
    "mbpp": [
        ({"task_id": 5, "text": "Write f.", "code": "", "test_list": []}, Prompt("5", "mbpp", "Write f.")),
        ({"task_id": 6, "prompt": "Write g.", "code": "", "test_list": []}, Prompt("6", "mbpp", "Write g.")),
    ],
    "squad": [
        (
            {"id": "s1", "title": "T", "context": "It is red.", "question": "Colour?", "answers": {"text": ["red"]}},
            Prompt("s1", "squad", "It is red.\n\nQuestion: Colour?", answers=("red",)),
        ),
    ],
    "text": [({"text": "Just this."}, Prompt("text-1", "text", "Just this."))],
}
CASES = [(record, expected) for pairs in RECORDS.values() for record, expected in pairs]
CONTAINERS = {
    "lines.jsonl": json.dumps,
    "array.json": lambda record: json.dumps([record]),
    "pretty.json": lambda record: json.dumps([record], indent=2),
    "data.json": lambda record: json.dumps({"version": "1", "data": [record]}),
    "pretty_data.json": lambda record: json.dumps({"version": "1", "data": [record]}, indent=2),
    "half_data.json": lambda record: '{"data": [\n' + json.dumps(record) + "\n]}",
    "no_suffix": lambda record: "\ufeff\n" + json.dumps(record) + "\r\n\r\n",
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def refusal(*args, **kwargs):
    with pytest.raises(UsageError) as caught:
        load_prompts(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert "allowed" in message or "expected" in message
    return message


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def many(**counts):
    return jsonl(*({"id": f"{c}{n}", "category": c, "prompt": f"{c} {n}"} for c, k in counts.items() for n in range(k)))


def test_every_format_is_tried():
    assert set(RECORDS) == set(FORMATS)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("record", "expected"), CASES, ids=lambda case: None)
def test_every_format_in_every_container_zipped_or_not(write, record, expected, container):
    content = CONTAINERS[container](record)
    assert load_prompts(write(content, container)) == [expected]
    assert load_prompts(write(gzip.compress(content.encode()), container + ".gz")) == [expected]


@pytest.mark.parametrize("layout", [json.dumps, lambda document: json.dumps(document, indent=1)], ids=["flat", "indented"])
def test_original_squad_nesting(write, layout):
    qas = [{"id": "q1", "question": "Who?", "answers": []}, {"id": "q2", "question": "Where?", "answers": []}]
    articles = [{"title": "T", "paragraphs": [{"context": "Al, in Rome.", "qas": qas}, {"context": "Bo.", "qas": qas[:1]}]}]
    prompts = load_prompts(write(layout({"version": "1.1", "data": articles})))
    assert [prompt.text for prompt in prompts] == [
        "Al, in Rome.\n\nQuestion: Who?",
        "Al, in Rome.\n\nQuestion: Where?",
        "Bo.\n\nQuestion: Who?",
    ]
    assert len({prompt.id for prompt in prompts}) == 3


@pytest.mark.parametrize("first", ["Tell me a joke.", "[INST] Tell me a joke.", '"Why?" she asked.'])
def test_plain_text_is_a_prompt_a_line(write, first):
    prompts = load_prompts(write(f"\n{first}\r\n\n  \nÜber den Fluss\n", "prompts.txt"))
    assert [(prompt.category, prompt.text) for prompt in prompts] == [("text", first), ("text", "Über den Fluss")]


def test_unicode_line_separators_do_not_break_json_lines(write):
    content = json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    assert [prompt.text for prompt in load_prompts(write(content + "\n" + content))] == ["a\u2028b\u0085c"] * 2


def test_ids_are_unique_even_where_the_file_repeats_them(write):
    prompts = load_prompts(write(jsonl({"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}, {"prompt": "c"})))
    assert [prompt.id for prompt in prompts] == ["x", "x@2", "prompt-3"]


def test_limit_goes_round_the_categories(write):
    path = write(many(a=5, b=1, c=2))
    assert [prompt.id for prompt in load_prompts(path, limit=6)] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert [prompt.id for prompt in load_prompts(path, limit=2)] == ["a0", "b0"]
    assert len(load_prompts(path, limit=100)) == 8
    assert [prompt.id for prompt in load_prompts(path)] == ["a0", "a1", "a2", "a3", "a4", "b0", "c0", "c1"]


def test_categories_are_kept_in_the_file_order(write):
    path = write(many(a=2, b=1, c=2))
    assert [prompt.id for prompt in load_prompts(path, categories=["c", "a"])] == ["a0", "a1", "c0", "c1"]
    assert [prompt.id for prompt in load_prompts(path, 2, ("a", "c"))] == ["a0", "c0"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', ["line 3", "malformed"]),
        ("p.jsonl", '{"prompt": "a"\n{"prompt": "b"}\n', ["line 1", "malformed"]),
        ("p.jsonl", '{"prompt": "a"}\nb\n', ["line 2", "malformed"]),
        ("p.jsonl", '"prompt": "a"}\n', ["line 1", "malformed"]),
        ("p.json", '[{"prompt": "a"},\n {"prompt" "b"}]', ["line 2", "malformed"]),
        ("p.json", '{"data": [\n{"prompt": "a"},\n', ["line 3", "malformed"]),
        ("p.json", "[" * 100_000, ["line 1", "malformed"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n[1]\n', ["line 3", "array"]),
        ("p.json", '["a"]', ["record 1", "string"]),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"query": "b"}\n',
            ["line 2", "no prompt", "'query'", "question_id+turns", "instruction"],
        ),
        ("p.jsonl", '\n{"query": "b"}\n', ["line 2", "no prompt"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "  "}\n', ["line 2", "no prompt"]),
        ("p.jsonl", '{"prompt": "a"}\n{"question_id": 1, "turns": []}\n', ["line 2", "no prompt", "'turns'"]),
        ("p.json", '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1}]}]}]}', ["record 1, paragraph 1, question 1"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud800"}\n', ["line 2", "surrogate"]),
        ("p.jsonl", '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}, 5]}\n', ["line 2", "message 2"]),
        ("p.jsonl", '{"prompt": "a"}\n{"messages": [{"content": "a"}]}\n', ["line 2", "no role and content in message 1"]),
        ("p.txt", b"gut\nf\xfcr\n", ["line 2", "UTF-8"]),
        ("p.txt.gz", gzip.compress(b"Hello there.\n" * 9, mtime=0)[:-9], ["gzip"]),
        ("p.txt", "", ["holds no prompts"]),
        ("p.txt", " \n\n", ["holds no prompts"]),
        ("p.json", "[]", ["holds no prompts"]),
        ("p.json", '{"data": []}', ["holds no prompts"]),
    ],
)
def test_bad_files_are_refused_with_the_place(write, name, content, words):
    path = write(content, name)
    message = refusal(path)
    assert path in message
    for word in words:
        assert word in message


def test_sources_that_cannot_be_read(tmp_path):
    assert "not found" in refusal(str(tmp_path / "absent.jsonl"))
    assert "not found" in refusal("")
    assert "no files of prompts" in refusal(str(tmp_path))
    assert "cannot be read" in refusal("a\0b")
    assert "cannot be read" in refusal("x" * 5000)


def test_a_folder_is_all_its_files(write, tmp_path):
    write('{"prompt": "def f():", "task_id": "HumanEval/0"}\n', "HumanEval.jsonl")
    write('{"question_id": 1, "category": "own", "turns": ["One?"]}\n{"question_id": 1, "turns": ["Two?"]}\n', "question.jsonl")
    write("no prompts", "README.md")
    found = load_prompts(str(tmp_path))
    assert [(prompt.id, prompt.category, prompt.text) for prompt in found] == [
        ("HumanEval/0", "HumanEval", "def f():"),
        ("1", "own", "One?"),
        ("1@3", "question", "Two?"),
    ]
    write('{"prompt": "a"}\n{"query": "b"}\n', "zero.jsonl")
    message = refusal(str(tmp_path))
    assert "line 2 of zero.jsonl" in message and "no prompt" in message


def test_a_table_of_turns(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table(
        {
            "question_id": ["a", "b"],
            "category": ["coding", "rag"],
            "turns": [["One?", "Two?"], ["Three?"]],
            "multiturn": [True, False],
        }
    )
    parquet.write_table(table, tmp_path / "test-00000-of-00001.parquet")
    found = load_prompts(str(tmp_path))
    assert [(prompt.id, prompt.category, prompt.text) for prompt in found] == [("a", "coding", "One?"), ("b", "rag", "Three?")]
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    assert "complete Parquet file" in refusal(str(tmp_path / "test-00000-of-00001.parquet"))


def test_a_file_without_rights(write, monkeypatch):
    path = write("Hello.\n")

    def denied(file):  # whom the file system refuses nothing, such as root, must see it too
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    assert "cannot be read (Permission denied)" in refusal(path)


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit):
    assert str(limit) in refusal("builtin", limit=limit)


def test_unknown_category_lists_the_allowed(write):
    message = refusal(write(many(maths=1, coding=1)), categories=["maths", "codng"])
    assert "'codng'" in message and "did you mean 'coding'" in message and "coding, maths" in message


def test_hub_dataset_in_any_of_the_formats(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    calls = []
    splits = {"train": [{"text": "No."}], "test": [{"question": "1?", "answer": "1"}]}

    def load_dataset(*args, split):
        calls.append((*args, split))
        return splits[split] if split else splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_prompts("hf:owner/sums/main") == [Prompt("gsm8k-1", "gsm8k", "1?")]
    assert load_prompts("hf:plain:train") == [Prompt("text-1", "text", "No.")]
    assert calls == [("owner/sums", "main", None), ("plain", None, "train")]
    message = refusal("hf:plain:dev")
    assert "cannot be loaded" in message and "dev" in message
    assert "does not name a dataset" in refusal("hf:")
    (tmp_path / "hf:plain").write_text("A file goes first.\n")
    assert load_prompts("hf:plain")[0].text == "A file goes first."


def test_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal("hf:owner/sums:test")


def test_builtin_prompts_are_many_varied_and_distinct():
    prompts = load_prompts("builtin")
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) >= 8 and min(counts.values()) >= 10
    assert len({prompt.id for prompt in prompts}) == len(prompts) and not any("@" in prompt.id for prompt in prompts)
    assert len({" ".join(prompt.text.lower().split()) for prompt in prompts}) == len(prompts)
    assert all(prompt.text == prompt.text.strip() and len(prompt.text) > 20 for prompt in prompts)
    assert all(prompt.id.rsplit("-", 1)[0].replace("-", "_") == prompt.category for prompt in prompts)
    assert len({prompt.category for prompt in load_prompts("builtin", limit=len(counts))}) == len(counts)
