"""Nobody gets in uninvited: host names, API keys, web pages."""

import json

import httpx
import openai
import pytest
from tests.serve.test_safety import CHAT, LONG, MESSAGES

from polydraft.errors import FailureError, UsageError
from polydraft.serve.options import ServeOptions
from polydraft.serve.server import listen


def test_only_this_machine_unless_told(tmp_path):
    with pytest.raises(UsageError, match="--api-keys FILE, or --open"):
        ServeOptions(host="0.0.0.0")
    assert ServeOptions(host="0.0.0.0", open=True).host == "0.0.0.0"
    for text, message in (("", "holds no key"), ("short", "8 or more"), ("schlüssel-eins", "ASCII")):
        (tmp_path / "keys").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            ServeOptions(api_keys=tmp_path / "keys").read_keys()
    with pytest.raises(UsageError, match="cannot read"):
        ServeOptions(api_keys=tmp_path / "none").read_keys()


@pytest.mark.parametrize(
    "option", [{"port": 70000}, {"slots": 0}, {"cors": ("example.org",)}, {"cors": ("https://a.org/",)}], ids=str
)
def test_wrong_options_are_named(option):
    with pytest.raises(UsageError, match=f"--{next(iter(option))}"):
        ServeOptions(**option)


def test_a_port_in_use_is_said_so(shared):
    port = int(shared.url.rsplit(":", 1)[1])
    with pytest.raises(
        FailureError, match=rf"^cannot listen on 127.0.0.1:{port} \(Address already in use\); choose another --port"
    ):
        listen(ServeOptions(port=port))


def test_keys(serving, tmp_path):
    (tmp_path / "keys").write_text("# ours\nfirst-key-1234\n\nsecond-key-5678\n")
    server = serving(api_keys=tmp_path / "keys")
    body = {"messages": MESSAGES, "max_tokens": 2}
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key-1234"},
        {"authorization": "Bearer"},
    ):
        for answer in (server.post(CHAT, body, headers=headers), httpx.get(f"{server.url}/metrics", headers=headers)):
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for key in ("first-key-1234", "second-key-5678"):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        assert client.chat.completions.create(model=server.service.model, messages=MESSAGES, max_tokens=2).choices
    for path in ("/health", "/ready", "/"):
        assert httpx.get(server.url + path).status_code == 200
    assert server.post(CHAT, body, headers={"host": "example.org", "authorization": "Bearer first-key-1234"}).status_code == 200


def test_pages_of_others_do_not_get_in_by_a_trick(shared):
    """Neither by a name that leads here, nor by a form, nor by asking the browser."""
    assert shared.post(CHAT, {}, headers={"host": "evil.example"}).status_code == 403
    form = httpx.post(shared.url + CHAT, content=json.dumps(LONG), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = httpx.options(shared.url + CHAT, headers=asked)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "host", ["LOCALHOST", "LocalHost.:80", "localhost.", "127.0.0.1.", "[::1]:80", "[0:0:0:0:0:0:0:1]", "127.0.0.2"]
)
def test_every_way_to_write_this_machines_name(shared, host):
    assert httpx.get(f"{shared.url}/health", headers={"host": host}).status_code == 200
    assert ServeOptions(host=host.partition(":")[0] if "[" not in host else "::1").port == 8000


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "localhost..", "127.0.0.1.evil.example", "[::2]", "0x7f.1", "evil:127.0.0.1"]
)
def test_names_that_only_look_like_it(shared, host):
    assert httpx.get(f"{shared.url}/health", headers={"host": host}).status_code == 403


def test_what_pages_that_may_call_may_say_and_see(serving):
    """Clients for browsers add headers of their own, and want to know when to come back and what to tell the operator."""
    server = serving(cors=("https://good.example",), slots=1, max_queue=0)
    asked = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-lang, x-stainless-retry-count",
        "access-control-request-private-network": "true",
    }
    answer = httpx.options(server.url + CHAT, headers=asked)
    assert answer.status_code == 200 and "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert httpx.options(server.url + CHAT, headers={**asked, "origin": "https://evil.example"}).status_code == 400
    full = server.post(CHAT, {"messages": MESSAGES, "n": 2}, headers={"origin": "https://good.example"})
    seen = {name.strip() for name in full.headers["access-control-expose-headers"].split(",")}
    assert full.status_code == 429 and {"retry-after", "x-request-id"} <= seen & set(full.headers)


@pytest.mark.parametrize(
    ("mode", "word"), [(0o600, None), (0o640, None), (0o666, "change and read"), (0o620, "change"), (0o644, "read")]
)
def test_a_file_of_keys_that_others_may_use_is_warned_of(serving, tmp_path, caplog, mode, word):
    keys = tmp_path / "keys"
    keys.write_text("first-key-1234\n")
    keys.chmod(mode)
    serving(api_keys=keys)
    told = [record.getMessage() for record in caplog.records if "--api-keys" in record.getMessage()]
    assert told == ([f"others may {word} --api-keys {keys}; keep it to yourself: chmod 600"] if word else [])


def test_pages_that_may_call(serving):
    server = serving(cors=("https://good.example",))
    for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
        asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        answer = httpx.options(server.url + CHAT, headers=asked)
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
