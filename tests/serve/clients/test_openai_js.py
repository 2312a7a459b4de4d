"""The openai package for JavaScript, in a real browser, from a page of another origin."""

import http.server
import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from tests.serve.test_page import BROWSER

PACKAGE = os.environ.get("OPENAI_JS", "node_modules/openai")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs a Chromium on the path"),
    pytest.mark.skipif(
        not Path(PACKAGE, "index.mjs").exists(),
        reason="needs openai for JavaScript: npm install openai, its folder in OPENAI_JS",
    ),
]
SCRIPT = """async ([base, model]) => {
    const OpenAI = (await import("/index.mjs")).default;
    const client = new OpenAI({baseURL: base + "/v1", apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0});
    const messages = [{role: "user", content: "Hello there"}], found = {chat: "", response: ""};
    const same = {model, temperature: 0};
    found.whole = (await client.chat.completions.create({...same, messages, max_tokens: 20})).choices[0].message.content;
    for await (const chunk of await client.chat.completions.create({...same, messages, max_tokens: 20, stream: true}))
        found.chat += chunk.choices[0].delta.content ?? "";
    const asked = {...same, input: "Hello there", max_output_tokens: 20};
    found.responded = (await client.responses.create(asked)).output_text;
    for await (const event of await client.responses.create({...asked, stream: true}))
        if (event.type === "response.output_text.delta") found.response += event.delta;
    const echoed = {...same, prompt: "Once", max_tokens: 0, echo: true, logprobs: 1};
    found.echo = (await client.completions.create(echoed)).choices[0];
    found.models = (await client.models.list()).data.map(one => one.id);
    try { await client.embeddings.create({model, input: "x"}); } catch (error) { found.error = [error.status, error.code]; }
    return found;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

    def log_message(self, *_):
        pass


@pytest.fixture
def page_origin():
    files = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=PACKAGE))
    thread = threading.Thread(target=files.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{files.server_port}"
    files.shutdown()
    thread.join()
    files.server_close()


def test_it_works_from_a_page_that_the_server_allows(serving, page_origin):
    server = serving(cors=(page_origin,))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{page_origin}/package.json")
        found = page.evaluate(SCRIPT, [server.url, server.service.model])
        browser.close()
    same = {"model": server.service.model, "temperature": 0, "max_tokens": 20}
    expected = server.client.chat.completions.create(**same, messages=[{"role": "user", "content": "Hello there"}])
    assert {found[name] for name in ("whole", "chat", "responded", "response")} == {expected.choices[0].message.content}
    assert found["echo"]["text"] == "Once" and found["echo"]["logprobs"]["token_logprobs"][0] is None, json.dumps(found["echo"])
    assert found["models"] == [server.service.model] and found["error"] == [404, "not_served"]
