"""Every request has its line, which says who, what, how long and why, and which nobody can forge."""

import json
import logging
import re
import socket
import warnings

import httpx
import pytest
from tests.serve.test_safety import CHAT, LONG, MESSAGES, eventually

from polydraft.cli.options import prepare
from polydraft.errors import UsageError
from polydraft.serve.logs import JsonLines, TextLines, logging_as
from polydraft.serve.options import ServeOptions

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def lines_of(capsys, style, ask, count=1):
    """What is written while a question is asked, line by line."""
    text = ""

    def came():
        nonlocal text
        text += capsys.readouterr().err
        return text.count("\n") >= count

    with logging_as(style):
        ask()
        eventually(came)
    return text.splitlines()


PATHS = {
    "a line": "/a%0A2026-01-01T00:00:00.000Z%20INFO%20forged",
    "colours": "/%1b%5b2J%1b%5b31m",
    "length": "/" + 60_000 * "a",
    "direction": "/%E2%80%AE%C2%85",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_paths_do_not_break_lines(shared, caplog, path):
    caplog.set_level(logging.INFO, "polydraft")
    assert httpx.get(shared.url + path).status_code == 404
    eventually(lambda: "404" in caplog.text)
    (record,) = [one for one in caplog.records if one.name == "polydraft.serve"]
    message = record.getMessage()
    assert message.isprintable() and len(message) < 600 and " forged" not in message


def test_clients_that_proxies_tell_of_do_not_break_lines(shared, caplog):
    caplog.set_level(logging.INFO, "polydraft")
    httpx.get(f"{shared.url}/health", headers={"x-forwarded-for": "evil 200 0.001s\t" + 5000 * "x"})
    eventually(lambda: "/health 200" in caplog.text)
    message = caplog.records[-1].getMessage()
    assert message.isprintable() and len(message) < 400 and message.startswith("evil%20200%20")


def test_a_line_of_text(shared, capsys):
    (line,) = lines_of(capsys, "text", lambda: shared.post(CHAT, {"messages": MESSAGES, "max_tokens": 4}))
    assert re.fullmatch(rf"{TIME} INFO 127\.0\.0\.1:\d+ [0-9a-f]{{24}} POST {CHAT} 200 \d+\.\d{{3}}s \d+\+\d tokens", line)
    (line,) = lines_of(capsys, "text", lambda: shared.post(CHAT, {"messages": []}, headers={"x-request-id": "mine-1"}))
    assert re.fullmatch(
        rf"{TIME} WARNING 127\.0\.0\.1:\d+ mine-1 POST {CHAT} 400 \d\.\d{{3}}s: messages is missing or empty; .*", line
    )


def test_a_line_of_json(shared, capsys):
    (line,) = lines_of(capsys, "json", lambda: shared.post(CHAT, {"messages": MESSAGES, "max_tokens": 4}))
    told = json.loads(line)
    assert re.fullmatch(TIME, told.pop("time")) and re.fullmatch(r"127\.0\.0\.1:\d+", told.pop("client"))
    assert (
        told.pop("seconds") > 0
        and told.pop("request_id")
        and told.pop("prompt_tokens") > 0
        and told.pop("completion_tokens") > 0
    )
    assert told == {"level": "info", "method": "POST", "path": CHAT, "status": 200}
    (line,) = lines_of(capsys, "json", lambda: httpx.get(f"{shared.url}/nowhere"))
    assert {"level": "warning", "status": 404, "path": "/nowhere", "reason": "Not Found"}.items() <= json.loads(line).items()


def test_a_client_that_leaves_has_a_line_too(serving, caplog):
    server = serving(slots=1)
    caplog.set_level(logging.INFO, "polydraft")
    with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    eventually(lambda: "200" in caplog.text)
    assert "the client left" in caplog.text and caplog.records[-1].levelno == logging.INFO


def test_an_answer_that_breaks_off_is_an_error(serving, caplog):
    server = serving(request_seconds=0.3)
    caplog.set_level(logging.INFO, "polydraft")
    assert "0.3 seconds" in server.post(CHAT, {**LONG, "stream": True}).text
    eventually(lambda: "0.3 seconds" in caplog.text)
    assert caplog.records[-1].levelno == logging.ERROR
    assert re.search(r'request_failure_total{.*status="504"} 1\.0', server.service.metrics.text().decode())


WRONG = [{"stop": [{"a": "secret"}]}, {"regex": "(secret"}, {"response_format": {"type": "secret"}}, {"user": ["secret"]}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_reasons_do_not_repeat_what_clients_wrote(shared, caplog, wrong):
    caplog.set_level(logging.DEBUG, "polydraft")
    answer = shared.post(CHAT, {"messages": MESSAGES, **wrong})
    assert answer.status_code == 400 and "secret" in answer.json()["error"]["message"]
    eventually(lambda: " 400 " in caplog.text)
    assert "secret" not in caplog.text and next(iter(wrong)) in caplog.text


def test_requests_that_are_none_are_written_the_same_way(shared, capsys):
    def ask():
        with socket.create_connection(shared.url.removeprefix("http://").split(":")) as line:
            line.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in line.recv(1000)

    (line,) = lines_of(capsys, "text", ask)
    assert re.fullmatch(rf"{TIME} WARNING Invalid HTTP request received\.", line)


def record_of(message, error=None):
    try:
        if error is not None:
            raise error
    except Exception as caught:
        error = caught
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("polydraft", logging.ERROR, "", 0, message, (), info)


def test_tracebacks_cannot_forge_lines_either():
    record = record_of("it failed\n", ValueError("a\n2026-01-01T00:00:00.000Z INFO forged\x1b[2J"))
    first, *rest = TextLines().format(record).split("\n")
    assert first.endswith("ERROR it failed") and len(rest) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    told = json.loads(JsonLines().format(record))
    assert told["message"] == "it failed" and "ValueError" in told["traceback"] and JsonLines().format(record).isprintable()


def test_texts_are_fields_too(serving, capsys):
    server = serving(log_texts=True)
    lines = lines_of(capsys, "json", lambda: server.post(CHAT, {"messages": MESSAGES, "max_tokens": 4}), count=2)
    told = json.loads(lines[0])
    assert (
        isinstance(told["answer"], str) and told["prompt"][0] > 0 and told["request_id"] == json.loads(lines[1])["request_id"]
    )


def test_lines_of_other_libraries_and_warnings_are_written_the_same_way(capsys):
    with warnings.catch_warnings(), logging_as("json"):
        warnings.simplefilter("always")
        logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=ValueError("mine"))
        logging.getLogger("other.package").warning("two\nlines")
        logging.getLogger("other.package").info("not this")
        warnings.warn("an old argument", UserWarning, stacklevel=1)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["level"] for one in told] == ["error", "warning", "warning"]
    assert "ValueError: mine" in told[0]["traceback"] and told[1]["message"] == "two\nlines"
    assert "UserWarning: an old argument" in told[2]["message"]


def test_a_model_that_is_loaded_while_the_server_logs_adds_no_second_line(capsys):
    with logging_as("text"):
        prepare(threads=None)
        logging.getLogger("polydraft").info("a line")
    assert capsys.readouterr().err.count("a line") == 1


def test_formats_are_named():
    with pytest.raises(UsageError, match="--log-format 'xml' is unknown; allowed: text, json"):
        ServeOptions(log_format="xml")
