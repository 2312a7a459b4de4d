"""Parents, depths, children and ancestors against their definitions, spelled out slowly."""

import random

import pytest
import torch

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree, Topology, causal_block, parse_tree, union

CPU = torch.device("cpu")


def random_tree(seed):
    rng = random.Random(seed)
    return Topology((0, *sorted(rng.randrange(node) for node in range(1, rng.randint(2, 20)))))


TREES = [
    *(parse_tree(text) for text in ("none", "1", "4x2x1", "chain:5", "fork:3x3", "[[0],[1],[0,0],[0,1],[1,0],[0,1,0]]")),
    *(random_tree(seed) for seed in range(8)),
]


def ancestors(topology, node):
    """The node itself and all above it."""
    found = {node}
    while node:
        node = topology.parents[node]
        found.add(node)
    return found


every_tree = pytest.mark.parametrize("topology", TREES, ids=str)


@every_tree
def test_tables_against_definitions(topology):
    nodes = range(topology.num_nodes)
    tables = topology.tables(CPU)
    for node in nodes:
        above = ancestors(topology, node)
        assert topology.depths[node] == len(above) - 1 == tables.depths_N[node]
        assert set(tables.ancestors_NN[node].nonzero()[:, 0].tolist()) == above
        children = [other for other in nodes if other and topology.parents[other] == node]
        assert list(topology.children[node]) == children
        row = tables.child_table_NK[node].tolist()
        assert row == children + [0] * (len(row) - len(children))
    assert topology.depth == max(topology.depths)
    assert topology.max_children == max(len(topology.children[node]) for node in nodes)


@every_tree
def test_levels_are_contiguous_and_complete(topology):
    assert [node for level in topology.levels for node in level] == list(range(topology.num_nodes))
    for depth, level in enumerate(topology.levels):
        assert {topology.depths[node] for node in level} == {depth}


@every_tree
def test_draws_cover_every_node_once_in_draw_order(topology):
    drawn = [child for groups in topology.draws for group in groups for children in group.children for child in children]
    assert sorted(drawn) == list(range(1, topology.num_nodes))
    for level, groups in zip(topology.levels, topology.draws, strict=True):
        for group in groups:
            assert all(node in level for node in group.nodes)
            assert len(set(map(len, group.children))) == 1
            assert all(topology.children[node] == children for node, children in zip(group.nodes, group.children, strict=True))


@every_tree
def test_a_draft_tree_shares_the_shape_among_rows(topology):
    nodes = topology.num_nodes
    tokens_BN = torch.randint(50, (3, nodes))
    tree = DraftTree.from_topology(topology, tokens_BN, (), torch.zeros(nodes, dtype=torch.long))
    block = tree.block()
    assert (block.start, block.size, block.stop) == (0, nodes, nodes)
    assert tree.depth == topology.depth
    for node in range(nodes):
        found_BK, children_BK = tree.children(torch.full((3,), node))
        width = len(topology.children[node])
        assert found_BK[1, :width].tolist() == list(topology.children[node])
        assert torch.equal(children_BK[:, :width], tokens_BN[:, list(topology.children[node])])
        assert (children_BK[:, width:] == NO_TOKEN).all()


def test_distributions_are_found_by_level_and_row():
    topology = parse_tree("2x1")
    distributions = (torch.rand(2, 1, 5), torch.rand(2, 2, 5))
    tree = DraftTree.from_topology(topology, torch.zeros(2, 5, dtype=torch.long), distributions, torch.tensor([0, 0, 1, 0, 0]))
    assert torch.equal(tree.draft_distribution(0, torch.tensor([0, 0])), distributions[0][:, 0])
    got = tree.draft_distribution(1, torch.tensor([2, 1]))
    assert torch.equal(got[0], distributions[1][0, 1]) and torch.equal(got[1], distributions[1][1, 0])


def test_a_row_that_stopped_higher_up_may_ask_for_any_distribution():
    """In a batch, rows whose walk has ended stay at their node while others descend; theirs is not used but must exist."""
    topology = parse_tree("[[0],[1],[0,0],[1,0],[0,0,0]]")
    distributions = (torch.rand(2, 1, 5), torch.rand(2, 2, 5), torch.rand(2, 1, 5))
    rows = torch.tensor([0, 0, 1, 0, 0, 0])
    tree = DraftTree.from_topology(topology, torch.zeros(2, 6, dtype=torch.long), distributions, rows)
    got = tree.draft_distribution(
        2, torch.tensor([2, 3])
    )  # row 0 rests at node 2, which drew from its level's second distribution
    assert torch.equal(got[1], distributions[2][1, 0])


def test_no_distributions_at_all():
    tree = DraftTree.from_topology(Topology(), torch.zeros(3, 1, dtype=torch.long), (), torch.zeros(1, dtype=torch.long))
    assert tree.draft_distribution(0, torch.zeros(3, dtype=torch.long)).shape == (3, 0)


def test_parents_out_of_order_are_a_programming_error():
    for parents in [(1,), (0, 1), (0, 0, 2), (0, 0, 1, 0)]:
        with pytest.raises(AssertionError):
            Topology(parents)


def test_a_causal_block_sees_itself_and_all_before():
    block = causal_block(2, 4, CPU)
    assert block.depths_BT.tolist() == [[0, 1, 2, 3]] * 2
    for row in range(4):
        assert block.visible_BTU[1, row].tolist() == [column <= row for column in range(4)]


def test_tables_are_built_once():
    assert parse_tree("3x2").tables(CPU) is parse_tree("3x2").tables(CPU)


def test_a_chain_is_read_as_a_text_and_stays_where_it_is() -> None:
    for spec, chain in (("none", True), ("chain:3", True), ("2x1", False)):
        topology = parse_tree(spec)
        tokens_BN = torch.arange(topology.num_nodes)[None]
        tree = DraftTree.from_topology(topology, tokens_BN, (), torch.zeros(topology.num_nodes, dtype=torch.long))
        assert tree.chain == tree.block().plain == chain
        other = DraftTree.from_topology(parse_tree("chain:2"), torch.tensor([[0, 5, 6]]), (), torch.zeros(3, dtype=torch.long))
        assert not union(tree, other).chain
