"""Peers of `polydraft bench serve`: started for their turn, measured like the others, and stopped; what is missing is named."""

import json
import sys
from pathlib import Path

import pytest

from polydraft.errors import UsageError
from polydraft.lab.bench.libllama import VARIABLE
from polydraft.lab.bench.report import render_load
from polydraft.lab.bench.serving_peers import command_of

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Peer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "peer"}]}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "peer" and "speculative" not in asked
        parts = [{"choices": [{"delta": {"content": "x"}}]}] * 3 + [{"choices": [], "usage": {"completion_tokens": 3}}]
        self.answer("".join(f"data: {json.dumps(part)}\\n\\n" for part in parts) + "data: [DONE]\\n\\n")

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Peer).serve_forever()
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for a build of llama.cpp."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama-server"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    (tmp_path / "model.gguf").touch()
    return program


def measure(invoke, model: Path, out: Path):
    arguments = ["--arms", "llama.cpp", "--peer-model", str(model), "--requests", "4", "--concurrency", "2", "--out", str(out)]
    return invoke("bench", "serve", *arguments)


def test_a_peer_is_started_measured_and_stopped(build, invoke, tmp_path):
    out = tmp_path / "load.json"
    code, text, err = measure(invoke, tmp_path / "model.gguf", out)
    assert code == 0, err
    (arm,) = json.loads(out.read_text())["arms"]
    assert (arm["arm"], arm["requests"], arm["errors"]) == ("llama.cpp", 4, 0) and arm["tokens_per_second"] > 0
    page = (tmp_path / "load.html").read_text()
    assert "llama.cpp" in page and "Content-Security-Policy" in page and page.count("<tr") >= 2
    assert text.startswith("llama.cpp: ")


def test_a_peer_that_does_not_start_says_why(build, invoke, tmp_path):
    build.write_text(f"#!{sys.executable}\nraise SystemExit('no such tensor')\n")
    code, text, err = measure(invoke, tmp_path / "model.gguf", tmp_path / "load.json")
    assert code == 1 and "did not start (no such tensor)" in err and "1 errors" in text
    assert json.loads((tmp_path / "load.json").read_text())["arms"][0]["errors"] == 1


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=f"llama-server; set {VARIABLE} to a build of llama.cpp"):
        command_of("llama.cpp", str(tmp_path / "model.gguf"), 4, 1)
    with pytest.raises(UsageError, match="needs a GGUF file"):
        command_of("llama.cpp", str(tmp_path), 4, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'transformers\[serving\]'"):
        command_of("transformers", str(tmp_path), 4, 1)


def test_errors_stand_on_the_page_as_text():
    times = {"p50": 0.1, "p95": 0.2, "p99": 0.3}
    arm = {
        **{f"{name}_seconds": times for name in ("first_token", "between_parts", "whole")},
        **dict.fromkeys(("tokens_per_second", "requests_per_second", "goodput"), 1.5),
        **{"arm": "<auto>", "requests": 2, "errors": 1, "first_error": "<b>HTTP 500"},
    }
    page = render_load({"options": {"url": "http://x"}, "arms": [arm]})
    assert "&lt;auto&gt;" in page and "1 of 2: &lt;b&gt;HTTP 500" in page and "0.100 / 0.200 / 0.300" in page
