"""The page's own Markdown, run by node: what it makes of usual texts, and that no text gets more than it should."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import polydraft.serve

PAGE = Path(polydraft.serve.__file__).parent / "page"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node on the path")


HEAD = """
import { readFileSync } from "fs";
import { parse, safe } from "./markdown.mjs";
const given = JSON.parse(readFileSync(0, "utf8"));
"""


def run(tmp_path, script, given=None):
    """Run a script as a module beside the page's own, and return what it prints as JSON."""
    (tmp_path / "markdown.mjs").write_text((PAGE / "markdown.js").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "script.mjs").write_text(HEAD + script, encoding="utf-8")
    command = [NODE, str(tmp_path / "script.mjs")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BRIEF = """
const brief = node => node.tag ? `<${[node.tag, node.attrs.href, node.attrs.start].filter(Boolean).join(" ")}>${
  node.children.map(brief).join("")}</${node.tag}>` : node.text;
console.log(JSON.stringify(given.map(([text, open]) => parse(text, open).map(brief).join(""))));
"""
CODE = "<div><div><span>{}</span><button>Copy</button></div><pre><code>{}</code></pre></div>"
USUAL = {
    "# Head *x*\n\nText": "<h1>Head <em>x</em></h1><p>Text</p>",
    "**a *b* c** `d`` e` ~~f~~ ***g***": "<p>"
    "<strong>a <em>b</em> c</strong> <code>d`` e</code> <del>f</del> <strong><em>g</em></strong></p>",
    "snake_case, 2 * 3 * 4, \\*no\\*, _yes_": "<p>snake_case, 2 * 3 * 4, *no*, <em>yes</em></p>",
    "one\ntwo": "<p>one<br></br>two</p>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li>a</li><li>b<ol 1><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "3. a\n\n   ```py\n   x = 1\n     y\n   ```\n4. b": "<ol 3><li>a"
    + CODE.format("py", "x = 1\n  y")
    + "</li><li>b</li></ol>",
    "```\n**no** <b>\n": CODE.format("text", "**no** <b>\n"),
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "| a | b |\n|--|:-:|\n| `1` | 2 \\| 3 |": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td><code>1</code></td><td>2 | 3</td></tr></tbody></table></div>",
    "a\n***\nb": "<p>a</p><hr></hr><p>b</p>",
    "see [x](https://a.b/c_(d)) (https://e.f). <https://g.h>": "<p>see <a https://a.b/c_(d)>x</a> (<a https://e.f>https://e.f</a>)."
    " <a https://g.h>https://g.h</a></p>",
}


def test_usual_texts(tmp_path):
    assert run(tmp_path, BRIEF, [[text, False] for text in USUAL]) == list(USUAL.values())


def test_what_has_begun_is_shown_as_such_while_the_text_grows(tmp_path):
    given = [["**bold `co", True], ["**bold `co", False], ["```py\nx", True]]
    assert run(tmp_path, BRIEF, given) == [
        "<p><strong>bold <code>co</code></strong></p>",
        "<p>**bold `co</p>",
        CODE.format("py", "x"),
    ]


UNSAFE = [
    "javascript:alert(1)",
    "JaVaScRiPt:x",
    "data:text/html,x",
    "vbscript:x",
    "/v1/models",
    "//evil",
    "file:///etc",
    "java\tscript:x",
    "",
]


def test_links_lead_to_the_web_or_to_mail_only(tmp_path):
    assert run(tmp_path, BRIEF, [[f"[x]({address})", False] for address in UNSAFE]) == [f"<p>[x]({one})</p>" for one in UNSAFE]
    assert run(tmp_path, "console.log(JSON.stringify(given.map(safe)))", ["https://a", "http://a", "mailto:a@b", *UNSAFE]) == (
        3 * [True] + len(UNSAFE) * [False]
    )


def test_random_texts_keep_every_place_and_get_known_tags_only(tmp_path):
    """Leaves must be what the source has at their places, in order: tokens are found again by them."""
    script = """
    const parts = ["a", "b c", " ", "\\n", "\\n\\n", "**", "*", "_", "`", "```", "~~", "- ", "1. ", "  ", "> ", "# ", "| ",
      "|-|", "[x](", ")", "https://a.b", "\\\\", "<", ">", "<script>", "é😀", "!", "[", "](javascript:x)", "](https://c.d)"];
    let state = 1;
    const random = most => (state = (state * 48271) % 2147483647) % most;
    const tags = new Set(), wrong = [];
    for (let i = 0; i < 4000; i += 1) {
      const text = Array.from({ length: 1 + random(14) }, () => parts[random(parts.length)]).join("");
      const walk = (node, last) => {
        if (!node.tag) {
          const there = node.at === undefined || (node.at >= last &&
            text.slice(node.at, node.at + node.text.length).replaceAll("\\n", " ") === node.text.replaceAll("\\n", " "));
          if (!there) wrong.push([text, node]);
          return node.at === undefined ? last : node.at + node.text.length;
        }
        tags.add(node.tag);
        if (node.attrs.href && !safe(node.attrs.href)) wrong.push([text, node]);
        return node.children.reduce((place, child) => walk(child, place), last);
      };
      for (const open of [false, true]) parse(text, open).reduce((place, block) => walk(block, place), 0);
    }
    console.log(JSON.stringify([[...tags].sort(), wrong.slice(0, 3)]));
    """
    tags, wrong = run(tmp_path, script, None)
    assert not wrong
    known = "a blockquote br button code del div em h1 hr li ol p pre span strong table tbody td th thead tr ul"
    assert set(tags) <= set(known.split(" ")) and len(tags) > 15


HOSTILE = [
    "*a ",
    "**a",
    "*a_b**c~~d`",
    "[",
    "[a](",
    "[a]",
    "> ",
    ">",
    "- a\n",
    "http",
    "_a",
    "a\n",
    "|-",
    "`` ` ",
    "https://a.b ",
    "1. - > ",
]


def test_no_text_takes_long(tmp_path):
    script = """
    console.log(JSON.stringify(given.map(part => {
      const text = part.repeat(10000 / part.length), start = performance.now();
      parse(text, true);
      return performance.now() - start;
    })));
    """
    took = dict(zip(HOSTILE, run(tmp_path, script, HOSTILE), strict=True))
    assert max(took.values()) < 2000, took  # milliseconds; each takes some ten
