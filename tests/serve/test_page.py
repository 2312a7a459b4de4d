"""The page in a real browser: what a reader does, what is kept, what is shown when things go wrong; nothing from elsewhere."""

import json
import os
import re
import shutil
from pathlib import Path

import httpx
import pytest

import polydraft.serve

PAGE = Path(polydraft.serve.__file__).parent / "page"
BROWSER = shutil.which(os.environ.get("CHROMIUM", "chromium")) or shutil.which("google-chrome")
CHAT = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip("needs a Chromium on the path")
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser, shared):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(15_000)
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    page.goto(shared.url)
    page.wait_for_selector("#model:not(:empty)")
    yield page
    assert all(url.startswith((shared.url, "data:", f"blob:{shared.url}")) for url in asked), asked
    assert not problems
    context.close()


def choose(page, **values):
    page.click("#settings-open")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.keyboard.press("Escape")


def send(page, text):
    page.fill("#text", text)
    page.keyboard.press("Enter")


def answered(page):
    page.wait_for_selector("#send:not([hidden])")


def bodies_of(page):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def last(page):
    return page.locator(".assistant .body").last.inner_text()


def sse(*events, done=True):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")


def piece(*tokens, tree=((-1, "x"),), accepted=0):
    """A chunk of a stream: tokens are texts with their sources."""
    texts = [{"text": text, "source": source} for text, source in tokens]
    trace = {"tokens": texts, "drafted": len(tree) - 1, "accepted": accepted, "tree": list(tree)}
    return {"choices": [{"delta": {"content": "".join(text for text, _ in tokens)}, "trace": trace, "finish_reason": None}]}


def reply(page, *answers):
    """Answer requests with these, one after the other: bodies of streams, or whole responses."""
    left = list(answers)

    def fulfill(route):
        one = left.pop(0) if len(left) > 1 else left[0]
        one = {"body": one} if isinstance(one, str) else one
        route.fulfill(**{"status": 200, "content_type": "text/event-stream", **one})

    page.route(CHAT, fulfill)


def refusal(status, message, **headers):
    body = json.dumps({"error": {"message": message, "type": "", "param": None, "code": "x"}})
    return {"status": status, "body": body, "content_type": "application/json", "headers": headers}


LONG = sse(*(piece((f"Line {number}\n\n", "target")) for number in range(120)))


def test_an_answer_streams_with_figures_tokens_by_source_and_trees(page, shared):
    choose(page, max_tokens="30", temperature="0")
    send(page, "Hello there")
    answered(page)
    greedy = shared.client.chat.completions.create(
        model=shared.service.model, messages=[{"role": "user", "content": "Hello there"}], max_tokens=30, temperature=0
    )
    (talk,) = page.evaluate("Object.keys(localStorage).filter(name => name.includes('talk')).map(name => localStorage[name])")
    kept = json.loads(talk)["messages"][1]
    assert kept["content"] == greedy.choices[0].message.content
    assert sum(length for length, _ in kept["tokens"]) == len(kept["content"].encode("utf-16-le")) // 2
    assert re.search(r"30 tokens · [\d.]+ tokens/s · [\d.]+ tokens per pass", page.locator(".about").inner_text())
    assert page.inner_text("#model") == shared.service.model
    assert page.locator("#drafting").is_visible() and page.locator("#figures dd").count() == 3
    assert page.locator("#tree svg g.root").count() == 1 and page.locator("#tree svg text").count() > 5
    first = page.inner_text("#round")
    page.click("#round-before")
    assert page.inner_text("#round") != first


def test_markdown_is_shown_and_no_html(page):
    text = (
        "# Title\n\n<img src=x onerror=alert(1)> **bold** [bad](javascript:alert(1)) [good](https://a.b)\n\n```py\nx = 1\n```\n"
    )
    reply(page, sse(piece((text, "target"))))
    send(page, "Hi")
    answered(page)
    assert page.locator(".assistant h1").inner_text() == "Title" and page.locator(".assistant strong").count() == 1
    assert "<img src=x onerror=alert(1)>" in last(page) and page.locator(".assistant img").count() == 0
    assert page.locator(".assistant a").evaluate_all("all => all.map(one => one.href)") == ["https://a.b/"]
    page.click(".copy-code")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.click(".assistant button[title=Copy]")
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_what_is_shown_stays_the_same_node_while_the_text_grows(page):
    """Otherwise selections are lost and code flickers."""
    page.evaluate("""async () => {
      const { parse, show } = await import("/page/markdown.js");
      const box = document.createElement("div"), text = "Some **bold**\\n\\n```py\\na = 1\\nb = 2\\n```\\n\\n- one\\n- two";
      show(box, parse(text.slice(0, 30), true));
      const [first, code] = [box.querySelector("strong"), box.querySelector("pre")];
      for (let i = 31; i <= text.length; i += 1) show(box, parse(text.slice(0, i), true));
      const fresh = document.createElement("div");
      show(fresh, parse(text));
      if (box.querySelector("strong") !== first || box.querySelector("pre") !== code) throw new Error("made anew");
      if (box.innerHTML !== fresh.innerHTML) throw new Error(box.innerHTML);
    }""")


