import xml.etree.ElementTree as ElementTree

from polydraft.lab.charts import Curve, curves, grouped_columns, line_chart, scatter
from polydraft.lab.estimate import Estimate
from polydraft.lab.svg import Box

SVG = "{http://www.w3.org/2000/svg}"


def shapes(content: str, kind: str, name: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(content).iter(f"{SVG}{kind}") if one.get("class") == name]


def test_curves_rise_with_their_figures_and_skip_what_is_missing() -> None:
    content = curves({"T=0": [0.1, 0.2, 0.4], "T=1": [0.3, None, 0.5]}, ["1", "2", "4"], across="k", up="α & more")
    rising = [float(dot.get("cy", "")) for dot in shapes(content, "circle", "dot-0")]
    assert rising[1:] == sorted(rising[1:], reverse=True), "after the legend's own dot, higher figures stand higher"
    assert len(shapes(content, "line", "curve-0")) == 1 + 2 and len(shapes(content, "line", "curve-1")) == 1
    title = ElementTree.fromstring(content).find(f"{SVG}title")
    assert title is not None and title.text == "α & more. T=0: 1 0.10, 2 0.20, 4 0.40; T=1: 1 0.30, 4 0.50"


def test_columns_stand_on_the_base_in_groups() -> None:
    series = {"T=0": [1.5, 1.25, 1.0], "T=1": [2.0, None, 1.1]}
    content = grouped_columns(series, {"K = 2": ["2x1", "1x2"], "K = 4": ["4x1"]}, base=1.0, across="shape", up="τ")
    heights = [float(column.get("height", "")) for column in shapes(content, "rect", "column-0")][1:]
    assert heights[2] == 0 and abs(heights[0] / heights[1] - 2) < 0.01
    assert len(shapes(content, "rect", "column-1")) == 1 + 2
    words = {one.text for one in ElementTree.fromstring(content).iter(f"{SVG}text")}
    assert {"2x1", "1x2", "4x1", "K = 2", "K = 4", "1.50", "T=0", "T=1", "τ", "shape"} <= words


def test_no_figures_at_all_still_make_a_picture() -> None:
    for content in (
        curves({"T=0": [None]}, ["1"], across="k", up="α"),
        grouped_columns({"T=0": [None]}, {"K": ["1"]}, base=1.0, across="k", up="τ"),
    ):
        assert ElementTree.fromstring(content).tag == f"{SVG}svg"


def test_intervals_are_error_bars() -> None:
    figure = Estimate(0.5, 0.4, 0.6)
    (across, *caps) = shapes(curves({"a": [figure, None]}, ["1", "2"], across="k", up="α"), "line", "error-0")
    assert across.get("x1") == across.get("x2") and len(caps) == 2
    assert shapes(curves({"a": [0.5, Estimate.exactly(0.5)]}, ["1", "2"], across="k", up="α"), "line", "error-0") == []
    content = grouped_columns({"a": [figure]}, {"": ["1"]}, base=0.0, across="k", up="τ")
    (value,) = [one for one in ElementTree.fromstring(content).iter(f"{SVG}text") if one.text == "0.50"]
    bar = shapes(content, "line", "error")[0]
    assert float(value.get("y", "")) < float(bar.get("y2", "")), "the figure stands above its bar"
    both = scatter({"a": [("x", figure, figure)]}, across="k", up="τ")
    assert len(shapes(both, "line", "error-0")) == 4, "upright with two ends, and across"


def test_files_need_no_style_sheet() -> None:
    for content in (
        curves({"a": [1.0], "b": [2.0]}, ["1"], across="k", up="α"),
        grouped_columns({"a": [1.0]}, {"g": ["1"]}, base=0.0, across="k", up="τ"),
        scatter({"a": [("x", 1.0, 2.0)]}, across="k", up="τ"),
        line_chart([Curve("a", "kind", [(1.0, 0.5)])], across="T", up="α"),
    ):
        assert "var(" not in content and "<style" not in content
        for kind, attribute in (("text", "fill"), ("line", "stroke"), ("rect", "fill"), ("circle", "fill")):
            assert all(one.get(attribute) for one in ElementTree.fromstring(content).iter(f"{SVG}{kind}"))


def boxes(content: str) -> list[Box]:
    texts = [one for one in ElementTree.fromstring(content).iter(f"{SVG}text") if not one.get("transform")]
    return [Box.of_text(float(t.get("x", "")), float(t.get("y", "")), t.text or "", t.get("text-anchor", "")) for t in texts]


def test_labels_do_not_collide() -> None:
    close = [(f"{number}, 0.{number}, {number}", 1 + number % 3 / 50, 1 + number // 3 / 50) for number in range(9)]
    crowded = scatter({"some group": close, "another": [("far away", 3.0, 3.0)]}, across="tokens per second", up="likelihood")
    names = [f"a rather long series {number}" for number in range(7)]
    many = curves({name: [1.0] for name in names}, ["1"], across="width", up="acceptance of some kind")
    for content in (crowded, many):
        found = boxes(content)
        for place, one in enumerate(found):
            assert not any(one.meets(other) for other in found[place + 1 :])


def test_names_that_do_not_fit_are_turned() -> None:
    groups = {name: ["all", "−corpus", "−context"] for name in ("one", "two", "three", "four", "five", "six", "seven")}
    content = grouped_columns({"DE": [1.5] * 21}, groups, base=1.0, across="caches", up="DE")
    texts = list(ElementTree.fromstring(content).iter(f"{SVG}text"))
    assert all("rotate" in (one.get("transform") or "") for one in texts if one.text in ("−context", "1.50"))
    assert all(one.get("transform") is None for one in texts if one.text in ("one", "caches", "DE"))


def test_costs_fall_to_the_right_without_becoming_negative() -> None:
    content = scatter({"a": [("dear", -2.4, -0.5), ("cheap", -0.1, -0.9)]}, across="joules per token", up="log-likelihood")
    texts = {one.text: float(one.get("x", "")) for one in ElementTree.fromstring(content).iter(f"{SVG}text")}
    ticks = {name: x for name, x in texts.items() if name in ("0", "0.5", "1", "1.5", "2", "2.5")}
    assert len(ticks) >= 4 and sorted(ticks, key=float) == sorted(ticks, key=lambda name: -ticks[name])
    assert {"-0.6", "-0.8"} <= texts.keys() and "-2" not in texts and texts["dear"] < texts["cheap"]
