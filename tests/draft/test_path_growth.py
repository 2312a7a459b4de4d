"""What a dynamic tree is made of: the likeliest paths of the draft, in the right places."""

import heapq

import pytest
import torch

from polydraft.certify.reference import echo_pair
from polydraft.draft import TreeDrafter
from polydraft.lab.theory import Costs
from polydraft.sampling import NO_TOKEN, RowParams, SamplingParams
from polydraft.trees import DraftTree, DynamicShape

TARGET, DRAFT = echo_pair().target, echo_pair().draft
FLAT = Costs(draft_level=0.01, tree_pass=lambda nodes: 1.0)
TEXTS = [[4, 17], [30, 2, 2, 8, 11, 25, 6, 19]]


def proposed(shape: DynamicShape, params: SamplingParams, costs: Costs = FLAT) -> DraftTree:
    session = TreeDrafter(DRAFT, shape, costs=costs).start(RowParams.of(params, len(TEXTS)), TARGET)
    with torch.inference_mode():
        session.begin(TEXTS, 40, range(len(TEXTS)), RowParams.of(params, len(TEXTS)))
        uniforms_BU = torch.rand(
            len(TEXTS), session.num_uniforms, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        return session.propose(torch.tensor([text[-2:] for text in TEXTS]), uniforms_BU)


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], int]:
    """Paths of tokens below the root, found through child tables alone, and their nodes."""
    found, waiting = {}, [((), 0)]
    while waiting:
        path, node = waiting.pop()
        for child in tree.child_table_BNK[row, node].tolist():
            token = int(tree.tokens_BN[row, child])
            if child and token != NO_TOKEN:
                assert (*path, token) not in found or tree.distributions, "a path is listed once, where children are chosen"
                found.setdefault((*path, token), child)
                waiting.append(((*path, token), child))
    return found


def likeliest(text: list[int], count: int, depth: int) -> list[tuple[int, ...]]:
    """Paths by falling probability, by a heap over the draft's exact distributions."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: list[tuple[int, ...]] = []
    while heap and len(found) <= count:
        negative, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < depth:
            distribution_V = torch.softmax(DRAFT.logits_after([*text, *path]).double(), -1)
            for token in range(len(distribution_V)):
                heapq.heappush(heap, (negative * float(distribution_V[token]), (*path, token)))
    return found[1:]


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (8, 3), (21, 4), (40, 5)])
def test_a_greedy_tree_has_the_likeliest_paths(nodes: int, depth: int) -> None:
    shape = DynamicShape(nodes=nodes, depth=depth, beam=32, branch=32, adaptive=False)
    tree = proposed(shape, SamplingParams(temperature=0))
    assert tree.tokens_BN.shape[1] == nodes and tree.depth == depth
    for row, text in enumerate(TEXTS):
        assert set(paths_of(tree, row)) == set(likeliest(text, nodes - 1, depth))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tables_agree_with_each_other(temperature: float) -> None:
    tree = proposed(DynamicShape(nodes=24, depth=4), SamplingParams(temperature=temperature))
    for row in range(len(TEXTS)):
        paths = paths_of(tree, row)
        assert len(paths) > 4
        for path, node in paths.items():
            assert int(tree.depths_BN[row, node]) == len(path)
            above = {0, *(paths[path[:length]] for length in range(1, len(path) + 1))}
            assert set(tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()) == above
            assert max(above) == node, "breadth first: nobody stands before his ancestors"
    assert not torch.equal(tree.ancestors_BNN[0], tree.ancestors_BNN[1]), "rows have their own shapes"


def test_a_dear_pass_makes_small_trees() -> None:
    steep = Costs(draft_level=0.01, tree_pass=lambda nodes: 1 + 0.2 * (nodes - 1))
    small, large = (proposed(DynamicShape(nodes=32, depth=4), SamplingParams(temperature=0), costs) for costs in (steep, FLAT))
    assert small.tokens_BN.shape[1] < 8 < large.tokens_BN.shape[1]
    for row, text in enumerate(TEXTS):
        paths = set(paths_of(small, row))
        assert set() < paths < set(paths_of(large, row)) and paths == set(likeliest(text, len(paths), 4))