def test_tokens_are_coloured_by_source_inside_markdown(page):
    reply(page, sse(piece(("**Bo", "dynamic"), ("ld**", "target"), (" more", "lookup"), (" end", "target"))))
    send(page, "Hi")
    answered(page)
    assert page.locator(".body .token").count() == 0
    page.check("#colours")
    found = page.locator(".body .token").evaluate_all("all => all.map(one => [one.textContent, one.className, one.title])")
    assert found == [["Bo", "token draft", "dynamic"], [" more", "token text", "lookup"]]
    assert page.locator(".body strong").inner_text() == "Bold"
    assert page.locator("#legend li").count() == 3
    page.uncheck("#colours")
    assert page.locator(".body .token").count() == 0


def test_words_of_a_tree_neither_overlap_nor_are_crossed(page):
    tree = [
        [-1, "It"],
        [0, " considerably"],
        [0, " is"],
        [0, " was"],
        [1, " longer"],
        [1, " s"],
        [2, " a"],
        [2, " not"],
        [4, " than"],
        [3, "\n"],
    ]
    reply(page, sse(piece((" is", "model"), (" not", "model"), (" so", "target"), tree=tree, accepted=2)))
    send(page, "Hi")
    answered(page)
    boxes = page.locator("#tree rect").evaluate_all(
        "all => all.map(one => { const b = one.getBBox(); return [b.x, b.y, b.width, b.height]; })"
    )
    assert len(boxes) == len(tree) + 1
    for i, (x, y, width, height) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x >= a + c or a >= x + width or y >= b + d or b >= y + height
    crossed = page.evaluate("""() => [...document.querySelectorAll("#tree path")].flatMap(path => {
      const length = path.getTotalLength();
      return Array.from({ length: 60 }, (_, i) => path.getPointAtLength((length * (i + 0.5)) / 60)).filter(({ x, y }) =>
        [...document.querySelectorAll("#tree rect")].some(rect => {
          const box = rect.getBBox();
          return x > box.x + 1 && x < box.x + box.width - 1 && y > box.y && y < box.y + box.height;
        }));
    }).length""")
    assert crossed == 0
    assert page.locator("#tree g.accepted text").all_text_contents() == ["is", "not"]
    assert page.locator("#tree g.own text").text_content() == "so"


def test_stop_ends_the_answer_and_frees_the_slot(page, shared):
    choose(page, max_tokens="440")
    send(page, "Go on for long")
    page.locator(".assistant .body:not(.waiting)").wait_for()
    page.keyboard.press("Escape")
    answered(page)
    for _ in range(200):
        if shared.idle():
            break
        page.wait_for_timeout(20)
    assert shared.idle() and not page.locator("#notice").is_visible() and last(page)


def test_a_new_conversation_leaves_the_old_one_in_the_list(page):
    choose(page, max_tokens="440")
    bodies = bodies_of(page)
    send(page, "Go on for long")
    page.locator(".assistant .body:not(.waiting)").wait_for()
    page.keyboard.press("Control+k")
    answered(page)
    assert page.inner_text("#talk") == "" and not page.locator("#rounds").is_visible()
    choose(page, max_tokens="3")
    send(page, "Something else")
    answered(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Something else"}]
    assert page.locator("#talks .name").all_inner_texts() == ["Something else", "Go on for long"]
    page.click("text=Go on for long")
    assert page.locator(".user .body").all_inner_texts() == ["Go on for long"] and last(page)


def test_conversations_and_settings_are_kept_renamed_and_deleted(page):
    reply(page, sse(piece(("An answer", "target"))))
    choose(page, system="Be brief", seed="5")
    send(page, "First question")
    answered(page)
    page.reload()
    page.click("#talks .name")
    assert page.locator(".user .body").inner_text() == "First question" and last(page) == "An answer"
    assert page.input_value("#system") == "Be brief" and page.input_value("#seed") == "5"
    page.click("#talks [title=Rename]")
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    assert page.inner_text("#title") == "Renamed" and page.locator("#talks .name").all_inner_texts() == ["Renamed"]
    for kind, wanted in ((".md", "# Renamed\n\n**You**\n\nFirst question\n\n**"), (".json", '{\n  "title": "Renamed"')):
        with page.expect_download() as download:
            page.click("#export-markdown" if kind == ".md" else "#export-json")
        assert download.value.suggested_filename == f"Renamed{kind}"
        assert Path(download.value.path()).read_text(encoding="utf-8").startswith(wanted)
    page.click("#talks [title=Delete]")
    assert page.locator("#talks li").count() == 0 and page.inner_text("#talk") == ""
    page.click("#notice-act")
    assert page.locator("#talks .name").all_inner_texts() == ["Renamed"] and last(page) == "An answer"


def test_settings_are_sent(page):
    bodies = bodies_of(page)
    choose(page, temperature="0.3", top_p="0.8", max_tokens="3", seed="9", system="Be brief")
    page.evaluate("document.querySelector('#speculative').value = 'off'")
    page.dispatch_event("#speculative", "input")
    send(page, "Hi")
    answered(page)
    (body,) = bodies
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.3, 0.8, 3, 9)
    assert body["messages"][0] == {"role": "system", "content": "Be brief"} and body["speculative"]["tree"] == "none"


