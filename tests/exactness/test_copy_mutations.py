"""The tests bite where a copy of the target drafts in the target's memory: machinery broken there is caught as well.

A copy may be wrong in what it reads, which costs acceptance. It must leave nothing behind that the target reads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import keeping
from polydraft.draft.copy_source import CopySource
from polydraft.models.hf_context import HFContext
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, DraftTree

from .checks import unequal_texts
from .configurations import THRESHOLD, CopyConfiguration
from .copies import copy_target, good_copy, make_copy_decoder
from .setups import RAGGED_PROMPTS
from .test_machinery_mutations import break_method, distribution_of_the_first_node_of_the_level, spelled

GREEDY = SamplingParams(temperature=0)
INNER = 10
"""Nodes of the tree 3x2x1 that the copy passes: all but the last level."""


def keys_of_the_copy_stay(original: Callable, context: HFContext, tokens_BT: Tensor, block: Block) -> Tensor:
    """Let the target's pass put nothing where the copy has put its own."""
    if context.model is not copy_target() or not any(context.lengths):  # the copy drafts, or a prompt is read
        return original(context, tokens_BT, block)
    stored = context.cache.keys_LBHSC, context.cache.values_LBHSC
    before = [one.clone() for one in stored]
    features_BTF = original(context, tokens_BT, block)
    place_BS = torch.arange(stored[0].shape[3]) - context.lengths_B[:, None]
    drafted_BS = (place_BS >= 0) & (place_BS < INNER)
    for one, old in zip(stored, before, strict=True):
        one.copy_(torch.where(drafted_BS[None, :, None, :, None], old, one))
    return features_BTF


def copy_begins_one_place_too_early(original: Callable, source: CopySource, tokens_BT: Tensor, block: Block) -> Tensor:
    """Overwrite the last committed token, and read one too few."""
    context: Any = source._context
    lengths = context.lengths
    context.rewind([length - 1 for length in lengths])
    features_BTF = original(source, tokens_BT, block)
    context.rewind(lengths)
    return features_BTF


def drafted_ancestors_unseen(original: Callable, source: CopySource, tokens_BT: Tensor, block: Block) -> Tensor:
    visible_BTU = block.visible_BTU.clone()
    visible_BTU[:, :, : block.start] = False
    return original(source, tokens_BT, replace(block, visible_BTU=visible_BTU))


LEAVES_SOMETHING_BEHIND = [
    (HFContext, "extend", keys_of_the_copy_stay),
    (CopySource, "_extend", copy_begins_one_place_too_early),
]


CHANGES_TEXTS = [*LEAVES_SOMETHING_BEHIND, (DraftTree, "draft_distribution", distribution_of_the_first_node_of_the_level)]


# Identity, below, shows the second by default, and the machinery's own tests the third.
@pytest.mark.parametrize(("owner", "method", "wrong"), keeping(CHANGES_TEXTS, CHANGES_TEXTS[0]), ids=spelled)
def test_texts_catch_a_broken_copy(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable) -> None:
    break_method(monkeypatch, owner, method, wrong)
    configuration = CopyConfiguration(label="copy")
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD


def greedy_texts(drafter: str = "model") -> list[list[int]]:
    results = make_copy_decoder(drafter=drafter).generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=20)
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("owner", "method", "wrong"), LEAVES_SOMETHING_BEHIND, ids=spelled)
def test_greedy_identity_catches_a_broken_copy(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable
) -> None:
    expected = greedy_texts("none")
    assert unequal_texts(greedy_texts(), expected) == 0
    break_method(monkeypatch, owner, method, wrong)
    assert unequal_texts(greedy_texts(), expected) > 0


def test_a_copy_that_reads_too_little_is_accepted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def acceptance() -> float:
        decoder = make_copy_decoder(draft=good_copy(), scheme="speculative", tree="chain:4")
        return decoder.generate(RAGGED_PROMPTS * 20, max_new_tokens=40, seed=1)[0].stats.acceptance_rate

    assert acceptance() > 0.95
    break_method(monkeypatch, CopySource, "_extend", drafted_ancestors_unseen)
    assert acceptance() < 0.92
