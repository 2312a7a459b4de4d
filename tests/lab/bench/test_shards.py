import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polydraft.errors import UsageError
from polydraft.lab.bench._runner import Journal, Measurement
from polydraft.lab.bench.shards import Shard, merge_shards
from polydraft.lab.charts import Chart
from polydraft.lab.papers import PAPERS, Comparison, Paper, Results, Run

METHODS = ("ar", "sd:2", "mcsd:2x1")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    texts = ["hello", "a tree", "why", "so", "what now"]
    prompts = [{"id": f"p{number}", "category": "aab"[number % 3], "prompt": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


@pytest.fixture
def bench(invoke, tiny: str, prompt_file: str):
    def call(out: Path, *options: str) -> tuple[int, str, str]:
        small = ("--max-new-tokens", "8", "--draft", "early-exit:2", "--target", tiny, "--prompts", prompt_file)
        return invoke("bench", *small, "--methods", " ".join(METHODS), "--out", str(out), *options)

    return call


def read(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_shards_take_turns_and_leave_nothing_out() -> None:
    items = list("abcdefg")
    shards = [Shard(index, 3) for index in (1, 2, 3)]
    assert [shard.select(items) for shard in shards] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    for shard in shards:
        assert [items[shard.place(position)] for position in range(len(shard.select(items)))] == shard.select(items)
    assert str(Shard.parse("2/12")) == "2/12"


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "-1/2", "a/b", "1/2/3", "1.0/2", "01/2", " 1/2"])
def test_a_bad_shard_is_refused_in_one_line(bench, tmp_path: Path, text: str) -> None:
    code, out, err = bench(tmp_path / "out", f"--shard={text}")
    assert code == 2 and out == "" and "I/N" in err and repr(text) in err and err.count("\n") == 1


def test_an_empty_shard_is_refused(bench, tmp_path: Path) -> None:
    code, _, err = bench(tmp_path / "out", "--shard", "6/6")
    assert code == 2 and "shard 6/6 is empty" in err and "5" in err


def test_shards_measure_their_share_and_merge_into_one(invoke, bench, tmp_path: Path) -> None:
    for index in (1, 2):
        code, _, err = bench(tmp_path / str(index), "--shard", f"{index}/2", "--repeat", "2")
        assert code == 0, err
    first = read(tmp_path / "1")
    assert first["settings"]["shard"] == "1/2" and first["settings"]["prompts"]["count"] == 3
    assert {one["prompt"] for one in map(json.loads, (tmp_path / "1" / "runs.jsonl").read_text().splitlines())} == {
        "p0", "p2", "p4",
    }  # fmt: skip
    code, out, err = invoke("bench", "merge", str(tmp_path / "all"), str(tmp_path / "2"), str(tmp_path / "1"))
    assert code == 0, err
    results = read(tmp_path / "all")
    assert results["machine"]["shards_side_by_side"] == 2 and "shard" not in results["settings"]
    assert results["settings"]["prompts"]["count"] == 5 and results["settings"]["prompts"]["categories"] == {"a": 4, "b": 1}
    assert [figures["prompts"] for figures in results["methods"].values()] == [5, 5, 5]
    assert all(figures["identical"] + figures["near_tie_differences"] == 5 for figures in results["methods"].values())
    assert "sd:2" in out and "sd:2" in (tmp_path / "all" / "report.html").read_text()
    code, _, err = invoke("bench", "merge", str(tmp_path / "all"), str(tmp_path / "2"), str(tmp_path / "1"))
    assert code == 2 and "already holds a benchmark" in err
    code, _, err = bench(tmp_path / "all", "--resume", "--repeat", "2")
    assert code == 2 and "all/2" in err, "one process would mix its own times in"


@pytest.mark.slow
def test_statistics_are_those_of_the_union(bench, tmp_path: Path) -> None:
    """A whole run's journal, dealt out to two folders and merged again, gives the whole run's results."""
    assert bench(tmp_path / "whole", "--repeat", "2")[0] == 0
    whole = read(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "runs.jsonl").read_text().splitlines()]
    for index in (1, 2):
        assert bench(tmp_path / str(index), "--shard", f"{index}/2", "--repeat", "2")[0] == 0
        mine = [one for one in lines if int(one["prompt"][1:]) % 2 == index - 1]
        (tmp_path / str(index) / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in mine))
    merged = merge_shards(tmp_path / "all", [tmp_path / "1", tmp_path / "2"], ["x"])
    for name, figures in whole["methods"].items():
        assert figures == merged["methods"][name]
    assert merged["settings"] == whole["settings"] and merged["trees"] == whole["trees"]
    key = lambda sample: (sample["category"], sample["method"], sample["prompt"])  # noqa: E731
    assert sorted(map(key, merged["samples"])) == sorted(map(key, whole["samples"]))
    assert json.loads(json.dumps(merged)) == read(tmp_path / "all")


