"""Endpoints: greedy text over HTTP against the target's own."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import polydraft
from polydraft.certify.endpoint import Endpoint
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.sampling import SamplingParams

PROMPTS = ["hello", "a tree"]
Answer = Callable[[str, dict[str, Any]], tuple[int, bytes]]


@pytest.fixture(scope="module")
def decoder(tiny: str) -> Decoder:
    return polydraft.load(tiny, draft="none", dtype="float32")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a server that answers as it is told; return its address."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, content = answer(self.path, asked)
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def model_answer(decoder: Decoder, change: Callable[[str], str] = lambda text: text) -> Answer:
    """Answer like an OpenAI server that decodes greedily, or does something to the text."""

    def answer(path: str, asked: dict[str, Any]) -> tuple[int, bytes]:
        assert asked["temperature"] == 0 and asked["model"] == "tiny"
        chat = path.endswith("/chat/completions")
        prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
        greedy = SamplingParams(temperature=0)
        result = decoder.generate(prompt, chat=chat, sampling=greedy, max_new_tokens=asked["max_tokens"])
        text = change(decoder.tokenizer.decode(result.token_ids, skip_special_tokens=True))
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return 200, json.dumps({"choices": [choice | {"index": 0, "finish_reason": "length"}]}).encode()

    return answer


def certify(invoke, url: str, tiny: str, prompt_file: str, *options: str) -> tuple[int, str, str]:
    small = ("--max-new-tokens", "12", "--dtype", "float32", "--prompts", prompt_file)
    return invoke("certify", "endpoint", "--url", url, "--model", "tiny", "--target", tiny, *small, *options)


@pytest.mark.parametrize("options", [[], ["--chat"]], ids=["completions", "chat"])
def test_an_endpoint_that_serves_the_target_is_certified(invoke, serve, decoder, tiny, prompt_file, options) -> None:
    url = serve(model_answer(decoder))
    code, out, err = certify(invoke, f"{url}/v1", tiny, prompt_file, *options, "--json")
    assert code == 0, err
    (check,) = json.loads(out)["checks"]
    assert [entry["likeness"] for entry in check["details"]] == ["identical"] * 2
    assert check["subject"].startswith("tiny at http://127.0.0.1:")


def test_an_endpoint_that_serves_something_else_is_refused(invoke, serve, decoder, tiny, prompt_file) -> None:
    # A letter in the middle is another one, behind which the text goes on as if nothing had happened.
    def changed(text: str) -> str:
        return text[:3] + ("x" if text[3:4] != "x" else "y") + text[4:]

    code, out, err = certify(invoke, serve(model_answer(decoder, changed)), tiny, prompt_file)
    assert code == 1 and "NOT CERTIFIED" in out and "expected next" in out and "came" in out
    assert "is not certified: greedy failed" in err.splitlines()[-1]


@pytest.mark.parametrize("change", [
    lambda text: text[:-2],
    lambda text: text + "and more",
    pytest.param(lambda text: "", marks=pytest.mark.slow),  # the earliest end
])  # fmt: skip
def test_texts_that_end_early_or_go_on_are_refused(invoke, serve, decoder, tiny, prompt_file, change) -> None:
    code, out, _ = certify(invoke, serve(model_answer(decoder, change)), tiny, prompt_file, "--json")
    assert code == 1 and json.loads(out)["checks"][0]["worst"] == 2


BAD_ANSWERS = {
    "HTTP error": ((404, b'{"error": "no such model"}'), "answered HTTP 404"),
    "not JSON": ((200, b"<html>welcome</html>"), "answered with something other than JSON: '<html>welcome</html>'"),
    "no choices": ((200, b'{"object": "list"}'), "answered without choices[0].text"),
    "a chat's answer": ((200, b'{"choices": [{"message": {"content": "hi"}}]}'), "answered without choices[0].text"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_bad_answers_are_one_line_and_exit_code_1(invoke, serve, tiny, prompt_file, case: str) -> None:
    answer, expected = BAD_ANSWERS[case]
    code, out, err = certify(invoke, serve(lambda *_: answer), tiny, prompt_file)
    assert (code, out) == (1, "") and expected in err and err.count("\n") == 1


def test_an_unreachable_host_is_named_before_any_model_is_loaded(invoke, tiny, prompt_file, monkeypatch) -> None:
    monkeypatch.setattr("polydraft.loading.load", lambda *_, **__: pytest.fail("loaded a model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, out, err = certify(invoke, url, tiny, prompt_file)
    assert (code, out) == (1, "") and f"cannot reach {url}/v1/completions" in err and err.count("\n") == 1


def test_a_server_that_hangs_up_or_is_slow_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = Endpoint(url=f"http://127.0.0.1:{silent.getsockname()[1]}", model="tiny", timeout=0.2)
        with pytest.raises(FailureError, match=r"cannot reach .*\(timed out\)"):
            endpoint.complete("hello", 1)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/hosts", "http://", "ftp://host/v1"])
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a web address"):
        Endpoint(url=url, model="tiny")


def test_addresses_are_completed() -> None:
    assert Endpoint(url="http://h:1", model="m").address == "http://h:1/v1/completions"
    assert Endpoint(url="http://h:1/v1/", model="m", chat=True).address == "http://h:1/v1/chat/completions"
    assert Endpoint(url="https://h/api/completions", model="m").address == "https://h/api/completions"
    with pytest.raises(UsageError, match="--timeout 0"):
        Endpoint(url="http://h", model="m", timeout=0)
