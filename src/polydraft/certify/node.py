"""Samples of one node, drawn and verified as production does, against the laws they must follow."""

import numpy as np
import torch
from torch import Tensor

from polydraft.certify.chi_square import chi_square_p_value
from polydraft.schemes import Scheme

FIXTURE_SAMPLES = 20_000
"""Structural errors of a rule need up to 11,500 samples of the fixture."""


def sample_node(
    scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int, seed: int, samples: int = FIXTURE_SAMPLES
) -> tuple[Tensor, Tensor]:
    """Draw children_RK and verify them to token_R, as production does, many times."""
    generator = torch.Generator().manual_seed(seed)
    uniforms_RU = torch.rand(samples, count + scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    draft_RV = draft_V.float().repeat(samples, 1)
    children_RK = scheme.draw(draft_RV, uniforms_RU[:, :count])
    token_R = scheme.verify(target_V.float().repeat(samples, 1), draft_RV, children_RK, uniforms_RU[:, count:])
    return children_RK, token_R


def token_p_value(token_R: Tensor, law_V: Tensor) -> float:
    """Test single tokens against a law; a missing token, which no law has, gives 0."""
    if not ((token_R >= 0) & (token_R < len(law_V))).all():
        return 0.0
    return chi_square_p_value(torch.bincount(token_R, minlength=len(law_V)).numpy(), law_V.double().numpy())


def tuple_p_value(tuples: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Test tuples of tokens against a law given as a table."""
    cells_XK = np.array(list(expected))
    tuples_RK = tuples.numpy()
    # A mixed-radix number for each tuple; a missing child counts as token 0, all others one up.
    base = max(int(cells_XK.max()), int(tuples_RK.max())) + 2
    radix_K = base ** np.arange(cells_XK.shape[1])
    code_X, code_R = (cells_XK + 1) @ radix_K, (tuples_RK + 1) @ radix_K
    order_X = np.argsort(code_X)
    place_R = np.searchsorted(code_X[order_X], code_R).clip(max=len(code_X) - 1)
    # An unexpected tuple lands in one more cell, of chance zero.
    index_R = np.where(code_X[order_X][place_R] == code_R, order_X[place_R], len(code_X))
    counts = np.bincount(index_R, minlength=len(code_X) + 1)
    return chi_square_p_value(counts, np.array([*expected.values(), 0.0]))