def shard_folder(folder: Path, shard: str, *, prompt: str, likeness: str = "identical", **changes: object) -> Path:
    """Write a finished shard of one prompt, whose second method's text compares as said."""
    options = {"methods": ["ar", "x"], "source": "s", "temperature": 0.0, "repeat": 1, "seed": 0, "shard": shard, **changes}
    journal = Journal(folder, options, resume=False)
    for method, tokens in (("ar", [1, 2]), ("x", [1, 2] if likeness == "identical" else [1, 3])):
        journal.add(
            Measurement(
                method=method, prompt=prompt, category="a", repeat=0, seconds=1.0, first_token_seconds=None, token_ids=tokens,
                sources=["target"] * 2, passes=[0, 1], stats=None, peak_bytes=1,
            )
        )  # fmt: skip
    differing = [] if likeness == "identical" else [{"method": "x", "prompt": prompt, "likeness": likeness}]
    results = {
        "schema": 1,
        "git_revision": "abc",
        "machine": {"cpu": changes.get("cpu", "c")},
        "versions": {"torch": "1"},
        "settings": {"repeat": 1, "shard": shard, "prompts": {"source": "s", "count": 1, "categories": {"a": 1}}},
        "methods": {"ar": {"identical": 1}, "x": {"identical": 1}},
        "differing": differing,
        "trees": {},
        "samples": [],
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_verdicts_on_texts_come_from_the_shards(tmp_path: Path) -> None:
    kinds = ["identical", "near-tie", "different"]
    folders = [
        shard_folder(tmp_path / str(index), f"{index}/3", prompt=f"p{index}", likeness=kind)
        for index, kind in enumerate(kinds, start=1)
    ]
    figures = merge_shards(tmp_path / "all", folders, [])["methods"]["x"]
    assert (figures["identical"], figures["near_tie_differences"], figures["differences"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"shard": "2/2", "seed": 1}, "seed=1"),
        ({"shard": "2/2", "cpu": "d"}, "cpu='d'"),
        ({"shard": "2/3"}, "merge shards of one run"),
        ({"shard": "1/2"}, "given twice"),
        ({"shard": "2/2", "prompt": "p1"}, "both measured prompt 'p1'"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path: Path, other: dict[str, str], expected: str) -> None:
    first = shard_folder(tmp_path / "1", "1/2", prompt="p1")
    second = shard_folder(tmp_path / "2", **{"prompt": "p2", **other})
    with pytest.raises(UsageError, match=expected) as caught:
        merge_shards(tmp_path / "all", [first, second], [])
    assert "\n" not in str(caught.value) and not (tmp_path / "all").exists()


def test_missing_and_unfinished_shards_are_refused(invoke, tmp_path: Path) -> None:
    first, second = (shard_folder(tmp_path / str(index), f"{index}/2", prompt=f"p{index}") for index in (1, 2))
    with pytest.raises(UsageError, match="shard 2/2 is missing"):
        merge_shards(tmp_path / "all", [first], [])
    (second / "results.json").unlink()
    with pytest.raises(UsageError, match="not finished; finish it with --resume"):
        merge_shards(tmp_path / "all", [first, second], [])
    code, _, err = invoke("bench", "merge", str(tmp_path / "all"), str(first), str(tmp_path / "nowhere"))
    assert code == 2 and "holds no benchmark" in err and err.count("\n") == 1
    settings = json.loads((first / "settings.json").read_text())
    (first / "settings.json").write_text(json.dumps({**settings, "shard": None}))
    with pytest.raises(UsageError, match="a whole benchmark, not a shard"):
        merge_shards(tmp_path / "all", [first, second], [])


def small_table(results: Results) -> Comparison:
    rows = [[run, str(found["methods"]["mcsd:2x1"]["prompts"])] for run, found in results.items()]
    chart = Chart("prompts.svg", "a picture", "<svg/>")
    return Comparison(
        key="small", title="Small", runs=("t0",), columns=["run", "prompts"], ours=rows, published_note="nowhere",
        published_columns=["T"], published=[["1"]], charts=[chart],
    )  # fmt: skip


def test_a_reproduction_can_be_shared(invoke, bench, tmp_path: Path, registered: Callable[..., None]) -> None:
    counted = Run(name="t0", prompts="here", temperature=0.0, methods=("ar", "sd:2", "mcsd:2x1", "mcsd:3"))
    runs = (counted, replace(counted, name="t1", temperature=1.0, timed=True))
    registered(PAPERS, "small", Paper(title="A paper", runs=runs, tables=(small_table,)))
    for index in (1, 2):
        code, _, err = bench(tmp_path / str(index), "--reproduce", "small", "--limit", "5", "--shard", f"{index}/2")
        assert code == 0, err
    folders = [str(tmp_path / "1"), str(tmp_path / "2")]
    code, out, err = invoke("bench", "merge", str(tmp_path / "all"), *folders, "--reproduce", "small")
    assert code == 0, err
    text = (tmp_path / "all" / "reproduction.md").read_text()
    assert "| t0 | 5 |" in text and "| t1 | 5 |" in text and text in out
    assert "![a picture](prompts.svg)" in text and (tmp_path / "all" / "prompts.svg").read_text() == "<svg/>"
    assert read(tmp_path / "all" / "t1")["methods"]["mcsd:2x1"]["prompts"] == 5
    before = (tmp_path / "all" / "t1" / "results.json").stat().st_mtime_ns
    code, _, err = bench(tmp_path / "all", "--reproduce", "small", "--limit", "5", "--resume")
    assert code == 0 and (tmp_path / "all" / "t1" / "results.json").stat().st_mtime_ns == before, (
        "what is whole is not made again"
    )
    assert [*read(tmp_path / "all" / "t0")["methods"]] == ["ar", "sd:2", "mcsd:2x1"], "--methods leaves out the last"
    assert read(tmp_path / "all" / "t0")["settings"]["batch"] == 2 and "batch" not in read(tmp_path / "all" / "t1")["settings"]
