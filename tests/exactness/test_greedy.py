"""Layer 4: at temperature 0 speculation changes not a single token."""

from functools import cache
from itertools import product

import pytest
import torch

from covering import all_slow, chosen, covering
from polydraft.certify.reference import greedy_text
from polydraft.draft import DRAFTERS
from polydraft.engine import Decoder
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES

from .checks import unequal_texts
from .configurations import SCHEMES_AND_WALKS
from .setups import COMBINATIONS, DRAFT, PARALLEL, PENALTIES, RAGGED_PROMPTS, TARGET, TREES, VOCABULARY, make_decoder, tree_for

GREEDY = SamplingParams(temperature=0)
GREEDY_PENALTIES = SamplingParams(
    temperature=0,
    repetition_penalty=PENALTIES.repetition_penalty,
    presence_penalty=PENALTIES.presence_penalty,
    frequency_penalty=PENALTIES.frequency_penalty,
)
MANY_PROMPTS = [*RAGGED_PROMPTS, [21], *([first, last] for first in range(0, 32, 5) for last in range(1, 32, 6))]
NEW_TOKENS = 20


def texts(decoder: Decoder, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [result.token_ids for result in decoder.generate(prompts, sampling=sampling, max_new_tokens=NEW_TOKENS)]


@cache
def argmax_texts(penalties: bool) -> list[list[int]]:
    """Continue all prompts by the hand-written loop."""
    sampling = GREEDY_PENALTIES if penalties else GREEDY
    return [greedy_text(TARGET, prompt, NEW_TOKENS, sampling) for prompt in MANY_PROMPTS]


def test_plain_decoding_is_the_argmax_loop() -> None:
    for penalties, sampling in enumerate((GREEDY, GREEDY_PENALTIES)):
        plain = texts(make_decoder(drafter="none"), MANY_PROMPTS, sampling)
        assert unequal_texts(plain, argmax_texts(bool(penalties))) == 0


# A greedy draft has no temperature of its own.
PICKED = [
    (scheme, (walk, tree), (walk, temperature))
    for (scheme, walk), tree, temperature in product(SCHEMES_AND_WALKS, TREES, [None, 1.0])
]
QUICK = set(chosen(PICKED))
"""Every scheme by some walk, and every walk through every tree and with every draft: schemes see one node at a time."""


@pytest.mark.parametrize(("scheme", "walk", "tree", "draft_temperature"), [
    pytest.param(one[0], *one[1], one[2][1], marks=() if one in QUICK else pytest.mark.slow) for one in PICKED
])  # fmt: skip
def test_every_scheme_tree_and_walk_gives_the_argmax_text(
    scheme: str, walk: str, tree: str, draft_temperature: float | None
) -> None:
    decoder = make_decoder(scheme=scheme, walk=walk, tree=tree_for(scheme, tree), draft_temperature=draft_temperature)
    results = decoder.generate(MANY_PROMPTS, sampling=GREEDY, max_new_tokens=NEW_TOKENS, seed=3)
    assert unequal_texts([result.token_ids for result in results], argmax_texts(penalties=False)) == 0
    assert 0.1 < results[0].stats.acceptance_rate < 0.99


# Of unions one is enough by default: others have greedy rows in tests of their own.
@pytest.mark.parametrize(
    ("drafter", "penalties"),
    [*covering([*DRAFTERS, *PARALLEL, COMBINATIONS[0]], [False, True]), *all_slow(COMBINATIONS[1:], [False, True])],
)
def test_every_drafter_gives_the_argmax_text(drafter: str, penalties: bool) -> None:
    decoder = make_decoder(drafter=drafter, scheme="auto")
    drafted = texts(decoder, MANY_PROMPTS, GREEDY_PENALTIES if penalties else GREEDY)
    assert unequal_texts(drafted, argmax_texts(penalties)) == 0


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_draft_equal_to_the_target_is_always_accepted(scheme: str) -> None:
    # Errors in the draft's own memory cost acceptance, never exactness: only this sees them.
    decoder = make_decoder(scheme=scheme, tree=tree_for(scheme), draft=TARGET)
    for prompts in (RAGGED_PROMPTS, MANY_PROMPTS):
        assert decoder.generate(prompts, sampling=GREEDY, max_new_tokens=NEW_TOKENS)[0].stats.acceptance_rate == 1.0


@pytest.mark.parametrize(("scheme", "tree"), [("speculative", "chain:4"), ("rrs-wor", "3x2x1")])
@pytest.mark.parametrize("sampling", [SamplingParams(), PENALTIES, SamplingParams(top_p=0.8, temperature=1.3)])
def test_a_sampling_draft_equal_to_the_target_is_always_accepted(scheme: str, tree: str, sampling: SamplingParams) -> None:
    decoder = make_decoder(scheme=scheme, tree=tree, draft=TARGET)
    results = decoder.generate(RAGGED_PROMPTS * 5, sampling=sampling, max_new_tokens=40, seed=1)
    assert results[0].stats.acceptance_rate == 1.0


def test_a_draft_equal_to_the_target_is_always_accepted_after_a_one_token_prompt() -> None:
    decoder = make_decoder(scheme="speculative", tree="chain:4", draft=TARGET)
    results = decoder.generate([[21]] * 40, sampling=PENALTIES, max_new_tokens=NEW_TOKENS, seed=1)
    assert results[0].stats.acceptance_rate == 1.0


def test_a_draft_with_a_shorter_context_changes_nothing() -> None:
    table = DRAFT.logits_XV.reshape([VOCABULARY] * 4)
    decoder = make_decoder(draft=TabularModel(table, max_positions=9))
    assert unequal_texts(texts(decoder, MANY_PROMPTS), argmax_texts(penalties=False)) == 0


def test_processors_see_each_node_with_its_own_ancestors() -> None:
    def never_repeat(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid all tokens of the text so far: the text is then a walk without repetition."""
        return scores.scatter(1, input_ids, -torch.inf)

    sampling = SamplingParams(temperature=0, processors=(never_repeat,))
    plain = texts(make_decoder(drafter="none"), RAGGED_PROMPTS, sampling)
    assert all(len({*prompt, *text}) == len({*prompt}) + NEW_TOKENS for prompt, text in zip(RAGGED_PROMPTS, plain, strict=True))
    assert texts(make_decoder(), RAGGED_PROMPTS, sampling) == plain
