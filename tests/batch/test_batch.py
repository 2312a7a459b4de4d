"""`polydraft batch`: rows in, results out in their order, whatever happens on the way."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covering import keeping
from polydraft.batch.files import BatchOptions, PromptFile, ResultFile
from polydraft.batch.runner import BatchTask, generate_rows, write_all
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.loading import load
from polydraft.models import check_prompts
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_seed

WARM = SamplingParams(temperature=1.0)
TASK = BatchTask(sampling=WARM, max_new_tokens=12, seed=5, raw=True)
OPTIONS = BatchOptions(slots=3, slot_tokens=96)


@pytest.fixture(scope="module")
def decoder(roomy: str) -> Decoder:
    return load(roomy, "early-exit:1", tree="2x1", device="cpu", dtype="float32")


def prompts_file(folder: Path, count: int = 14) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"n{n}", "prompt": f"number {n}" * (1 + n % 3)}) + "\n" for n in range(count)))
    return file


def ran(decoder: Decoder, file: Path, out: Path, *, resume: bool = False, task: BatchTask = TASK, after: int | None = None):
    """Run to the end, or to an exception once so many rows are written."""
    prompts = PromptFile(file, OPTIONS.max_row_bytes)
    results = ResultFile(out, {"seed": task.seed, "prompts": prompts.digest}, resume=resume)
    seen: list[int] = []

    def observe(row: int, totals: object) -> None:
        seen.append(row)
        if after is not None and row >= after:
            raise KeyboardInterrupt

    try:
        write_all(generate_rows(decoder, prompts.rows(results.last), task, OPTIONS), results, observe)
    finally:
        results.close()
    assert seen == sorted(seen)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_results_are_those_of_generate_in_the_order_of_the_rows(decoder: Decoder, tmp_path: Path) -> None:
    file = prompts_file(tmp_path)
    results = ran(decoder, file, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["row"] for one in results] == list(range(1, 15)) and [one["id"] for one in results] == [
        one["id"] for one in rows
    ]
    for number, (row, one) in enumerate(zip(rows, results, strict=True), start=1):
        alone = decoder.generate([row["prompt"]], sampling=WARM, max_new_tokens=12, seed=[row_seed(5, number)])[0]
        assert one["text"] == alone.text and one["new_tokens"] == len(alone.token_ids)
        assert one["stop_reason"] == alone.stop_reason.value and one["passes"] == alone.stats.passes
    totals = json.loads((tmp_path / "out.jsonl.run.json").read_text())["totals"]
    assert totals["rows"] == 14 and totals["new_tokens"] == sum(one["new_tokens"] for one in results)


@pytest.mark.parametrize("after", keeping([1, 6, 13], 6))
def test_an_interrupted_run_goes_on_without_losing_or_repeating_a_row(decoder: Decoder, tmp_path: Path, after: int) -> None:
    file = prompts_file(tmp_path)
    whole = ran(decoder, file, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ran(decoder, file, out, after=after)
    assert len(out.read_text().splitlines()) >= after
    with out.open("ab") as torn:  # what a kill leaves of a line
        torn.write(b'{"row": 14, "te')
    again = ran(decoder, file, out, resume=True)
    drop = ("seconds",)
    assert [{k: v for k, v in one.items() if k not in drop} for one in again] == [
        {k: v for k, v in one.items() if k not in drop} for one in whole
    ]
    assert ran(decoder, file, out, resume=True) == again  # there is nothing left to do


def test_bad_rows_are_reported_by_number_and_stop_nobody(decoder: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        b'{"prompt": "good"}',
        b"{broken",
        b"",
        b'{"nothing": 1}',
        b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
        b'{"prompt": "\xff\xfe"}',
        b"[1, 2]",
        b'{"prompt": "' + b"long " * 40 + b'"}',
        b'{"messages": [{"role": "user", "content": "good"}]}',
        b'{"messages": [5]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "good, without an end of line"}',
    ]
    file.write_bytes(b"\n".join(lines))
    results = ran(decoder, file, tmp_path / "out.jsonl")
    assert [one["row"] for one in results] == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    errors = {one["row"]: one["error"] for one in results if "error" in one}
    assert list(errors) == [2, 4, 5, 6, 7, 8, 10, 11]
    for row, says in {
        2: "line 2 of prompt source",
        4: "no prompt",
        5: "more than 1048576 bytes",
        6: "UTF-8",
        7: "not a JSON object",
        8: "leaves no room",
        10: "no role and content in message 1",
    }.items():
        assert says in errors[row]


def test_batch_bench_tune_and_all_others_read_the_same_prompts(tmp_path: Path, tiny: str, invoke, monkeypatch) -> None:
    """One file, with a conversation in it: whoever reads it encodes the same tokens."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    talk = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ({"messages": talk}, {"prompt": "hello"})))
    wanted = {"<system>brief</><user>hi</><assistant>", "<user>hello</><assistant>"}
    seen: set[str] = set()
    check = check_prompts

    def watched(prompts, *rest):
        seen.update(tokenizer.decode(prompt) for prompt in prompts)
        check(prompts, *rest)

    tokenizer = load(tiny, device="cpu").tokenizer
    for module in ("batch.runner", "tune.tuning", "lab.bench.session", "lab.analyze.analysis", "certify.greedy_identity"):
        monkeypatch.setattr(f"polydraft.{module}.check_prompts", watched)
    small = ["--target", tiny, "--device", "cpu", "--max-new-tokens", "8"]
    pair = [*small, "--draft", "early-exit:1", "--prompts", str(file)]
    for command in (
        ["batch", str(file), "--out", str(tmp_path / "out"), *small],
        ["tune", *pair[:6], "--prompts", str(file), "--batch-size", "1", "--minutes", "0.001"],
        ["bench", *pair, "--methods", "ar", "--out", str(tmp_path / "bench")],
        ["analyze", *pair, "--temperature", "1", "--drafts", "1", "--positions", "4", "--schemes", "naive"],
        ["certify", "decoder", *pair, "--tree", "1"],
    ):
        seen.clear()
        code, _, err = invoke(*command)
        assert code == 0, err
        assert wanted <= seen, (command, seen)
    file.write_text('{"prompt": "hello"}\n{"messages": [5]}\n')
    for command in ("tune", "analyze", "bench", "certify"):
        extra = {"bench": ["--out", str(tmp_path / "other")], "certify": []}.get(command, [])
        name = [command, "decoder"] if command == "certify" else [command]
        code, _, err = invoke(*name, *pair, *extra)
        assert code == 2 and "line 2 of prompt source" in err and "message 1" in err, err


