"""Checkers that the real tests and the mutation tests share: each returns a number, none decides."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Scheme

Laws = Callable[[np.ndarray], np.ndarray]
"""New tokens so far [N, L] to the next token's probabilities [N, V]."""

TOLERANCE = 1e-9
"""Of enumerations: float64 leaves about 1e-15, the smallest bug of interest (eps = 1e-3) about 1e-4."""

FALSE_ALARM = 1e-4
"""Chance that a correct implementation fails a family of statistical tests; seeds are fixed, so never twice."""

# Chosen so that structural errors (WR for WOR, dedup, sorting, wrong residual) show: theory note §1 and §9.
FIXTURE_TARGET_V = torch.tensor([0.15, 0.05, 0.24, 0.56], dtype=torch.float64)
FIXTURE_DRAFT_V = torch.tensor([0.06, 0.72, 0.20, 0.02], dtype=torch.float64)
FIXTURE_SAMPLES = 20_000


def largest_count(scheme: Scheme | type[Scheme], wanted: int) -> int:
    """Children that a test may ask of a scheme."""
    return wanted if scheme.max_children is None else min(wanted, scheme.max_children)


def drawings(scheme: Scheme, draft_probs_CV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Enumerate all drawings of C cases: case_R, children_RK, and the probability of each given its case.

    Breadth first over all cases at once, so that a scheme sees a few large calls.
    """
    case_R = torch.arange(len(draft_probs_CV))
    children_RJ = torch.empty(len(case_R), 0, dtype=torch.long)
    chance_R = torch.ones(len(case_R), dtype=torch.float64)
    for _ in range(count):
        law_RV = scheme.child_law(draft_probs_CV[case_R], children_RJ, count).double()
        total_R = law_RV.sum(-1)
        assert law_RV.min() >= 0, "a child law is negative"
        assert torch.all((total_R == 0) | ((total_R - 1).abs() < TOLERANCE)), "a child law is neither a law nor zero"
        ended_R = (children_RJ == NO_TOKEN).any(-1)
        assert torch.all(total_R[ended_R] == 0), "a child follows a missing one"
        # A column for "no child" takes the whole mass of zero rows.
        law_RX = torch.cat([law_RV, (total_R == 0).double()[:, None]], dim=1)
        row_S, child_S = law_RX.nonzero(as_tuple=True)
        chance_R = chance_R[row_S] * law_RX[row_S, child_S]
        child_S = torch.where(child_S == law_RV.shape[1], NO_TOKEN, child_S)
        children_RJ = torch.cat([children_RJ[row_S], child_S[:, None]], dim=1)
        case_R = case_R[row_S]
    return case_R, children_RJ, chance_R


def enumeration_error(
    scheme: Scheme, target_probs_CV: Tensor, draft_probs_CV: Tensor, count: int, missing: int = 0
) -> tuple[float, float]:
    """Return the largest error over all cases of the emitted token's law, and of single laws in not being laws.

    `missing` appends columns without a child, as nodes of a sparse tree have.
    """
    case_R, children_RK, chance_R = drawings(scheme, draft_probs_CV, count)
    children_RK = torch.nn.functional.pad(children_RK, (0, missing), value=NO_TOKEN)
    law_RV = scheme.law(target_probs_CV[case_R], draft_probs_CV[case_R], children_RK)
    assert law_RV.dtype == torch.float64
    emitted_CV = torch.zeros(target_probs_CV.shape, dtype=torch.float64)
    emitted_CV.index_add_(0, case_R, chance_R[:, None] * law_RV)
    target_CV = target_probs_CV.double() / target_probs_CV.double().sum(-1, keepdim=True)
    improper = max((law_RV.sum(-1) - 1).abs().max().item(), -law_RV.min().item())
    return (emitted_CV - target_CV).abs().max().item(), improper


def enumerated_acceptance(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> float:
    """Chance that the emitted token is one of the children."""
    _, children_RK, chance_R = drawings(scheme, draft_V[None], count)
    rows = len(children_RK)
    law_RV = scheme.law(target_V.expand(rows, -1), draft_V.expand(rows, -1), children_RK)
    among_RV = torch.zeros_like(law_RV).scatter_add_(1, children_RK.clamp(min=0), (children_RK != NO_TOKEN).double()) > 0
    return (chance_R[:, None] * law_RV * among_RV).sum().item()


def random_cases(vocabulary: int, cases: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return target and draft laws [C, V]: smooth, peaked, with zeros, one-hot, and each tenth pair equal."""
    random = np.random.default_rng(seed)

    def law() -> np.ndarray:
        kind = random.integers(4)
        if kind == 3:
            return np.eye(vocabulary)[random.integers(vocabulary)]
        weights = random.dirichlet(np.full(vocabulary, 0.3 if kind == 1 else 1.0))
        if kind == 2:
            weights[random.random(vocabulary) < 0.4] = 0
            weights[random.integers(vocabulary)] += 0.1
        return weights / weights.sum()

    pairs = [(law(), law()) for _ in range(cases)]
    pairs = [(draft if index % 10 == 0 else target, draft) for index, (target, draft) in enumerate(pairs)]
    targets, drafts = zip(*pairs, strict=True)
    return torch.tensor(np.array(targets)), torch.tensor(np.array(drafts))


def chi_square_p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Test counts against a law; cells expected fewer than five times are pooled, impossible events give 0."""
    if counts[law == 0].sum() > 0:
        return 0.0
    counts, expected = counts[law > 0], law[law > 0] / law.sum() * counts.sum()
    order = np.argsort(expected)
    # The least likely cells go together until their expectation reaches five.
    pooled = max(int(np.searchsorted(np.cumsum(expected[order]), 5.0)) + 1, int((expected < 5).sum()))
    expected = np.append(expected[order[pooled:]], expected[order[:pooled]].sum())
    counts = np.append(counts[order[pooled:]], counts[order[:pooled]].sum())
    if len(counts) < 2:
        return 1.0
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def sample_node(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw children_RK and verify them to token_R, as production does, many times."""
    generator = torch.Generator().manual_seed(seed)
    rows = FIXTURE_SAMPLES
    uniforms_RU = torch.rand(rows, count + scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    draft_RV = draft_V.float().expand(rows, -1)
    children_RK = scheme.draw(draft_RV, uniforms_RU[:, :count])
    token_R = scheme.verify(target_V.float().expand(rows, -1), draft_RV, children_RK, uniforms_RU[:, count:])
    return children_RK, token_R


def token_p_value(token_R: Tensor, law_V: Tensor) -> float:
    """Test single tokens against a law."""
    return chi_square_p_value(torch.bincount(token_R, minlength=len(law_V)).numpy(), law_V.double().numpy())


def tuple_p_value(tuples_RK: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Test tuples of tokens against a law given as a table."""
    cells = {cell: index for index, cell in enumerate(expected)}
    # An unexpected tuple lands in one more cell, of chance zero.
    index_R = np.array([cells.get(tuple(row), len(cells)) for row in tuples_RK.tolist()])
    counts = np.bincount(index_R, minlength=len(cells) + 1)
    return chi_square_p_value(counts, np.array([*expected.values(), 0.0]))


def text_p_values(tokens_NL: np.ndarray, target_laws: Laws, draft_laws: Laws) -> list[float]:
    """Test texts token by token: see the two functions below."""
    return conditional_p_values(tokens_NL[:, :3], target_laws) + transformed_p_values(tokens_NL, target_laws, draft_laws)


def conditional_p_values(tokens_NL: np.ndarray, target_laws: Laws) -> list[float]:
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


def transformed_p_values(tokens_NL: np.ndarray, target_laws: Laws, draft_laws: Laws, bins: int = 16) -> list[float]:
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


def unequal_texts(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Count rows that differ."""
    return sum(list(one) != list(other) for one, other in itertools.zip_longest(texts, others, fillvalue=()))
