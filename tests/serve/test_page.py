"""The page in a real browser: send, stream, stop, change settings, see an error; nothing from elsewhere."""

import os
import re
import shutil

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
BROWSER = shutil.which(os.environ.get("CHROMIUM", "chromium")) or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium on the path")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser, shared):
    page = browser.new_page()
    page.set_default_timeout(15_000)
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    page.goto(shared.url)
    yield page
    assert all(url.startswith((shared.url, "data:")) for url in asked), asked
    assert not problems
    page.close()


def send(page, text):
    page.fill("#text", text)
    page.keyboard.press("Enter")


def answered(page):
    page.wait_for_selector("#send:not([disabled])")


@needs_browser
def test_a_talk_streams_with_tokens_by_source(page, shared):
    page.click("summary")
    page.fill("#max_tokens", "30")
    page.fill("#temperature", "0")
    send(page, "Hello there")
    answered(page)
    text = page.evaluate("document.querySelector('.assistant').textContent")
    greedy = shared.client.chat.completions.create(
        model=shared.service.model, messages=[{"role": "user", "content": "Hello there"}], max_tokens=30, temperature=0
    )
    assert text == greedy.choices[0].message.content
    assert page.locator(".assistant .own").count() > 0
    assert re.search(r"tokens/s · [\d.]+ tokens per pass", page.inner_text("#figures"))
    assert page.locator("#tree svg text").count() > 5
    assert page.inner_text("#model") == shared.service.model


@needs_browser
def test_stop_ends_the_answer_and_frees_the_slot(page, shared):
    page.click("summary")
    page.fill("#max_tokens", "440")
    send(page, "Go on for long")
    page.locator(".assistant span").nth(3).wait_for(state="attached")
    page.keyboard.press("Escape")
    answered(page)
    for _ in range(200):
        if shared.idle():
            break
        page.wait_for_timeout(20)
    assert shared.idle() and page.locator(".error").count() == 0


@needs_browser
def test_a_new_talk_forgets_the_answer_that_was_being_written(page):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("summary")
    page.fill("#max_tokens", "440")
    send(page, "Go on for long")
    page.locator(".assistant span").nth(3).wait_for(state="attached")
    page.click("#fresh")
    answered(page)
    assert page.inner_text("#talk") == "" and page.inner_text("#figures") == "" and page.locator("#tree svg").count() == 0
    page.fill("#max_tokens", "3")
    send(page, "Something else")
    answered(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Something else"}]


@needs_browser
def test_settings_are_sent(page):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("summary")
    for name, value in {"temperature": "0.3", "top_p": "0.8", "max_tokens": "3", "seed": "9", "system": "Be brief"}.items():
        page.fill(f"#{name}", value)
    page.select_option("#speculative", "off")
    send(page, "Hi")
    answered(page)
    (body,) = bodies
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.3, 0.8, 3, 9)
    assert body["messages"][0] == {"role": "system", "content": "Be brief"} and body["speculative"]["tree"] == "none"


@needs_browser
def test_an_error_is_shown_and_the_talk_goes_on(page):
    page.click("summary")
    page.fill("#max_tokens", "100000")
    send(page, "Hi")
    page.wait_for_selector(".error")
    assert "does not fit" in page.inner_text(".error")
    page.fill("#max_tokens", "3")
    send(page, "Again")
    page.locator(".assistant span").first.wait_for(state="attached")


@needs_browser
def test_light_dark_and_phone(page):
    page.click("#theme")
    first = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != first
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#send").is_visible()


def test_the_page_asks_for_nothing_from_elsewhere(shared):
    answer = httpx.get(shared.url)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