def test_a_failing_text_fails_alone(tmp_path: Path, broken: str) -> None:
    decoder = load(broken, device="cpu", dtype="float32")
    results = ran(decoder, prompts_file(tmp_path, 3), tmp_path / "out.jsonl")
    assert len(results) == 3 and all("not numbers" in one["error"] for one in results)


def test_text_and_gzip(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("[INST] one\n\ntwo")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"[INST] one\n\ntwo"))
    plain, packed = (ran(decoder, tmp_path / name, tmp_path / f"{name}.out") for name in ("a.txt", "b.txt.gz"))
    assert [one["text"] for one in plain] == [one["text"] for one in packed] and [one["row"] for one in plain] == [1, 3]


def test_a_full_disk_leaves_whole_rows_and_says_how_to_go_on(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = prompts_file(tmp_path, 8), tmp_path / "out.jsonl"
    whole = ran(decoder, file, tmp_path / "whole.jsonl")
    results = ResultFile(out, {"seed": 5, "prompts": PromptFile(file, 2**20).digest}, resume=False)
    real = results._file

    class Full:
        room = 700

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = min(len(data), self.room)
            self.room -= count
            return real.write(data[:count])

        def close(self) -> None:
            real.close()

    results._file = Full()
    with pytest.raises(FailureError, match=r"No space left.*--resume"):
        write_all(
            generate_rows(decoder, PromptFile(file, 2**20).rows(results.last), TASK, OPTIONS), results, lambda row, totals: None
        )
    results.close()
    assert out.stat().st_size == 700
    assert [one["text"] for one in ran(decoder, file, out, resume=True)] == [one["text"] for one in whole]


def test_what_cannot_be_gone_on_with(decoder: Decoder, tmp_path: Path) -> None:
    file, out = prompts_file(tmp_path, 2), tmp_path / "out.jsonl"
    ran(decoder, file, out)
    with pytest.raises(UsageError, match="already exists; pass --resume"):
        ran(decoder, file, out)
    with pytest.raises(UsageError, match="was started with seed=5, not 6"):
        ran(decoder, file, out, resume=True, task=BatchTask(sampling=WARM, max_new_tokens=12, seed=6, raw=True))
    file.write_text(file.read_text() + '{"prompt": "more"}\n')
    with pytest.raises(UsageError, match="was started with prompts="):
        ran(decoder, file, out, resume=True)
    out.write_text('{"row": 1}\nnothing\n{"row": 2}\n')
    with pytest.raises(FailureError, match=r"line 2 of .* is not a result"):
        ran(decoder, prompts_file(tmp_path, 2), out, resume=True)
    (tmp_path / "out.jsonl.run.json").unlink()
    with pytest.raises(UsageError, match="is missing"):
        ran(decoder, file, out, resume=True)
    with pytest.raises(UsageError, match=r"cannot write to .* \(Is a directory\); choose another --out"):
        ran(decoder, file, tmp_path)


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl", {}, resume=False)
    with pytest.raises(UsageError, match="another process is writing"):
        ResultFile(tmp_path / "out.jsonl", {}, resume=False)
    first.close()
    ResultFile(tmp_path / "out.jsonl", {}, resume=True).close()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ('[{"prompt": "a"}]', "JSON array"),
        ('[\n{"prompt": "a"}]', "JSON array"),
    ],
)
def test_files_that_are_no_batch(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(UsageError, match=says):
        PromptFile(tmp_path / "file", 2**20)


def test_memory_does_not_grow_with_rows(decoder: Decoder, tmp_path: Path) -> None:
    """What is held at the end of many rows is what is held at the end of few."""
    import gc

    from polydraft.engine import TokenSequence

    def sequences() -> list[TokenSequence]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is TokenSequence]

    file = prompts_file(tmp_path, 120)
    most, left_by_other_tests = 0, sequences()

    def observe(row: int, totals: object) -> None:
        nonlocal most
        if row % 30 == 0:
            most = max(most, len(sequences()) - len(left_by_other_tests))

    prompts = PromptFile(file, 2**20)
    results = ResultFile(tmp_path / "out.jsonl", {}, resume=False)
    task = BatchTask(sampling=WARM, max_new_tokens=2, seed=0, raw=True)
    write_all(generate_rows(decoder, prompts.rows(results.last), task, OPTIONS), results, observe)
    results.close()
    assert 0 < most <= 4 * OPTIONS.slots


