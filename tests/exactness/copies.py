"""A tiny Llama and copies of it that draft in its own memory, with the exact distributions of their texts."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from families import FAMILIES
from polydraft import operations
from polydraft.certify.reference import joined, sampled_distributions
from polydraft.draft import Parts, make_drafter
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.models.int8_copy import Int8Copy
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree

from .setups import VOCABULARY

_SHARE = 0.75
"""Of the target's weights in a poor copy's: about half of what it drafts is accepted."""


def _network(seed: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return FAMILIES.get("llama").build(seed=seed, vocab_size=VOCABULARY, **sizes, num_key_value_heads=1, initializer_range=0.5)


@cache
def copy_target() -> HFModel:
    """Return a Llama of 32 tokens and about two nats."""
    with operations.using(*operations.BACKENDS):
        return HFModel(_network(seed=1))


@cache
def poor_copy() -> Int8Copy:
    """Return a copy that agrees in part: its keys are so far from the target's that those left behind would show.

    That of the target itself would hide most errors: nearly all that it drafts is accepted, and its keys are as good.
    """
    with operations.using(*operations.BACKENDS), torch.no_grad():
        blend = copy.deepcopy(_network(seed=1))
        for mine, other in zip(blend.parameters(), _network(seed=2).parameters(), strict=True):
            mine.lerp_(other, 1 - _SHARE)
        return Int8Copy(HFModel(blend))


@cache
def good_copy() -> Int8Copy:
    """Return the target's own copy."""
    with operations.using(*operations.BACKENDS):
        return Int8Copy(copy_target())


def make_copy_decoder(
    *, scheme: str = "rrs-wor", walk: str = "node", tree: str = "3x2x1", drafter: str = "model", draft: Int8Copy | None = None
) -> Decoder:
    """Build a decoder whose draft works in the target's memory."""
    dynamic = DynamicShape(nodes=8, depth=4, adaptive=False) if drafter == "dynamic" else None
    parts = Parts(
        draft=draft or poor_copy(),
        topology=parse_tree("none" if dynamic else tree),
        dynamic=dynamic,
        scheme=scheme,
    )
    with operations.using(*operations.BACKENDS):
        return Decoder(copy_target(), make_drafter(parts, drafter), walk=walk)


def network_distributions(model: HFModel, prompt: Sequence[int], new_NL: NDArray[Any], params: SamplingParams) -> NDArray[Any]:
    """Return the next token's probabilities [N, V], of whole texts that the network reads with neither mask nor cache."""
    text_NT = joined(list(prompt), new_NL)
    texts_MT, row_N = np.unique(text_NT, axis=0, return_inverse=True)
    logits_MV = model.plain(torch.from_numpy(texts_MT))[:, -1].double().numpy()
    return sampled_distributions(logits_MV[row_N.reshape(-1)], text_NT, new_NL, params)
