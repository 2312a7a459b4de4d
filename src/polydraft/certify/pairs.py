"""Pairs of models with known laws, a target and its draft, that whole texts are generated from."""

from dataclasses import dataclass
from functools import cache

import torch

from polydraft.certify.cases import FIXTURE_DRAFT_V, FIXTURE_TARGET_V
from polydraft.models import TabularModel

ECHO_VOCABULARY = 32
_SHARPNESS = 2.5  # laws of about two nats: enough to reject, few enough cells to see it
_LAST = [14, 9, 3]


@dataclass(frozen=True)
class ModelPair:
    """A target, its draft, and where texts begin."""

    target: TabularModel
    draft: TabularModel
    prompt: tuple[int, ...]


def echoing_model(seed: int) -> TabularModel:
    """Make a random table that likes to repeat its context, so that penalties have something to do.

    It looks three tokens back: drafting starts from two known ones, so only a third shows errors in a draft's memory.
    """
    generator = torch.Generator().manual_seed(seed)
    table_XXXV = _SHARPNESS * torch.randn([ECHO_VOCABULARY] * 4, generator=generator)
    tokens_V = torch.arange(ECHO_VOCABULARY)
    table_XXXV[:, :, tokens_V, tokens_V] += 3.0
    table_XXXV[:, tokens_V, :, tokens_V] += 3.0
    return TabularModel(table_XXXV)


@cache
def echo_pair() -> ModelPair:
    """32 tokens, laws of about two nats, a draft that agrees for the most part."""
    target = echoing_model(seed=1)
    # The likeliest continuations are in the prompt, where the repetition penalty finds them.
    likeliest = [int(token) for token in target.logits_after(_LAST).topk(3).indices]
    return ModelPair(target, target.mixed_with(echoing_model(seed=2), share=0.7), (*likeliest, *_LAST))


@cache
def fixture_pair() -> ModelPair:
    """Fixture F at every node: small effects of wrong verification show here first."""
    models = [TabularModel(law_V.log().repeat(4, 1)) for law_V in (FIXTURE_TARGET_V, FIXTURE_DRAFT_V)]
    return ModelPair(models[0], models[1], (0, 0))


@cache
def small_pair() -> ModelPair:
    """Three tokens whose laws depend on the last three: few enough texts to test each of them."""
    models = [TabularModel.random(3, order=3, seed=seed, sharpness=1.5) for seed in (5, 6)]
    return ModelPair(models[0], models[1], (2, 0, 1))
