"""Children of a static tree, whatever its shape."""

import pytest
import torch

from polydraft.draft import DistributionSource
from polydraft.draft.static_builder import StaticBuilder
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams
from polydraft.trees import parse_tree

SIZE = 30


@pytest.mark.parametrize("tree", ["4x2x1", "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[1,0,0],[1,0,1]]"])
@pytest.mark.parametrize("known", [False, True], ids=["all tokens", "part of the tokens"])
def test_greedy_children_are_the_likeliest_in_order(tree: str, known: bool) -> None:
    topology, rows = parse_tree(tree), 3
    vocabulary = PartialVocabulary(torch.arange(0, SIZE, 3), SIZE) if known else None
    greedy = RowParams.of(SamplingParams(temperature=0), rows)
    growth = StaticBuilder(DistributionSource(torch.device("cpu"), vocabulary), topology, greedy, SIZE)
    growth.begin([[1]] * rows, range(rows), greedy)
    logits_BNV = torch.randn(rows, topology.num_nodes, SIZE // 3 if known else SIZE, generator=torch.Generator().manual_seed(0))
    tokens_BN = growth.plant(torch.zeros(rows, dtype=torch.long))
    for level in growth.plan.levels:
        nodes = torch.arange(level.first, level.stop)[level.drawing]
        growth.draw(level, logits_BNV[:, nodes], tokens_BN, torch.zeros(rows, topology.num_nodes - 1))
    for node in range(topology.num_nodes):
        children = [child for child, parent in enumerate(topology.parents) if parent == node and child]
        best_BK = logits_BNV[:, node].topk(len(children)).indices if children else torch.empty(rows, 0, dtype=torch.long)
        expected_BK = vocabulary.tokens(best_BK) if vocabulary else best_BK
        assert tokens_BN[:, children].tolist() == expected_BK.tolist()
