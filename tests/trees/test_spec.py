"""Trees as users write them."""

import pytest

from polydraft.errors import UsageError
from polydraft.trees import MAX_NODES, Topology, parse_tree


@pytest.mark.parametrize(
    ("text", "parents"),
    [
        ("none", (0,)),
        ("1", (0, 0)),
        ("3", (0, 0, 0, 0)),
        ("2x1", (0, 0, 0, 1, 2)),
        ("2x2", (0, 0, 0, 1, 1, 2, 2)),
        (" 2X1 ", (0, 0, 0, 1, 2)),
        ("chain:3", (0, 0, 1, 2)),
        ("fork:2x3", (0, 0, 0, 1, 2, 3, 4)),
        ("fork:3x1", (0, 0, 0, 0)),
        ("[[0],[1],[0,0]]", (0, 0, 0, 1)),
        ("[[0,0], [1], [0], [1,0], [1,1]]", (0, 0, 0, 1, 2, 2)),
        ("[[0],[0]]", (0, 0)),
        ("[]", (0,)),
    ],
)
def test_specifications(text, parents):
    assert parse_tree(text).parents == parents


def test_the_same_tree_written_in_two_ways():
    assert parse_tree("chain:4") == parse_tree("1x1x1x1") == parse_tree("[[0],[0,0],[0,0,0],[0,0,0,0]]")
    assert parse_tree("fork:3x2") == parse_tree("3x1")


@pytest.mark.parametrize("text", ["none", "1", "4x2x2x1x1", "16x1x1"])
def test_regular_trees_are_spelled_as_they_are_read(text):
    assert str(parse_tree(text)) == text


def test_sparse_trees_are_spelled_by_size():
    assert str(parse_tree("[[0],[1],[0,0]]")) == "sparse tree of 4 nodes"


REFUSED = {
    "zero width": ("4x0x2", "width 0"),
    "zero": ("0", "width 0"),
    "zero chain": ("chain:0", "0"),
    "zero fork": ("fork:0x3", "0"),
    "zero fork depth": ("fork:3x0", "0"),
    "too many nodes": ("32x32x2", str(MAX_NODES)),
    "one node too many": (f"{MAX_NODES}", str(MAX_NODES)),
    "astronomically wide": ("99999999999999x99999999999999", str(MAX_NODES)),
    "astronomically deep": ("x".join(["9"] * 500), str(MAX_NODES)),
    "wide fork": ("fork:100000x1000", str(MAX_NODES)),
    "long chain": ("chain:5000", str(MAX_NODES)),
    "astronomically long chain": ("chain:99999999999999", str(MAX_NODES)),
    "a number of 5000 digits": ("9" * 5000, "unknown tree"),
    "orphan": ("[[0],[1,0]]", "orphan"),
    "sibling gap": ("[[0],[2]]", "[1]"),
    "deep sibling gap": ("[[0],[0,1]]", "[0, 0]"),
    "negative index": ("[[-1]]", "[-1]"),
    "fraction": ("[[0.5]]", "0.5"),
    "truth value": ("[[true]]", "True"),
    "empty path": ("[[]]", "[]"),
    "word index": ('[["a"],[0]]', "whole numbers"),
    "nested path": ("[[[0]]]", "whole numbers"),
    "object in a path": ("[[{}]]", "whole numbers"),
    "flat list": ("[0,1]", "unknown tree"),
    "broken list": ("[[0],[1]", "readable"),
    "many open brackets": ("[" * 100_000, "readable"),
    "empty": ("", "unknown tree"),
    "word": ("bushy", "unknown tree"),
    "negative width": ("4x-1", "unknown tree"),
    "trailing x": ("4x", "unknown tree"),
    "no length": ("chain:", "unknown tree"),
    "words": ("fork:axb", "unknown tree"),
    "object": ("{}", "unknown tree"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_readable_line(text, reason):
    with pytest.raises(UsageError) as caught:
        parse_tree(text)
    message = str(caught.value)
    assert reason in message and "\n" not in message
    assert len(message) < 400, "a huge specification is not quoted in full"


def test_the_largest_tree_is_allowed():
    assert parse_tree(f"{MAX_NODES - 1}").num_nodes == MAX_NODES
    assert parse_tree(f"chain:{MAX_NODES - 1}").depth == MAX_NODES - 1


def test_paths_may_be_any_sequences():
    assert Topology.from_paths([(1,), (0,), (0, 0)]) == parse_tree("[[0],[1],[0,0]]")


def test_too_many_paths_are_refused():
    with pytest.raises(UsageError, match="1,025 nodes"):
        Topology.from_paths([[index] for index in range(MAX_NODES)])
