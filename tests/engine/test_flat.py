import pytest
import torch

from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.lab.papers.flat import FlatModel
from polydraft.models.hf import HFModel, early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, parse_tree

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("tree", ["3x2x1", "[[0],[1],[0,0],[0,1],[0,0,0]]"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copied_caches_give_the_same_text_as_tree_attention(tree: str, temperature: float) -> None:
    model = HFModel(FAMILIES.get("llama").build())
    drafter = TreeDrafter(early_exit(model, 2), parse_tree(tree))
    params = SamplingParams(temperature=temperature)
    texts = [
        [result.token_ids for result in Decoder(target, drafter).generate(PROMPTS, max_new_tokens=40, seed=1, sampling=params)]
        for target in (model, FlatModel(model, parse_tree(tree)))
    ]
    assert texts[0] == texts[1]


def test_copies_cost_memory_that_tree_attention_does_not() -> None:
    model = HFModel(FAMILIES.get("llama").build())
    tree = parse_tree("4x2")
    flat = FlatModel(model, tree)
    context = flat.start(1, 64)
    tables = tree.tables(torch.device("cpu"))
    with torch.inference_mode():
        context.prefill([list(range(40))])
        context.extend(
            torch.ones(1, tree.num_nodes, dtype=torch.long), Block(0, tables.depths_N[None], tables.ancestors_NN[None])
        )
    assert context._candidates is not None
    assert context._candidates.cache.nbytes > 4 * context._committed.cache.nbytes


def test_another_tree_is_refused() -> None:
    model = HFModel(FAMILIES.get("llama").build())
    decoder = Decoder(FlatModel(model, parse_tree("2x1")), TreeDrafter(early_exit(model, 2), parse_tree("3x1")))
    with pytest.raises(UsageError, match="flat mode"):
        decoder.generate([1, 2, 3], max_new_tokens=4)
