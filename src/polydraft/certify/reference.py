"""Pairs of models with known distributions, and the distributions of their texts, computed independently with numpy."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.certify.enumeration import FIXTURE_DRAFT_V, FIXTURE_TARGET_V
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams

ECHO_VOCABULARY = 32
_SHARPNESS = 2.5  # gives distributions of about two nats: drafts are rejected, yet there are few enough cells to test
_LAST = [14, 9, 3]


@dataclass(frozen=True)
class ModelPair:
    """A target, its draft, and a prompt."""

    target: TabularModel
    draft: TabularModel
    prompt: tuple[int, ...]


def echoing_model(seed: int) -> TabularModel:
    """Make a random table that tends to repeat its context, so that penalties matter.

    Distributions depend on the last three tokens: drafting starts from two known tokens, so only a third can reveal errors in
    the draft's cache.
    """
    generator = torch.Generator().manual_seed(seed)
    table_XXXV = _SHARPNESS * torch.randn([ECHO_VOCABULARY] * 4, generator=generator)
    tokens_V = torch.arange(ECHO_VOCABULARY)
    table_XXXV[:, :, tokens_V, tokens_V] += 3.0
    table_XXXV[:, tokens_V, :, tokens_V] += 3.0
    return TabularModel(table_XXXV)


@cache
def echo_pair() -> ModelPair:
    """Return models of 32 tokens with distributions of about two nats, and a draft that mostly agrees."""
    target = echoing_model(seed=1)
    # Put the likeliest continuations into the prompt, so that the repetition penalty applies to them.
    likeliest = [int(token) for token in target.logits_after(_LAST).topk(3).indices]
    return ModelPair(target, target.mixed_with(echoing_model(seed=2), share=0.7), (*likeliest, *_LAST))


@cache
def fixture_pair() -> ModelPair:
    """Return models with the distributions of fixture F at every node: they expose wrong verification soonest."""
    models = [TabularModel(distribution_V.log().repeat(4, 1)) for distribution_V in (FIXTURE_TARGET_V, FIXTURE_DRAFT_V)]
    return ModelPair(models[0], models[1], (0, 0))


@cache
def small_pair() -> ModelPair:
    """Return models of three tokens whose distributions depend on the last three: few enough texts to test each of them."""
    models = [TabularModel.random(3, order=3, seed=seed, sharpness=1.5) for seed in (5, 6)]
    return ModelPair(models[0], models[1], (2, 0, 1))


def next_distributions(model: TabularModel, prompt: list[int], new_NL: NDArray[Any], params: SamplingParams) -> NDArray[Any]:
    """Return the next token's probabilities [N, V] after a prompt and L new tokens."""
    text_NT = joined(prompt, new_NL)
    return sampled_distributions(_logits(model, text_NT), text_NT, new_NL, params)


def joined(prompt: list[int], new_NL: NDArray[Any]) -> NDArray[Any]:
    """Return whole texts: the prompt before each row of new tokens."""
    return np.concatenate([np.tile(np.array(prompt), (len(new_NL), 1)), new_NL], axis=1)


def sampled_distributions(
    scores_NV: NDArray[Any], text_NT: NDArray[Any], new_NL: NDArray[Any], params: SamplingParams
) -> NDArray[Any]:
    """Return the sampling distributions for logits after whole texts; steps have the order of Hugging Face `generate`."""
    scores_NV = scores_NV.copy()
    for token, bias in params.logit_bias.items():
        scores_NV[:, token] += bias
    penalty, vocabulary = params.repetition_penalty, scores_NV.shape[1]
    punished_NV = np.where(scores_NV > 0, scores_NV / penalty, scores_NV * penalty)
    scores_NV = np.where(_counts(text_NT, vocabulary) > 0, punished_NV, scores_NV)
    counts_NV = _counts(new_NL, vocabulary)
    scores_NV = scores_NV - params.presence_penalty * (counts_NV > 0) - params.frequency_penalty * counts_NV
    if new_NL.shape[1] < params.min_tokens:
        scores_NV[:, list(params.stop_token_ids)] = -np.inf
    if params.temperature == 0:
        one_hot_NV: NDArray[Any] = np.eye(vocabulary)[scores_NV.argmax(-1)]
        return one_hot_NV
    return _truncated(_softmax(scores_NV / params.temperature), params)


@lru_cache(maxsize=200_000)
def _logits_after(model: TabularModel, recent: tuple[int, ...]) -> NDArray[Any]:
    logits_V: NDArray[Any] = model.logits_after(list(recent)).double().numpy()
    return logits_V


def _logits(model: TabularModel, text_NT: NDArray[Any]) -> NDArray[Any]:
    contexts, row_N = np.unique(text_NT[:, -model.order :], axis=0, return_inverse=True)
    return np.stack([_logits_after(model, tuple(context)) for context in contexts.tolist()])[row_N.reshape(-1)]


def _counts(tokens_NT: NDArray[Any], vocabulary: int) -> NDArray[Any]:
    counts_NV = np.zeros((len(tokens_NT), vocabulary))
    np.add.at(counts_NV, (np.arange(len(tokens_NT))[:, None], tokens_NT), 1)
    return counts_NV


def _softmax(scores_NV: NDArray[Any]) -> NDArray[Any]:
    weights_NV: NDArray[Any] = np.exp(scores_NV - scores_NV.max(-1, keepdims=True))
    weights_NV /= weights_NV.sum(-1, keepdims=True)
    return weights_NV


def _truncated(probs_NV: NDArray[Any], params: SamplingParams) -> NDArray[Any]:
    """Apply top-k, then top-p to what is left, then min-p, to tokens sorted from the likeliest down; then renormalise."""
    order_NV = np.argsort(-probs_NV, axis=-1)
    sorted_NV = np.take_along_axis(probs_NV, order_NV, axis=-1)
    if params.top_k:
        sorted_NV[:, params.top_k :] = 0
    sorted_NV /= sorted_NV.sum(-1, keepdims=True)
    mass_before_NV = np.cumsum(sorted_NV, axis=-1) - sorted_NV
    if params.top_p < 1:  # with 1 keep all tokens, whatever the sums round to
        sorted_NV[mass_before_NV >= params.top_p] = 0
    sorted_NV[sorted_NV < params.min_p * sorted_NV[:, :1]] = 0
    distribution_NV = np.zeros_like(probs_NV)
    np.put_along_axis(distribution_NV, order_NV, sorted_NV / sorted_NV.sum(-1, keepdims=True), axis=-1)
    return distribution_NV


def greedy_text(model: TabularModel, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """Return the greedy continuation of a prompt, computed one token at a time."""
    new_tokens: list[int] = []
    while len(new_tokens) < count:
        distribution_1V = next_distributions(model, prompt, np.array(new_tokens, dtype=int)[None], params)
        new_tokens.append(int(distribution_1V.argmax()))
    return new_tokens
