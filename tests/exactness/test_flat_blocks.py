"""Self-Draft's verification as its paper words it: caught as lossy by the checkers that all others pass."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from polydraft.certify.reference import greedy_text
from polydraft.draft import Parts, make_drafter
from polydraft.draft.trie import as_draft_tree
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.loading import load
from polydraft.papers.flat_blocks import FlatBlocksWalk
from polydraft.sampling import SamplingParams
from polydraft.trees import DraftTree, parse_tree
from polydraft.verify import Naive, NodeWalk, Walk
from small_tries import trie_of

from .checks import FALSE_ALARM, chi_square_p_value
from .setups import TARGET, VOCABULARY, gram_options

CANDIDATES = [[1, 0, 0], [1, 0, 1]]
AFTER_ONE_V = torch.tensor([[0.1, 0.9]], dtype=torch.float64)


def tree_of(shared: bool) -> DraftTree:
    trie = trie_of(0, CANDIDATES, shared)
    return as_draft_tree([trie], len(trie), 3, torch.device("cpu"))


def chance_of_zero_after_one(walk: Walk, draft: DraftTree, places: list[int]) -> float:
    """Enumerate the second token where the first is 1; `places` of the random numbers decide on it."""
    outcomes = []
    for numbers in itertools.product([place / 10 + 0.05 for place in range(10)], repeat=len(places)):
        uniforms_BU = torch.full((1, walk.uniforms(Naive(), 3)), 0.5, dtype=torch.float64)
        uniforms_BU[0, 0] = 0.95
        uniforms_BU[0, places] = torch.tensor(numbers, dtype=torch.float64)
        tokens = walk.run(Naive(), draft, lambda node_B, path_BP: AFTER_ONE_V, uniforms_BU).tokens_BD[0].tolist()
        assert tokens[0] == 1
        outcomes.append(tokens[1] == 0)
    return sum(outcomes) / len(outcomes)


def test_the_smallest_example_of_what_it_gets_wrong() -> None:
    # Both candidates try for the unlikely 0 by themselves, and the longer agreement is kept: 1 - .9² instead of .1, TV .09.
    flat = tree_of(shared=False)
    nodes = [node for node in range(7) if int(flat.depths_BN[0, node]) == 1]
    assert chance_of_zero_after_one(FlatBlocksWalk(7), flat, nodes) == pytest.approx(0.19)
    # One draw at the node that they share.
    assert chance_of_zero_after_one(NodeWalk(), tree_of(shared=True), [1]) == pytest.approx(0.1)


def _contested_prompt() -> tuple[list[int], float]:
    """Make a text that continued its end with the same two tokens before, then differently; say how likely the second is."""
    end = [14, 9, 3]
    distributions_VV = torch.stack([TARGET.logits_after([*end, first]).softmax(-1) for first in range(VOCABULARY)])
    # Most is wrong where the first is likely and the second neither likely nor unlikely.
    wrong_VV = TARGET.logits_after(end).softmax(-1)[:, None] * distributions_VV * (1 - distributions_VV)
    first, second = divmod(int(wrong_VV.argmax()), VOCABULARY)
    return [token for last in (5, 6, 7, 8) for token in (*end, first, second, last)] + end, float(
        distributions_VV[first, second]
    )


PROMPT, CHANCE = _contested_prompt()


def decoder(flat_blocks: bool) -> Decoder:
    parts = Parts(topology=parse_tree("none"), grams=replace(gram_options(), flat_blocks=flat_blocks))
    return Decoder(TARGET, make_drafter(parts, "ngram"), lossless=not flat_blocks)


@pytest.mark.parametrize("flat_blocks", [True, False])
def test_texts_catch_it(flat_blocks: bool) -> None:
    results = decoder(flat_blocks).generate([PROMPT] * 1_500, max_new_tokens=2, seed=11)
    seconds = [result.token_ids[1] == PROMPT[4] for result in results if result.token_ids[0] == PROMPT[3]]
    counts = np.array([sum(seconds), len(seconds) - sum(seconds)])
    p_value = chi_square_p_value(counts, np.array([CHANCE, 1 - CHANCE]))
    assert (p_value < FALSE_ALARM) == flat_blocks
    assert results[0].settings["walk"] == ("flat-blocks" if flat_blocks else "node")


def test_it_is_exact_at_temperature_zero() -> None:
    greedy = SamplingParams(temperature=0)
    result = decoder(flat_blocks=True).generate(PROMPT, sampling=greedy, max_new_tokens=40)
    assert result.token_ids == greedy_text(TARGET, PROMPT, 40, greedy)
    assert result.stats.tokens_per_pass > 1.5


def test_it_must_be_asked_for_twice(tiny: str) -> None:
    options = replace(gram_options(corpus=False), flat_blocks=True)
    with pytest.raises(UsageError, match="lossless=False"):
        load(tiny, drafter="ngram", grams=options)
    assert load(tiny, drafter="ngram", grams=options, lossless=False).drafter.lossless is False
    with pytest.raises(UsageError, match="flat-blocks cannot verify drafter 'ngram\\+model'"):
        load(tiny, "early-exit:1", drafter="ngram+model", grams=options, lossless=False)
    with pytest.raises(UsageError, match="drafter 'suffix'; allowed: self-draft, ngram, corpus"):
        load(tiny, drafter="suffix", grams=options, lossless=False)