def test_edit_and_another_answer_ask_from_that_place(page):
    reply(page, *(sse(piece((text, "target"))) for text in ("One", "Two", "Three", "Four")))
    bodies = bodies_of(page)
    for text in ("First", "Second"):
        send(page, text)
        answered(page)
    page.locator(".assistant [title='Another answer']").last.click()
    page.wait_for_selector("#talk >> text=Three")
    assert [one["content"] for one in bodies[-1]["messages"]] == ["First", "One", "Second"]
    page.keyboard.press("ArrowUp")
    page.fill(".edit textarea", "Other")
    page.keyboard.press("Enter")
    page.wait_for_selector("#talk >> text=Four")
    assert [one["content"] for one in bodies[-1]["messages"]] == ["First", "One", "Other"]


def test_the_view_stays_where_the_reader_is(page):
    reply(page, LONG, sse(piece(("x\n\n" * 80, "target"))))
    place = "document.querySelector('#scroll').scrollTop"
    send(page, "Hi")
    answered(page)
    page.wait_for_timeout(100)
    end = page.evaluate("(one => one.scrollHeight - one.clientHeight)(document.querySelector('#scroll'))")
    assert page.evaluate(place) == pytest.approx(end, abs=2) and not page.locator("#to-end").is_visible()
    page.evaluate(f"{place} = 300")
    page.locator("#to-end").wait_for()
    page.evaluate("""() => {  // as when an answer grows
      const more = Object.assign(document.createElement("p"), { style: "height: 900px" });
      document.querySelector("#talk").append(more);
      dispatchEvent(new Event("resize"));
    }""")
    assert page.evaluate(place) == 300
    page.click("#to-end")
    assert page.evaluate(place) > end


def test_an_error_is_one_line_and_the_conversation_goes_on(page):
    send(page, "word " * 3000)
    page.wait_for_selector("#notice:not([hidden])")
    assert "leaves no room" in page.inner_text("#notice") and page.locator(".assistant").count() == 0
    page.keyboard.press("ArrowUp")
    page.fill(".edit textarea", "Shorter")
    choose(page, max_tokens="3")
    page.click(".edit .main")
    answered(page)
    assert page.locator(".assistant").count() == 1 and not page.locator("#notice").is_visible()


