"""Tests of whole texts, token by token, against exact laws of the next token."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.certify.chi_square import chi_square_p_value

Laws = Callable[[NDArray[Any]], NDArray[Any]]
"""New tokens so far [N, L] to the next token's probabilities [N, V]."""


def text_p_values(tokens_NL: NDArray[Any], target_laws: Laws, draft_laws: Laws) -> list[float]:
    """Test texts token by token: see the two functions below."""
    return conditional_p_values(tokens_NL[:, :3], target_laws) + transformed_p_values(tokens_NL, target_laws, draft_laws)


def conditional_p_values(tokens_NL: NDArray[Any], target_laws: Laws) -> list[float]:
    """Test the first token, and each later one given the likeliest beginning (likeliest by the law, not by the data)."""
    beginning_1T = np.empty((1, 0), dtype=int)
    p_values = []
    for position in range(tokens_NL.shape[1]):
        law_V = target_laws(beginning_1T)[0]
        counts = np.bincount(tokens_NL[:, position], minlength=len(law_V))
        p_values.append(chi_square_p_value(counts, law_V))
        beginning_1T = np.append(beginning_1T, [[law_V.argmax()]], axis=1)
        tokens_NL = tokens_NL[tokens_NL[:, position] == law_V.argmax()]
    return p_values


def transformed_p_values(tokens_NL: NDArray[Any], target_laws: Laws, draft_laws: Laws, bins: int = 16) -> list[float]:
    """Test every token given its own beginning, whatever that is, by the probability integral transform.

    Lay each token's law out on [0, 1] in some order and take a random point of the emitted token's stretch: if the law
    is right these points are independent and uniform, over all rows. Errors must push mass in one direction to show, so
    there are two orders: by target probability (a wrong context makes likely tokens rare) and by its ratio to the
    draft's (a wrong verification leaves too much or too little of the draft). Each position is tested alone, for errors of
    one depth, and all together, for small errors of every node.
    """
    random = np.random.default_rng(0)
    rows = np.arange(len(tokens_NL))
    counts_LOX = np.zeros((tokens_NL.shape[1], 2, bins))
    for position in range(tokens_NL.shape[1]):
        beginning_NT, token_N = tokens_NL[:, :position], tokens_NL[:, position]
        law_NV, draft_NV = target_laws(beginning_NT), draft_laws(beginning_NT)
        if not (law_NV[rows, token_N] > 0).all():
            return [0.0]
        ratio_NV = law_NV / np.where(draft_NV > 0, draft_NV, 1e-12)
        for index, key_NV in enumerate((law_NV, ratio_NV)):
            order_NV = np.argsort(-key_NV, axis=-1)
            stop_NV = np.cumsum(np.take_along_axis(law_NV, order_NV, axis=-1), axis=-1)
            rank_N = (order_NV == token_N[:, None]).argmax(-1)
            point_N = stop_NV[rows, rank_N] - random.random(len(rows)) * law_NV[rows, token_N]
            counts_LOX[position, index] = np.bincount((point_N * bins).astype(int).clip(0, bins - 1), minlength=bins)
    uniform = np.full(bins, 1 / bins)
    tables_TX = [*counts_LOX.reshape(-1, bins), *counts_LOX.sum(0)]
    return [chi_square_p_value(counts_X, uniform) for counts_X in tables_TX]


def joint_p_value(tokens_NL: NDArray[Any], target_laws: Laws) -> float:
    """Test whole texts at once against their joint law: for few tokens and short texts."""
    chance_X = joint_law(target_laws, tokens_NL.shape[1])
    vocabulary = round(len(chance_X) ** (1 / tokens_NL.shape[1]))
    cell_N = tokens_NL @ vocabulary ** np.arange(tokens_NL.shape[1])[::-1]
    return chi_square_p_value(np.bincount(cell_N, minlength=len(chance_X)), chance_X)


def joint_law(target_laws: Laws, length: int) -> NDArray[Any]:
    """Return the chance of every text of `length` tokens, the product of the laws along it; the last token counts fastest."""
    chance_X = np.ones(1)
    beginnings_XT = np.empty((1, 0), dtype=int)
    for _ in range(length):
        law_XV = target_laws(beginnings_XT)
        chance_X = (chance_X[:, None] * law_XV).reshape(-1)
        next_X = np.tile(np.arange(law_XV.shape[1]), len(beginnings_XT))
        beginnings_XT = np.column_stack([beginnings_XT.repeat(law_XV.shape[1], axis=0), next_X])
    return chance_X


def unequal_texts(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Count rows that differ."""
    return sum(list(one) != list(other) for one, other in itertools.zip_longest(texts, others, fillvalue=()))
