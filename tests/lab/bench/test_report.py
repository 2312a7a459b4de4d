import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from sample_results import TEXT, sample_results

from polydraft.lab.bench.report import render, write_report
from polydraft.lab.bench.report._charts import rows_of
from polydraft.lab.svg import Scale
from polydraft.trees import Topology

EVIL = "</script><script>alert('x')</script><b>&\"'\x00"
VOID = {"meta", "link", "input", "br", "img"}


class Reader(HTMLParser):
    """Collects what a reader sees, and checks that every element is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.tags = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        self.seen += [value or "" for name, value in attrs if name in ("title", "aria-label", "data-label")]

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.seen.append(data)

    @property
    def text(self):
        return " ".join(self.seen)


@pytest.fixture(scope="module")
def page():
    return render(sample_results())


def test_everything_is_named(page):
    text = Reader(page).text
    results = sample_results()
    for word in [
        *results["methods"],
        *TEXT,
        "smollm2",
        "early-exit:2",
        "AMD EPYC 7B13",
        "c0f4f7e",
        "7.77 GiB",
        "max new tokens",
    ]:
        assert word in text
    for section in (
        "All figures",
        "Speed-up",
        "Acceptance by depth",
        "Tokens per pass",
        "Where the time goes",
        "Draft trees",
    ):
        assert section in text
    assert "1.31×" in text and "1.25–1.37" in text and "1 near-tie" in text and "60 candidates, 5 deep, 16 paths" in text
    assert results["methods"]["mcsd:2x2x2x2x2x2x2x2x2x2"]["error"] in text
    assert "polydraft bench --target smollm2" in text and "'results/my run'" in text


def test_missing_values_read_as_missing(page):
    assert not re.search(r"\b(None|null|nan|NaN|undefined|inf)\b", Reader(page).text)
    row = re.search(r"<code>hf-assisted</code>.*?</tr>", page, re.DOTALL).group()
    assert row.count("–</span>") == 4 and "not available" in row and ">0<" not in row


def test_figures_that_are_no_numbers_read_as_missing():
    results = sample_results()
    results["methods"]["auto"].update(speedup=float("nan"), tokens_per_second=float("inf"), acceptance_by_depth=[None, 0.5])
    results["git_revision"] = None
    results["settings"]["draft"] = None
    assert not re.search(r"\b(None|null|nan|NaN|inf)\b", Reader(render(results)).text)


def test_text_cannot_break_out():
    results = sample_results()
    results["methods"]["auto"]["error"] = results["settings"]["target"] = results["machine"]["cpu"] = EVIL
    results["methods"][EVIL] = results["methods"].pop("chain:4")
    results["trees"][EVIL] = results["trees"].pop("chain:4")
    results["methods"]["auto"]["categories"][EVIL] = results["methods"]["auto"]["categories"]["coding"]
    results["command"].append(EVIL)
    results["samples"][0].update(method=EVIL, category=EVIL, prompt=EVIL)
    results["samples"][0]["tokens"][0] = {"text": EVIL, "source": EVIL, "pass": 0}
    page = render(results)
    reader = Reader(page)
    assert sum(tag == "script" for tag, _ in reader.tags) == 2
    assert not any(tag == "b" for tag, _ in reader.tags) and "\x00" not in page
    data = json.loads(re.search(r'id="token-data">(.*?)</script>', page, re.DOTALL).group(1))
    assert data["samples"][0]["tokens"][0] == [EVIL, data["sources"].index(EVIL), 0]


def test_nothing_is_requested(page):
    links = [value for _, attrs in Reader(page).tags for name, value in attrs.items() if name in ("href", "src")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page


@pytest.mark.parametrize("change", [
    lambda r: r.update(samples=[], trees={}),
    lambda r: r.update(methods={"ar": r["methods"]["ar"]}),
    lambda r: r.update(methods={"hf-assisted": r["methods"]["hf-assisted"]}),
    lambda r: r.update(methods={"x": r["methods"]["mcsd:2x2x2x2x2x2x2x2x2x2"]}),
    lambda r: r.update(methods={}),
    lambda r: r.update(settings={**r["settings"], "temperature": 1.0, "device": "cuda"}, machine={}, versions={}, command=None),
    lambda r: r["trees"].update(auto={"parents": [0]}, wide={"parents": [0] * 1024}),
    lambda r: r["samples"][0]["tokens"][0].update({"pass": None, "text": "\ud800"}),
])  # fmt: skip
def test_sparse_results_make_a_page(tmp_path, change):
    results = sample_results()
    change(results)
    write_report(results, tmp_path / "report.html")
    assert not re.search(r"\b(None|nan)\b", Reader((tmp_path / "report.html").read_text(encoding="utf-8")).text)


def test_tree_layout():
    assert rows_of(Topology((0, 0, 0, 1, 1, 2))) == [1.25, 0.5, 2.0, 0.0, 1.0, 2.0]


def test_ticks_are_round_and_inside():
    assert Scale(0, 1.6).ticks() == [0, 0.5, 1.0, 1.5]
    assert Scale(0.5, 2.9).ticks() == [0.5, 1.0, 1.5, 2.0, 2.5]


# A frame as wide as the device: windows narrower than 500 px are widened by some builds of Chromium.
HOST = """<!doctype html><iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre><script>
document.getElementById("frame").onload = (event) => {{
  const inside = event.target.contentDocument;
  const shown = () => Array.from(inside.querySelectorAll("#token-text .token")).map((one) => one.textContent);
  const found = {{scroll: inside.documentElement.scrollWidth, width: inside.documentElement.clientWidth, first: shown()}};
  const svgs = Array.from(inside.querySelectorAll("svg"));
  found.clipped = svgs.flatMap((svg) => Array.from(svg.querySelectorAll("text")).filter((text) => {{
    const a = text.getBoundingClientRect(), b = svg.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1;
  }}).map((text) => text.textContent));
  const choose = (name, value) => {{
    const select = inside.getElementById("token-" + name);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  }};
  choose("method", "ngram+model:4x2x1");
  choose("category", "writing");
  found.second = shown();
  inside.querySelectorAll("#token-text .token")[1].click();
  found.detail = inside.getElementById("token-detail").textContent;
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.slow)])
def test_in_a_browser(tmp_path, page, width):
    host = tmp_path / "host.html"
    host.write_text(HOST.format(width=width, page=html.escape(page)), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--hide-scrollbars",
        "--window-size=1400,1000",
    ]
    command = [shutil.which("chromium"), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", host.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL).group(1)))
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["clipped"] == []
    assert found["first"][:3] == ["def", " reverse", "("]
    assert found["second"][:3] == ["The", " sea", " is"]
    assert found["detail"] == '" sea" · source: ngram · pass 1 of 7 · token 2 of 14'
