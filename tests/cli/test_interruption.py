"""Ctrl-C in mid-stream: what was printed stays, one line says so, and the next request is served as if nothing had been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polydraft
from covering import covering
from polydraft.engine.graphs import Launcher
from polydraft.engine.stream import Stream
from polydraft.errors import FailureError
from polydraft.sampling import SamplingParams

SOURCE = str(Path(polydraft.__file__).parents[1])
# A parent that was started in the background may have had this signal ignored, which children inherit.
PROGRAM = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from polydraft.cli.main import main; main()"


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_signal_in_mid_stream_keeps_the_text_and_says_so_in_one_line(
    invoke, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the next one, in this process, and the signal comes at a place that is known."""
    options = ["--target", tiny, "--draft", "early-exit:1", "--tree", "2x1", "--max-new-tokens", "60", "--dtype", "float32"]
    command = ["generate", "hello", *options, "--device", "cpu", "--threads", "1"]
    code, whole, _ = invoke(*command)
    assert code == 0
    right, left = Stream.__next__, iter([*range(20)])

    def signalled(stream: Stream):
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
        return right(stream)

    monkeypatch.setattr(Stream, "__next__", signalled)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, printed, errors = invoke(*command)
    finally:
        signal.signal(signal.SIGINT, former)
    assert (code, errors) == (130, "polydraft: error: interrupted\n")
    assert printed.endswith("\n") and 10 < len(printed) < len(whole) - 20 and whole.startswith(printed[:-1])


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interrupted_command_keeps_its_text_and_says_so_in_one_line(roomy: str) -> None:
    options = ["--target", roomy, "--draft", "early-exit:1", "--tree", "2x1", "--max-new-tokens", "900", "--dtype", "float32"]
    command = [sys.executable, "-c", PROGRAM, "generate", "hello", *options, "--device", "cpu", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0)
    try:
        assert process.stdout is not None
        begun = process.stdout.read(1) + process.stdout.read(24)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors.decode() == "polydraft: error: interrupted\n"
    printed = (begun + rest).decode()
    assert printed.endswith("\n"), "the shell's prompt begins a line"
    plain = polydraft.load(roomy, "none", dtype="float32", device="cpu")
    greedy = {"sampling": SamplingParams(temperature=0), "chat": True}
    whole = plain.generate("hello", max_new_tokens=len(printed) + 8, **greedy).text
    assert len(printed) < 800 and whole.startswith(printed[:-1]), "the beginning of the text, and nothing else"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_the_key_so_the_line_begins_behind_it(
    invoke, tiny: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given, **named) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polydraft.engine.stream.Stream.__next__", interrupted)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    code, out, err = invoke("generate", "hello", "--target", tiny, "--draft", "none")
    assert (code, out) == (130, "\n")
    assert err == ("\n" if terminal else "") + "polydraft: error: interrupted\n"


class Interruption:
    """Raise KeyboardInterrupt as the n-th round begins, as a signal that comes while it works does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left, right = number, Launcher.launch

        def interrupted(launcher, *given, **named):
            self.left -= 1
            if self.left == 0:
                right(launcher, *given, **named)
                raise KeyboardInterrupt
            return right(launcher, *given, **named)

        monkeypatch.setattr(Launcher, "launch", interrupted)


@pytest.mark.parametrize(("drafter", "keep"), covering(["none", "lookup+model"], [False, True]))
def test_a_decoder_serves_the_next_request_after_an_interruption(
    roomy: str, drafter: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round was done and not yet handed out: nobody may go on with a memory that is further than its text."""
    draft = "none" if drafter == "none" else "early-exit:2"
    names = {} if drafter == "none" else {"drafter": drafter, "tree": "2x1"}
    decoder = polydraft.load(roomy, draft, dtype="float32", device="cpu", **names)
    options = {"max_new_tokens": 24, "seed": 3, "sampling": SamplingParams(temperature=0.8)}
    expected = [decoder.generate(text, **options) for text in ("hello there", "hello there, again", "other")]
    with monkeypatch.context() as patch:
        Interruption(patch, 4)
        stream, seen = decoder.stream("hello there", keep=keep, **options), []
        with pytest.raises(KeyboardInterrupt):
            for event in stream:
                seen.append(event.token_id)
        with pytest.raises(FailureError, match=r"was interrupted.*start the request again"):
            next(stream)
        stream.close()
    assert 0 < len(seen) < 24 and seen == expected[0].token_ids[: len(seen)]
    assert stream.results()[0].token_ids == seen
    for text, wanted in zip(("hello there, again", "hello there", "other"), (1, 0, 2), strict=True):
        got = decoder.generate(text, keep=keep, **options)
        assert (got.token_ids, got.text) == (expected[wanted].token_ids, expected[wanted].text)
