"""Every early stop's mask is a slice of the one large mask."""

import random

import pytest
import torch

from polydraft.trees import Block, DraftTree, SlicedMask, Topology, parse_tree

CPU = torch.device("cpu")


def random_tree(seed: int) -> Topology:
    """A tree in breadth-first order with any numbers of children."""
    draw = random.Random(seed)
    parents, level = [0], [0]
    for _ in range(draw.randint(1, 5)):
        grown = []
        for node in level:
            for _ in range(draw.choice([0, 1, 1, 2, 3])):
                grown.append(len(parents))
                parents.append(node)
        level = grown
    return Topology(tuple(parents))


TREES = [
    parse_tree(text) for text in ("fork:16x5", "fork:3x3", "chain:4", "4x2x2x1x1", "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0]]")
]
TREES += [random_tree(seed) for seed in range(25)]


@pytest.mark.parametrize("topology", TREES, ids=lambda topology: f"{topology.num_nodes} nodes, {topology.depth} deep")
def test_every_stop_is_a_slice_of_the_large_mask(topology: Topology) -> None:
    mask = SlicedMask.of(topology, CPU)
    for depth in range(topology.depth + 1):
        nodes = sum(len(level) for level in topology.levels[: depth + 1])
        built = Topology(topology.parents[:nodes]).tables(CPU)  # from scratch
        sliced = mask.stopped(depth)
        assert torch.equal(sliced.ancestors_NN, built.ancestors_NN)
        assert torch.equal(sliced.depths_N, built.depths_N)
        assert sliced.ancestors_NN.data_ptr() == mask.visible_PP.data_ptr(), "a slice shares the large mask's memory"
        width = built.child_table_NK.shape[1]
        assert torch.equal(sliced.child_table_NK[:, :width], built.child_table_NK)
        assert not sliced.child_table_NK[:, width:].any()


def test_a_lead_only_moves_the_nodes_on() -> None:
    topology = parse_tree("2x2x1")
    plain, led = SlicedMask.of(topology, CPU), SlicedMask.of(topology, CPU, lead=2)
    assert torch.equal(plain.stopped(2).ancestors_NN, led.stopped(2).ancestors_NN)
    block = led.level(3, 7).expand(2)
    assert isinstance(block, Block) and block.start == 5 and block.depths_BT.tolist() == [[4] * 4] * 2
    assert block.visible_BTU[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5], "lead, root, parent, itself"


def test_a_tree_tells_its_longest_path_and_which_branch_a_node_is() -> None:
    topology = parse_tree("[[0],[1],[0,0],[1,0],[1,0,0]]")
    tokens_BN = torch.tensor([[9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, -1], [9, -1, -1, -1, -1, -1]])
    tree = DraftTree.from_topology(topology, tokens_BN, (), torch.zeros(6, dtype=torch.long))
    assert tree.longest().tolist() == [3, 2, 0]
    assert tree.branch(torch.tensor([2, 1, 0])).tolist() == [1, 0, -1]
