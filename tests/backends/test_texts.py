"""Nothing but speed depends on a backend: the references alone give the texts that the default gives."""

import pytest

from exactness.setups import DRAFT, GRAM_PROMPT, HEAD, RAGGED_PROMPTS, TARGET, make_decoder
from families import FAMILIES
from polydraft import operations
from polydraft.backends.native import kernels
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.9)


def large_models() -> tuple[HFModel, TreeDrafter]:
    """Return models of more tokens than `hybrid` has buckets, so that trees are verified in C where that is there."""
    target, draft = (HFModel(FAMILIES.get("llama").build(seed=seed, vocab_size=5000)) for seed in (1, 2))
    return target, TreeDrafter(draft, parse_tree("3x2x1"))


DECODERS = {
    "hybrid+block": (lambda: make_decoder(scheme="hybrid", walk="block"), DRAWN),
    "rrs-wor+node": (lambda: make_decoder(scheme="rrs-wor", walk="node"), DRAWN),
    "greedy": (lambda: make_decoder(scheme="auto", walk="auto"), GREEDY),
    "large vocabulary": (lambda: Decoder(*large_models()), DRAWN),
    "dynamic head": (lambda: Decoder(TARGET, TreeDrafter(HEAD, DynamicShape(nodes=16, depth=4))), DRAWN),
    "dynamic, greedy": (lambda: Decoder(TARGET, TreeDrafter(DRAFT, DynamicShape(nodes=16, depth=4))), GREEDY),
}


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_those_of_the_references(name: str) -> None:
    make, sampling = DECODERS[name]
    prompts = [*RAGGED_PROMPTS, list(GRAM_PROMPT)]

    def texts() -> list[list[int]]:
        results = make().generate(prompts, sampling=sampling, max_new_tokens=30, seed=[1, 2, 3, 4][: len(prompts)])
        return [result.token_ids for result in results]

    kernels()  # forms in C run where they are there already
    found = texts()
    with operations.using():
        assert texts() == found
    assert len({tuple(text) for text in found}) > 1
