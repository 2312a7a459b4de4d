import xml.etree.ElementTree as ElementTree

from polydraft.lab.charts import curves, grouped_columns

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
