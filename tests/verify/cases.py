"""Small trees and distributions to enumerate."""

from functools import cache

import numpy as np

from polydraft.trees import Topology, parse_tree

from .enumeration import Batch, Tables, awkward_tables, random_tables

TREES = {
    "1x2": 3,
    "2x1": 3,
    "2x2": 3,
    "chain:3": 3,
    "3x1x1": 2,
    "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]": 2,
    "[[0],[1],[1,0],[1,1],[1,1,0]]": 3,  # the first child is a leaf, the second is not
}
"""Trees with the number of tokens they are drawn from."""


@cache
def batch_of(tree: str, vocabulary: int, cases: int = 2) -> Batch:
    """Return some ordinary and some awkward cases, one in which draft and target agree among them."""
    random = np.random.default_rng(7)
    topology = parse_tree(tree)
    ordinary = [random_tables(random, vocabulary, topology.depth, 1.0, (0.0, 0.5)[case % 2]) for case in range(cases)]
    awkward = [awkward_tables(random, vocabulary, topology.depth) for _ in range(cases)]
    target, _ = random_tables(random, vocabulary, topology.depth, 1.0, 0.0)
    return Batch(topology, [*ordinary, *awkward, (target, target)])


def theory_batch() -> Batch:
    """Return the eight cases of the theory note's table: V = 3, tree (2, 2), with replacement."""
    random = np.random.default_rng(3)
    for vocabulary, depth, cases in ((3, 2, 30), (2, 2, 30), (3, 2, 30), (3, 2, 8)):
        made: list[tuple[Tables, Tables]] = []
        for _ in range(cases):
            sharpness, agreement = random.choice([0.5, 1.0]), random.choice([0.0, 0.5])
            made.append(random_tables(random, vocabulary, depth, sharpness, agreement))
    return Batch(Topology.from_widths([2, 2]), made)
