"""Top-k, top-p and min-p: which tokens a distribution keeps, and which of these a coupled text takes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.operations import operation
from polydraft.sampling.gumbel import largest_perturbed
from polydraft.sampling.row_numbers import ALL, RowNumbers

_TOP_P_CANDIDATES = 2048


def truncated(scores_BGV: Tensor, numbers: RowNumbers, most_kept: int, cut_rows: Sequence[int]) -> Tensor:
    """Return scores with minus infinity for tokens that top-k, top-p or min-p of their rows rules out.

    Parameters
    ----------
    scores_BGV : Tensor
        Logits divided by the temperature.
    numbers : RowNumbers
    most_kept : int
        The largest top-k of all rows.
    cut_rows : sequence of int
        Rows with a top-p below 1.
    """
    if "top_k" in numbers.used:
        best_BGK = scores_BGV.topk(min(most_kept, scores_BGV.shape[-1]), dim=-1).values
        last_BG1 = (numbers["top_k"] - 1).clamp(max=best_BGK.shape[-1] - 1).expand(*scores_BGV.shape[:2], 1)
        lowest_BG1 = best_BGK.gather(-1, last_BG1).masked_fill(numbers["top_k"] == ALL, -torch.inf)
        scores_BGV = scores_BGV.masked_fill(scores_BGV < lowest_BG1, -torch.inf)
    if "top_p" in numbers.used:
        scores_BGV = _cut(scores_BGV, numbers["top_p"], cut_rows)
    if "min_p" in numbers.used:
        probs_BGV = torch.softmax(scores_BGV, -1)
        low_BGV = probs_BGV < numbers["min_p"] * probs_BGV.amax(-1, keepdim=True)
        scores_BGV = scores_BGV.masked_fill(low_BGV, -torch.inf)
    return scores_BGV


@operation
def largest_kept(
    scores_BGV: Tensor,
    noise: tuple[Tensor, Tensor, Tensor, Tensor | None],
    tempered_BGV: Tensor,
    numbers: RowNumbers,
    most_kept: int,
    cut_rows: Sequence[int],
) -> Tensor:
    """Return the token of the largest noisy score among those that are kept, `[B, G]`; `NO_TOKEN` if that is not finite.

    Parameters
    ----------
    scores_BGV : Tensor
        Logits after penalties.
    noise : tuple
        What `perturbed` takes besides scores; for columns that are all tokens.
    tempered_BGV : Tensor
        Scores divided by the temperature.
    numbers, most_kept, cut_rows
        As for `truncated`.
    """
    ruled_out_BGV = truncated(tempered_BGV, numbers, most_kept, cut_rows) == -torch.inf
    return largest_perturbed(scores_BGV.masked_fill(ruled_out_BGV, -torch.inf), *noise, 1)[..., 0]


def _cut(scores_BGV: Tensor, top_p_B11: Tensor, rows: Sequence[int]) -> Tensor:
    """Apply top-p. It sorts, so on a CPU only the rows that have it are computed."""
    if not is_host(scores_BGV.device) or len(rows) == len(scores_BGV):
        return scores_BGV.masked_fill(~_nucleus(torch.softmax(scores_BGV, -1), top_p_B11), -torch.inf)
    cut_BGV = scores_BGV.clone()
    nucleus_BGV = _nucleus(torch.softmax(scores_BGV[rows], -1), top_p_B11[rows])
    cut_BGV[rows] = scores_BGV[rows].masked_fill(~nucleus_BGV, -torch.inf)
    return cut_BGV


def _nucleus(probs_BGV: Tensor, top_p_B11: Tensor) -> Tensor:
    """Mark the smallest set of likeliest tokens whose mass reaches `top_p_B11`.

    Among equal probabilities at its edge, the last tokens stay, as in Hugging Face with a stable sort: a distribution must not
    depend on what else is computed along with it.
    """
    size = probs_BGV.shape[-1]
    if is_host(probs_BGV.device):  # here looking at values is free, but a full sort is slow
        sorted_BGC, order_BGC = probs_BGV.topk(min(_TOP_P_CANDIDATES, size), dim=-1)
        keep_BGC = _reaching(sorted_BGC, top_p_B11)
        if sorted_BGC.shape[-1] == size or not keep_BGC[..., -1].any():
            edge_BGC = keep_BGC[..., :-1] & ~keep_BGC[..., 1:]
            if not (edge_BGC & (sorted_BGC[..., :-1] == sorted_BGC[..., 1:])).any():
                return torch.zeros_like(probs_BGV, dtype=torch.bool).scatter_(-1, order_BGC, keep_BGC)
            # Ties are so common in half precision that sorting everything each time would be too slow.
            least_BG1 = sorted_BGC.gather(-1, keep_BGC.sum(-1, keepdim=True) - 1)
            equal_BGV = probs_BGV == least_BG1
            left_out_BG1 = equal_BGV.sum(-1, keepdim=True) - (keep_BGC & (sorted_BGC == least_BG1)).sum(-1, keepdim=True)
            place_BGV = equal_BGV.cumsum(-1, dtype=torch.int32)
            return (probs_BGV > least_BG1) | (equal_BGV & (place_BGV > left_out_BG1))
    # A stable sort of the reversed tokens puts the last of equals first.
    sorted_BGV, order_BGV = probs_BGV.flip(-1).sort(dim=-1, descending=True, stable=True)
    keep_BGV = _reaching(sorted_BGV, top_p_B11)
    return torch.zeros_like(keep_BGV).scatter_(-1, size - 1 - order_BGV, keep_BGV)


def _reaching(sorted_BGC: Tensor, top_p_B11: Tensor) -> Tensor:
    """Mark the first of descending probabilities, until their sum reaches `top_p_B11`."""
    mass_before_BGC = sorted_BGC.double().cumsum(-1) - sorted_BGC.double()
    keep_BGC = ~(mass_before_BGC >= top_p_B11)  # negated so that a row of NaN keeps all tokens, for the walk to report
    keep_BGC[..., 0] = True
    return keep_BGC