def test_a_question_without_an_answer_is_not_asked_again_with_the_next(page):
    reply(page, refusal(400, "no"), sse(piece(("Yes", "target"))))
    bodies = bodies_of(page)
    send(page, "First")
    page.wait_for_selector("#notice:not([hidden])")
    send(page, "Second")
    answered(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Second"}] and last(page) == "Yes"


def test_a_busy_server_is_asked_again(page):
    busy = [refusal(status, "the queue is full", **{"retry-after": "1"}) for status in (429, 503)]
    reply(page, *busy, sse(piece(("At last", "target"))))
    send(page, "Hi")
    page.wait_for_selector("text=The server is busy. Trying again in 1 s.")
    page.click("#notice-act")
    page.wait_for_selector("text=The server cannot answer now. Trying again in 2 s.")
    answered(page)
    assert last(page) == "At last" and not page.locator("#notice").is_visible()


@pytest.mark.parametrize("broken", ["error", "cut"])
def test_an_answer_that_breaks_off_stays_and_can_be_tried_again(page, broken):
    error = {"error": {"message": "the round failed", "code": "round_failed"}}
    ends = {"error": sse(piece(("Half", "target")), error), "cut": sse(piece(("Half", "target")), done=False)}
    reply(page, ends[broken], sse(piece(("Whole", "target"))))
    send(page, "Hi")
    page.wait_for_selector("#notice:not([hidden])")
    assert {"error": "the round failed", "cut": "connection was lost"}[broken] in page.inner_text("#notice")
    assert last(page) == "Half"
    page.click("#notice-act")
    page.wait_for_selector("#talk >> text=Whole")
    assert "Half" not in page.inner_text("#talk")


def test_the_page_asks_for_a_key_where_the_server_needs_one(browser, serving, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-secret-key")
    keys.chmod(0o600)
    server = serving(api_keys=keys)
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("text=needs an API key")
    page.click("#notice-act")
    page.keyboard.type("a-secret-key")
    page.keyboard.press("Tab")
    page.wait_for_selector("#model:not(:empty)")
    page.keyboard.press("Escape")
    choose(page, max_tokens="3")
    send(page, "Hi")
    answered(page)
    assert page.locator(".assistant").count() == 1
    page.close()


CONTRAST = """() => {
  const channel = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [red, green, blue] = colour.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const back = one => {
    const colour = getComputedStyle(one).backgroundColor;
    return /, 0\\)$/.test(colour) ? back(one.parentElement) : colour;
  };
  const says = one => [...one.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
  const words = [...document.querySelectorAll("body *:not(svg *):not(:disabled)")].filter(says);
  return words.filter(one => one.checkVisibility({ opacityProperty: true })).map(one => {
    const [less, more] = [light(getComputedStyle(one).color), light(back(one))].sort((x, y) => x - y);
    return [(more + 0.05) / (less + 0.05), one.outerHTML.slice(0, 80)];
  }).sort((x, y) => x[0] - y[0]);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_has_enough_contrast(page, theme):
    text = "# Head\n\n`code` [link](https://a.b) | word\n\n> quote\n\n```py\nx\n```\n\n| a |\n|---|\n| b |\n"
    sources = ["target", "dynamic", "lookup", "forced", "prediction"]
    reply(page, sse(piece((text, "target"), *((f"{source} ", source) for source in sources))), refusal(400, "no"))
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    page.check("#colours")
    for word in ("Hi", "And"):
        send(page, word)
        answered(page)
    page.wait_for_selector("#notice:not([hidden])")
    found = page.evaluate(CONTRAST)
    assert len(found) > 30 and found[0][0] >= 4.5, found[0]
    page.click("#settings-open")
    assert page.evaluate(CONTRAST)[0][0] >= 4.5


def test_light_dark_and_phone(page):
    backs = set()
    for theme in ("light", "dark"):
        page.evaluate(f"document.querySelector('#theme').value = '{theme}'")
        page.dispatch_event("#theme", "input")
        backs.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backs) == 2
    choose(page, max_tokens="20")
    send(page, "A question of some length, so that its title does not fit into a narrow header")
    answered(page)
    page.set_viewport_size({"width": 360, "height": 640})
    for panel in ("#side", "#drafting"):
        page.wait_for_selector(panel, state="hidden")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360 and page.locator("#send").is_visible()
    assert page.locator("header").bounding_box()["height"] < 60
    tops = page.locator("header > *").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => (box.top + box.bottom) / 2)"
    )
    assert max(tops) - min(tops) < 4
    page.click("#drafting-toggle")
    assert page.locator("#send").is_visible() and page.locator("#tree").bounding_box()["width"] > 300
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_it_is_usable_without_a_mouse(page):
    nameless = page.evaluate("""() => {
      const named = one => one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length;
      const all = document.querySelectorAll("button:not(#notice-act), input, select, textarea");
      return [...all].filter(one => !named(one)).map(one => one.outerHTML);
    }""")
    assert nameless == []
    page.keyboard.press("Shift+Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.focus("#text")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#text") == "one\ntwo"
    assert page.get_attribute("#talk", "role") == "log" and page.get_attribute("#notice", "role") == "alert"


FILES = sorted(one.name for one in PAGE.iterdir())


def test_the_page_asks_for_nothing_from_elsewhere(shared):
    answer = httpx.get(shared.url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "style=" not in answer.text
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    for name in FILES:
        file = httpx.get(f"{shared.url}/page/{name}")
        assert file.content == (PAGE / name).read_bytes()
        assert file.headers["content-type"] == f"{kinds[name.partition('.')[2]]}; charset=utf-8"
        assert not re.search(r"""(src|href|url|from|import|fetch)\s*[=(]?\s*["'(](https?:)?//""", file.text), name
        asked = re.findall(r"""(?:src|href|from)[= ]"/page/([\w.]+)""", file.text)
        assert set(asked) <= set(FILES)
    assert httpx.get(f"{shared.url}/page/nothing.js").status_code == 404
    assert httpx.get(f"{shared.url}/page/..%2fapp.py").status_code == 404


def test_no_text_becomes_html():
    """By construction: nothing in the page parses markup."""
    for name in FILES:
        text = (PAGE / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(|new Function", text
        ), name


def test_the_page_needs_no_key(serving, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-secret-key")
    server = serving(api_keys=keys)
    assert [httpx.get(f"{server.url}{path}").status_code for path in ("/", "/page/page.js", "/v1/models", "/page/a/b")] == [
        200,
        200,
        401,
        401,
    ]
