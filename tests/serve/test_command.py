"""`polydraft serve` as a process: it starts, says where, and leaves in good order."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import httpx
import pytest

LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "logit_bias": {"256": -100}, "stream": True}


@contextmanager
def process(*arguments):
    command = [sys.executable, "-m", "polydraft", "serve", "--port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as one:
        try:
            lines = []
            for line in one.stderr:
                lines.append(line)
                if found := re.search(r"serving \S+ at (http://\S+)", line):
                    yield one, found[1]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            one.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_answers_end(roomy, number):
    with process("--target", roomy, "--draft", "early-exit:1", "--tree", "2x1", "--slot-tokens", "512") as (one, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            one.send_signal(number)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert one.wait(30) == 0


def test_wrong_options_take_no_time(invoke, tmp_path):
    for arguments, message in (
        (["--host", "0.0.0.0"], "--api-keys FILE"),
        (["--slots", "0"], "--slots 0 is out of range"),
        (["--replicas", "2"], "go with --ray"),
        (["--ray", "--replicas", "0"], "--replicas 0 is out of range"),
        (["--ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is less than --replicas 3"),
        (["--ray", "--port", "0"], "polydraft[ray]" if find_spec("ray") is None else "--port 0"),
        (["--api-keys", str(tmp_path / "none")], "cannot read --api-keys"),
    ):
        code, _, err = invoke("serve", *arguments)
        assert code == 2 and message in err and err.count("\n") == 1
