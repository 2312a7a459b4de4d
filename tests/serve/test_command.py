"""`polydraft serve` as a process: it starts, says where, and leaves in good order."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import httpx
import pytest

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "logit_bias": {"256": -100}, "stream": True}


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


@pytest.fixture
def own_log():
    """The command's log goes to its standard error, which is gone when the test is over."""
    logger = logging.getLogger("polydraft")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def served_until_signalled(roomy, invoke, body, *numbers):
    """Ask for a stream, send signals after its first line; return the answer's lines, the exit code and standard error.

    In this process, whose main thread signals go to: starting another one takes longer than all the rest.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def ask():
        try:
            limit = time.monotonic() + 60
            while time.monotonic() < limit:
                with suppress(httpx.TransportError), httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as answer:
                    lines = answer.iter_lines()
                    first = next(lines)
                    for number in numbers:
                        os.kill(os.getpid(), number)
                        time.sleep(0.2)  # two that come together are one
                    return [first, *lines]
                time.sleep(0.02)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    options = ["--target", roomy, "--draft", "early-exit:1", "--tree", "2x1", "--slot-tokens", "512", "--threads", "1"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        code, _, err = invoke("serve", "--port", url.rpartition(":")[2], *options)
    assert f"at {url}" in err
    return asked.result(), code, err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("own_log")
def test_a_signal_lets_answers_end(roomy, invoke, number):
    lines, code, _ = served_until_signalled(roomy, invoke, LONG, number)
    assert code == 0 and "data: [DONE]" in lines


@pytest.mark.usefixtures("own_log")
def test_a_second_signal_ends_answers_by_name(roomy, invoke):
    lines, code, err = served_until_signalled(roomy, invoke, {**LONG, "max_tokens": 480}, signal.SIGINT, signal.SIGINT)
    assert code == 0 and "Traceback" not in err and "Error" not in err
    assert any("stopped before the answer was complete" in line for line in lines)


@pytest.mark.parametrize("style", ["text", "json"])
def test_it_speaks_and_listens_before_torch_is_imported(style):
    """That takes seconds, on a busy machine half a minute."""
    script = "import sys; sys.modules['torch'] = None; from polydraft.cli.main import run; run(sys.argv[1:])"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (0, taken.getsockname()[1]):
            command = [sys.executable, "-c", script, "serve", "--port", str(port), "--log-format", style]
            err = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60).stderr
            lines = [json.loads(line) for line in err.splitlines()] if style == "json" else err.splitlines()
            first = lines[0]["message"] if style == "json" else lines[0]
            if port:
                assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in first and len(lines) == 1
            else:
                assert first.endswith("loading smollm2")
                assert style == "text" or "ModuleNotFoundError" in lines[-1]["traceback"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_process_lets_answers_end(roomy, number):
    with process("--target", roomy, "--draft", "early-exit:1", "--tree", "2x1", "--slot-tokens", "512") as (one, url):
        with httpx.stream("POST", f"{url}{CHAT}", json=LONG, timeout=60) as answer:
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
        (["--replicas", "2"], "work only with --ray"),
        (["--ray", "--replicas", "0"], "--replicas 0 is out of range"),
        (["--ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is less than --replicas 3"),
        (["--ray", "--port", "0"], "polydraft[ray]" if find_spec("ray") is None else "--port 0"),
        (["--api-keys", str(tmp_path / "none")], "cannot read --api-keys"),
    ):
        code, _, err = invoke("serve", *arguments)
        assert code == 2 and message in err and err.count("\n") == 1
