"""Drawings of the static draft trees, root on the left."""

from collections.abc import Mapping, Sequence
from typing import Any

from polydraft import svg
from polydraft.bench.report.plots import figure

_WIDTH, _TOP, _MARGIN = 320.0, 26.0, 14.0
_TALLEST = 360.0  # a tree of hundreds of leaves is drawn finer, not taller


def levels_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node; a parent stands before its children."""
    depths = [0]
    for node in range(1, len(parents)):
        depths.append(depths[parents[node]] + 1)
    return depths


def rows_of(parents: Sequence[int]) -> list[float]:
    """Row of each node: leaves in order, every other node in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    order, stack = [], [0]
    while stack:  # depth first, so that branches do not cross
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    rows, leaves = [0.0] * len(parents), 0
    for node in order:
        if not children[node]:
            rows[node], leaves = float(leaves), leaves + 1
    for node in reversed(order):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return rows


def tree_drawing(name: str, parents: Sequence[int]) -> str:
    """Draw one tree with the number of candidates above each level."""
    depths, rows = levels_of(parents), rows_of(parents)
    leaves, deepest = int(max(rows)) + 1, max(depths)
    gap = min(18.0, _TALLEST / leaves)
    radius = max(1.0, min(4.5, 0.38 * gap))
    height = _TOP + 2 * _MARGIN + gap * (leaves - 1)
    step = (_WIDTH - 2 * _MARGIN) / max(1, deepest)

    def spot(node: int) -> tuple[float, float]:
        return _MARGIN + step * depths[node], _TOP + _MARGIN + gap * rows[node]

    counts = [depths.count(level) for level in range(deepest + 1)]
    shapes = [svg.text(_MARGIN + step * level, 14, str(counts[level]), kind="tick") for level in range(1, deepest + 1)]
    shapes += [svg.line(*spot(parents[node]), *spot(node), "branch") for node in range(1, len(parents))]
    shapes += [svg.circle(*spot(node), radius, "node") for node in range(1, len(parents))]
    shapes.append(svg.circle(*spot(0), max(radius, 4.5), "root"))
    candidates = len(parents) - 1
    caption = (
        f"{candidates} candidate{'' if candidates == 1 else 's'}, {deepest} deep, {leaves} path{'' if leaves == 1 else 's'}"
    )
    drawing = svg.panel(_WIDTH, height, shapes, f"Draft tree of {name}: {caption}; candidates a level: {counts[1:]}")
    return figure(name, drawing, caption)


def tree_panels(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw all trees side by side."""
    drawn = [tree_drawing(name, tree["parents"]) for name, tree in trees.items() if tree.get("parents")]
    return f'<div class="panels">{"".join(drawn)}</div>' if drawn else '<p class="muted">No method has a fixed tree.</p>'
