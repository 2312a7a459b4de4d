"""Trees as the user writes them."""

import json
import re

from polydraft.errors import UsageError
from polydraft.trees.topology import Topology

_ALLOWED = 'widths such as "4x2x2x1x1", "chain:5", "fork:16x5", a list of paths such as "[[0],[1],[0,0]]", or "none"'


def parse_tree(text: str) -> Topology:
    """Read a tree specification.

    Parameters
    ----------
    text : str
        ``"4x2x2x1x1"`` (children a level), ``"chain:5"``, ``"fork:WIDTHxDEPTH"`` (also ``"target-root:..."``:
        the root, the pending token, comes from the target's law), a JSON list of index paths, or
        ``"none"`` for plain decoding.
    """
    spec = text.strip().lower()
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    if spec == "none":
        return Topology()
    if re.fullmatch(r"\d{1,18}(x\d{1,18})*", spec):
        return Topology.from_widths([int(width) for width in spec.split("x")])
    if match := re.fullmatch(r"chain:(\d{1,18})", spec):
        return Topology.fork(1, int(match[1]))
    if match := re.fullmatch(r"(?:fork|target-root):(\d{1,18})x(\d{1,18})", spec):
        return Topology.fork(int(match[1]), int(match[2]))
    if spec.startswith("["):
        try:
            paths = json.loads(spec)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"tree {shown!r} is not a readable list of paths ({error}); allowed: {_ALLOWED}") from None
        if all(isinstance(path, list) for path in paths):
            return Topology.from_paths(paths)
    raise UsageError(f"unknown tree {shown!r}; allowed: {_ALLOWED}")