COMMAND = (
    "--max-new-tokens",
    "6",
    "--raw",
    "--tree",
    "2x1",
    "--draft",
    "early-exit:1",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--slots",
    "2",
    "--slot-tokens",
    "128",
)


def test_the_command(invoke, roomy: str, tmp_path: Path) -> None:
    file, out = prompts_file(tmp_path, 5), tmp_path / "out.jsonl"
    code, printed, err = invoke("batch", str(file), "--out", str(out), "--target", roomy, "--json", *COMMAND)
    assert code == 0, err
    totals = json.loads(printed)
    assert totals["rows"] == 5 and totals["bad"] == 0 and totals["tokens_per_second"] > 0
    file.write_text('{"prompt": "fine"}\nnot so\n')
    code, _, err = invoke("batch", str(file), "--out", str(tmp_path / "other.jsonl"), "--target", roomy, *COMMAND)
    assert code == 1 and "1 of 2 rows could not be used: 2;" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.txt", "--out", "x"), "cannot read none.txt"),
        (("none.txt",), "Missing option '--out'"),
        (("none.txt", "--out", "x", "--slots", "0"), "--slots 0 is out of range"),
        (("none.txt", "--out", "x", "--temperature", "-1"), "temperature=-1.0 is out of range"),
    ],
)
def test_errors_of_the_command(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke("batch", *arguments)
    assert code == 2 and says in err and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(invoke, tiny: str, tmp_path: Path) -> None:
    code, _, err = invoke("batch", str(prompts_file(tmp_path)), "--out", str(tmp_path / "gone" / "out"), "--target", tiny)
    assert code == 2 and "cannot write to" in err


@pytest.mark.slow
def test_killed_without_a_word(roomy: str, tmp_path: Path) -> None:
    """SIGKILL in the middle, twice, then to the end: the results of one undisturbed run."""
    file, out = prompts_file(tmp_path, 60), tmp_path / "out.jsonl"
    arguments = [
        sys.executable,
        "-m",
        "polydraft",
        "batch",
        str(file),
        "--target",
        roomy,
        "--threads",
        "1",
        "--temperature",
        "1",
        *COMMAND,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for rows in (8, 25):
        process = subprocess.Popen([*arguments, "--out", str(out), "--resume"], **quiet)
        limit = time.monotonic() + 120
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < rows):
            assert time.monotonic() < limit
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for target in (out, tmp_path / "whole.jsonl"):
        done = subprocess.run([*arguments, "--out", str(target), "--resume"], check=False, timeout=120, **quiet)
        assert done.returncode == 0
    resumed, whole = ([json.loads(line) for line in one.read_text().splitlines()] for one in (out, tmp_path / "whole.jsonl"))
    assert [(one["row"], one["text"]) for one in resumed] == [(one["row"], one["text"]) for one in whole]
    assert len(whole) == 60
