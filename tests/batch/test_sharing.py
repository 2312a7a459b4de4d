"""`polydraft batch --ray`: workers of a real cluster share the rows, and the file is that of one process."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polydraft.batch.files import WorkerOptions
from polydraft.errors import UsageError

needs_ray = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow")),
    reason="pip install 'polydraft[ray]' for this test",
)
MODEL = [
    "--draft",
    "early-exit:1",
    "--tree",
    "2x1",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--temperature",
    "1",
    "--seed",
    "5",
]
SIZE = ["--slots", "2", "--slot-tokens", "96", "--max-new-tokens", "16", "--raw"]
TWO = ["--ray", "--workers", "2", "--worker-cpus", "0.5"]
COUNTED = ("row", "text", "new_tokens", "stop_reason", "error")


def batch(target: str, file: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "polydraft", "batch", str(file), "--out", str(out), "--target", target]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen([*command, *MODEL, *SIZE, *more], stderr=subprocess.PIPE, text=True, env=environment)


def results(out: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return [{name: one.get(name) for name in COUNTED} for one in found]


def workers() -> list[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "ray::" in line and "Worker" in line.split(None, 1)[1]]


@needs_ray
@pytest.mark.slow
def test_workers_write_what_one_process_does_even_when_one_is_killed(roomy: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"number {number}\n" * (number != 7) or "\xff" * 200 + "\n" for number in range(260)))
    with batch(roomy, file, tmp_path / "one.jsonl") as one:
        one.communicate(timeout=300)
    with batch(roomy, file, tmp_path / "two.jsonl", *TWO) as two:
        deadline = time.monotonic() + 120
        while not (found := workers()) and time.monotonic() < deadline and two.poll() is None:
            time.sleep(0.2)
        assert found, two.communicate(timeout=60)[1]
        time.sleep(3)
        os.kill(found[0], signal.SIGKILL)
        said = two.communicate(timeout=300)[1]
    assert one.returncode == two.returncode == 1, said  # the long prompt
    assert "1 of 260 rows could not be used: 8" in said
    assert results(tmp_path / "two.jsonl") == results(tmp_path / "one.jsonl")
    with batch(roomy, file, tmp_path / "two.jsonl", *TWO, "--resume") as again:
        assert again.communicate(timeout=60) is not None and again.returncode == 1
    assert len(results(tmp_path / "two.jsonl")) == 260


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_room_is_named(roomy: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n")
    out = tmp_path / "out.jsonl"
    with batch(roomy, tmp_path / "prompts.txt", out, "--ray", "--workers", "1000") as none:
        said = none.communicate(timeout=120)[1]
    assert none.returncode == 1 and "but 1000 workers need 1000; use fewer, or --worker-cpus" in said.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["2x1", "dynamic:8"])  # the latter's costs are one process's to measure
def test_processes_that_share_a_model_write_one_file(roomy: str, tmp_path: Path, tree: str) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "two.jsonl"
    file.write_text("".join(f"number {number} of many\n" for number in range(9)))
    model = ["--target", roomy, "--draft", roomy, "--tree", tree, "--dtype", "float32", "--threads", "1"]
    size = ["--slots", "2", "--slot-tokens", "96", "--max-new-tokens", "12", "--raw"]  # at temperature 0: rounding differs
    together = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0"]

    def run(place: Path, *start: str, more: tuple[str, ...] = ()) -> None:
        command = [sys.executable, *start, "-m", "polydraft", "batch", str(file), "--out", str(place), *model, *size, *more]
        environment = {**os.environ, "POLYDRAFT_CACHE": str(tmp_path / place.stem)}
        subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)

    run(tmp_path / "one.jsonl")
    run(out, *together, more=("--device-map", "tp"))
    assert results(out) == results(tmp_path / "one.jsonl")
    out.write_text("".join(line for line in out.read_text().splitlines(keepends=True)[:4]))
    run(out, *together, more=("--device-map", "tp", "--resume"))
    assert results(out) == results(tmp_path / "one.jsonl")


def test_what_processes_that_share_a_model_cannot_do_is_refused(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = invoke("serve", "--device-map", "tp", "--ray")
    assert code == 2 and "--device-map tp and --ray cannot be combined; leave one out" in err
    code, _, err = invoke("generate", "hello", "--device-map", "tp", "--tree", "load:2x1")
    assert code == 2 and "each process times its own rounds" in err and "use --tree 2x1" in err


def test_workers_without_a_cluster_are_refused() -> None:
    with pytest.raises(UsageError, match="--worker-gpus work only with --ray"):
        WorkerOptions(workers=2)
    with pytest.raises(UsageError, match=r"--worker-cpus 0.0 is out of range; allowed: 0.01 to 10000"):
        WorkerOptions(ray=True, worker_cpus=0.0)
