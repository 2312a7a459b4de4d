"""Schemes with their arguments checked, for callers outside the engine; the engine's own hot path looks at no values.

A law is finite, not negative and sums to one; nothing is renormalised in silence. Each child has mass under the scheme's
`child_law` given the earlier ones, which rules out tokens outside the draft's support and, for schemes whose children are
distinct, repeated ones; where the support has fewer tokens than children are asked for, the missing ones are `NO_TOKEN`
(-1) at the end, as `draw_checked` returns them.
"""

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN
from polydraft.schemes.scheme import Scheme

SUM_TOLERANCE = 1e-3
"""How far from one a law may sum: float32 softmax over any vocabulary is well inside, half precision is not."""


def check_law(name: str, probs_RV: Tensor) -> None:
    """Raise a `UsageError` unless every row is a probability distribution.

    Parameters
    ----------
    name : str
        What to call the tensor in the message.
    probs_RV : Tensor
        Rows of probabilities, floating, on any device.
    """
    if probs_RV.ndim != 2 or not probs_RV.is_floating_point():
        shape = f"{probs_RV.dtype} of shape {tuple(probs_RV.shape)}"
        raise UsageError(f"{name} is {shape}; allowed: floating-point rows of shape [rows, vocabulary]")
    if not probs_RV.isfinite().all():
        row = int((~probs_RV.isfinite()).any(-1).nonzero()[0])
        raise UsageError(f"{name} has a value that is not finite in row {row}; allowed: softmax of finite logits")
    if (probs_RV < 0).any():
        row = int((probs_RV < 0).any(-1).nonzero()[0])
        raise UsageError(f"{name} has a negative value, {probs_RV[row].min().item():.3g}, in row {row}; allowed: 0 to 1")
    total_R = probs_RV.double().sum(-1)
    wrong_R = (total_R - 1).abs() > SUM_TOLERANCE
    if wrong_R.any():
        row = int(wrong_R.nonzero()[0])
        raise UsageError(
            f"{name} sums to {total_R[row].item():.6g} in row {row}; allowed: 1 to within {SUM_TOLERANCE}; normalise in float32"
        )


def check_children(scheme: Scheme, draft_probs_RV: Tensor, children_RK: Tensor) -> None:
    """Raise a `UsageError` unless the children can have been drawn by the scheme from the draft's law."""
    rows, vocabulary = draft_probs_RV.shape
    if children_RK.ndim != 2 or len(children_RK) != rows or children_RK.dtype != torch.long or children_RK.shape[1] == 0:
        shape = f"{children_RK.dtype} of shape {tuple(children_RK.shape)}"
        raise UsageError(f"children are {shape}; allowed: int64 of shape [{rows}, candidates], -1 for none")
    if scheme.max_children is not None and children_RK.shape[1] > scheme.max_children:
        raise UsageError(f"{children_RK.shape[1]} children a row; scheme {scheme.name!r} allows at most {scheme.max_children}")
    outside_RK = (children_RK < NO_TOKEN) | (children_RK >= vocabulary)
    if outside_RK.any():
        row, rank = outside_RK.nonzero()[0].tolist()
        token = children_RK[row, rank].item()
        raise UsageError(f"child {rank} of row {row} is {token}; allowed: 0 to {vocabulary - 1}, or -1 for none")
    exists_RK = children_RK != NO_TOKEN
    if (exists_RK[:, 1:] & ~exists_RK[:, :-1]).any():
        row = int((exists_RK[:, 1:] & ~exists_RK[:, :-1]).any(-1).nonzero()[0])
        raise UsageError(f"row {row} has a child after a missing one; allowed: -1 only at the end")
    _check_support(scheme, draft_probs_RV, children_RK, exists_RK)


def _check_support(scheme: Scheme, draft_probs_RV: Tensor, children_RK: Tensor, exists_RK: Tensor) -> None:
    count_R = exists_RK.sum(-1)
    for count in range(1, children_RK.shape[1] + 1):
        # Rows by their own number of children: where a support ended sooner, these are all of it, which any number explains.
        row_R = (count_R == count).nonzero()[:, 0]
        draft_RV, child_RK = draft_probs_RV[row_R], children_RK[row_R]
        for rank in range(count if len(row_R) else 0):
            law_RV = scheme.child_law(draft_RV, child_RK[:, :rank], count)
            impossible_R = law_RV.gather(1, child_RK[:, rank : rank + 1])[:, 0] == 0
            if impossible_R.any():
                index = int(impossible_R.nonzero()[0])
                raise UsageError(
                    f"child {rank} of row {int(row_R[index])} is token {int(child_RK[index, rank])}, which scheme "
                    f"{scheme.name!r} cannot draw there; allowed: tokens with draft mass given the earlier children"
                )


def check_uniforms(uniforms_RU: Tensor, rows: int, least: int) -> None:
    """Raise a `UsageError` unless there are enough random numbers in [0, 1) for every row."""
    if uniforms_RU.ndim != 2 or len(uniforms_RU) != rows or uniforms_RU.shape[1] < least or not uniforms_RU.is_floating_point():
        shape = f"{uniforms_RU.dtype} of shape {tuple(uniforms_RU.shape)}"
        raise UsageError(f"uniforms are {shape}; allowed: floating-point numbers of shape [{rows}, {least} or more]")
    if not ((uniforms_RU >= 0) & (uniforms_RU < 1)).all():
        raise UsageError("uniforms are out of range; allowed: 0 to below 1, e.g. torch.rand(..., dtype=torch.float64)")


def draw_checked(scheme: Scheme, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Draw as many children a row as there are random numbers, `NO_TOKEN` once the draft's support is exhausted."""
    check_law("draft_probs", draft_probs_RV)
    check_uniforms(uniforms_RK, len(draft_probs_RV), least=1)
    if scheme.max_children is not None and uniforms_RK.shape[1] > scheme.max_children:
        raise UsageError(f"{uniforms_RK.shape[1]} children a row; scheme {scheme.name!r} allows at most {scheme.max_children}")
    return scheme.draw(draft_probs_RV.detach(), uniforms_RK)


def verify_checked(
    scheme: Scheme, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor
) -> Tensor:
    """Return the emitted token of each row, whose law over drawing and verifying is the target's.

    Parameters
    ----------
    scheme : Scheme
        For example ``SCHEMES.get("hybrid")()``.
    target_probs_RV, draft_probs_RV : Tensor
        Laws of the target and of the draft; the very tensor that the children were drawn from.
    children_RK : Tensor
        What `draw_checked` returned.
    uniforms_RU : Tensor
        Fresh random numbers in [0, 1), `scheme.verify_uniforms` a row.
    """
    check_law("target_probs", target_probs_RV)
    check_law("draft_probs", draft_probs_RV)
    if target_probs_RV.shape != draft_probs_RV.shape:
        shapes = f"{tuple(target_probs_RV.shape)} and {tuple(draft_probs_RV.shape)}"
        raise UsageError(f"target_probs and draft_probs have shapes {shapes}; allowed: the same rows and vocabulary")
    check_children(scheme, draft_probs_RV, children_RK)
    check_uniforms(uniforms_RU, len(target_probs_RV), scheme.verify_uniforms)
    return scheme.verify(target_probs_RV.detach(), draft_probs_RV.detach(), children_RK, uniforms_RU)
