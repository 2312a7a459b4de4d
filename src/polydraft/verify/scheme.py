"""The interface of all schemes, and checked functions to call it.

A distribution must be finite, non-negative and sum to one; nothing is renormalised silently. The checks are for callers outside
the engine, which does not look at values in its hot path.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.registry import Registry
from polydraft.sampling import NO_TOKEN, draw_distinct, draw_independent, draw_one
from polydraft.verify.weights import Ranked, normalised, without

SUM_TOLERANCE = 1e-3
"""How far from 1 a distribution's sum may be: a float32 softmax over any vocabulary is well inside, half precision is not."""


@dataclass(frozen=True, eq=False)
class Selection:
    """One child per row, picked but not yet accepted."""

    token_R: Tensor
    """The child, or `NO_TOKEN` if the row has none."""
    distribution_RV: Tensor
    """Distribution r of the picked child over drawing and picking; float64, zeros if there is none.

    Accepting the child with chance min(1, p/r) and else emitting from (p − r)₊ is exact; block verification multiplies
    these ratios along a path.
    """


class Scheme(ABC):
    """A way of drawing the children of a node, and the verification that is exact for children drawn that way.

    A scheme defines two distributions. `child_distribution`: of the next child, given the earlier ones. `distribution`: of the
    emitted token, given all children. Averaged over the draws, `distribution` must be the target's distribution; the test suite
    enumerates that for every registered scheme.

    All tensors have rows R, one per node, for any number of nodes. Probabilities may have any floating dtype and need not sum
    to one exactly; children are token ids in draw order, padded with `NO_TOKEN` at the end.
    """

    name: ClassVar[str]
    max_children: ClassVar[int | None] = None
    """Most children a node may have; None for any number."""
    verify_uniforms: ClassVar[int] = 1
    """Random numbers that `verify` uses per node."""
    select_uniforms: ClassVar[int | None] = None
    """Random numbers that `select` uses per node; None for schemes that cannot pick a child before accepting it."""
    follows_target: ClassVar[bool] = False
    """Whether the emitted token is a single draw from the target's distribution, whatever the children."""
    needs_order_only: ClassVar[bool] = False
    """Whether drawing children needs only the order of the draft's tokens, not their probabilities."""
    replacement: ClassVar[bool | None] = None
    """Whether children are drawn from the draft with (True) or without replacement (False); None if drawn otherwise."""

    @classmethod
    def with_setting(cls, text: str) -> type["Scheme"]:
        """Return this scheme with a setting that the user wrote after its name, as in ``hybrid:0.7``."""
        raise UsageError(f"scheme {cls.name!r} has no setting, but {cls.name}:{text} is given; use {cls.name}")

    @abstractmethod
    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Return the distribution of child number J of `count`, given the J earlier ones; zeros if there is no such child."""

    @abstractmethod
    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Return the distribution of the emitted token, given the children, as float64."""

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw K children per row. Override if there is a faster way to draw from the same `child_distribution`."""
        count = uniforms_RK.shape[1]
        children_RJ = uniforms_RK.new_empty(len(draft_probs_RV), 0, dtype=torch.long)
        for rank in range(count):
            distribution_RV = self.child_distribution(draft_probs_RV, children_RJ, count)
            child_R = draw_one(distribution_RV, uniforms_RK[:, rank])
            children_RJ = torch.cat([children_RJ, child_R[:, None]], dim=1)
        return children_RJ

    def draw_some(self, draft_probs_RV: Tensor, uniforms_RK: Tensor, count_R1: Tensor, ranked: Ranked | None = None) -> Tensor:
        """Draw each row's own number of children, up to K, padded with `NO_TOKEN`. Override if there is a faster way.

        `ranked` are the K `largest` weights of these distributions, if the caller already knows them; they only save time.
        """
        children_RK = torch.full_like(uniforms_RK, NO_TOKEN, dtype=torch.long)
        for count in range(1, uniforms_RK.shape[1] + 1):
            drawn_RJ = self.draw(draft_probs_RV, uniforms_RK[:, :count])
            children_RK[:, :count] = torch.where(count_R1 == count, drawn_RJ, children_RK[:, :count])
        return children_RK

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Return each row's emitted token: one draw from `distribution`."""
        return draw_one(self.distribution(target_probs_RV, draft_probs_RV, children_RK), uniforms_RU[:, 0])

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick one child per row, for walks that accept whole paths; only if `select_uniforms` is not None."""
        raise NotImplementedError(f"scheme {self.name!r} does not pick before it accepts")


class DistinctChildren(Scheme):
    """Children drawn from the draft distribution without replacement."""

    replacement: ClassVar[bool | None] = False

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """MCSD eq. 1: the draft distribution without the earlier children, renormalised."""
        return without(normalised(draft_probs_RV), earlier_RJ)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw all children from one table of sums."""
        return draw_distinct(draft_probs_RV, uniforms_RK)


class IndependentChildren(Scheme):
    """Children drawn from the draft distribution with replacement."""

    replacement: ClassVar[bool | None] = True

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Every child follows the draft distribution."""
        return normalised(draft_probs_RV)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw all children from one table of sums."""
        return draw_independent(draft_probs_RV, uniforms_RK)


class _Schemes(Registry[type[Scheme]]):
    """Schemes by name, optionally followed by a colon and a setting."""

    def get(self, name: str) -> type[Scheme]:
        """Return the scheme called `name`, or raise a `UsageError` that says what is allowed."""
        plain, colon, setting = name.partition(":")
        return super().get(plain).with_setting(setting) if colon else super().get(name)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self.get(name))
        except UsageError:
            return False


SCHEMES: Registry[type[Scheme]] = _Schemes("scheme")


def check_distribution(name: str, probs_RV: Tensor) -> None:
    """Raise a `UsageError` unless every row is a probability distribution.

    Parameters
    ----------
    name : str
        Name of the tensor in the message.
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
    """Raise a `UsageError` unless the scheme can have drawn the children from the draft's distribution.

    Each child must have mass under the scheme's `child_distribution` given the earlier ones, which rules out tokens outside the
    draft's support and, for schemes with distinct children, repeated ones. If the support has fewer tokens than there should be
    children, the missing ones are `NO_TOKEN` (-1) at the end, as `draw_checked` returns them.
    """
    rows, vocabulary = draft_probs_RV.shape
    if children_RK.ndim != 2 or len(children_RK) != rows or children_RK.dtype != torch.long or children_RK.shape[1] == 0:
        shape = f"{children_RK.dtype} of shape {tuple(children_RK.shape)}"
        raise UsageError(f"children are {shape}; allowed: int64 of shape [{rows}, candidates], -1 for none")
    _check_count(scheme, children_RK.shape[1])
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


def _check_count(scheme: Scheme, count: int) -> None:
    if scheme.max_children is not None and count > scheme.max_children:
        raise UsageError(f"{count} children per row; scheme {scheme.name!r} allows at most {scheme.max_children}")


def _check_support(scheme: Scheme, draft_probs_RV: Tensor, children_RK: Tensor, exists_RK: Tensor) -> None:
    count_R = exists_RK.sum(-1)
    for count in range(1, children_RK.shape[1] + 1):
        # By each row's own number of children: if the support was smaller, they are all of it, which any number could draw.
        row_R = (count_R == count).nonzero()[:, 0]
        draft_RV, child_RK = draft_probs_RV[row_R], children_RK[row_R]
        for rank in range(count if len(row_R) else 0):
            distribution_RV = scheme.child_distribution(draft_RV, child_RK[:, :rank], count)
            impossible_R = distribution_RV.gather(1, child_RK[:, rank : rank + 1])[:, 0] == 0
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
    """Draw one child per random number in each row; `NO_TOKEN` once the draft's support is exhausted."""
    check_distribution("draft_probs", draft_probs_RV)
    check_uniforms(uniforms_RK, len(draft_probs_RV), least=1)
    _check_count(scheme, uniforms_RK.shape[1])
    return scheme.draw(draft_probs_RV.detach(), uniforms_RK)


def verify_checked(
    scheme: Scheme, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor
) -> Tensor:
    """Return each row's emitted token; over drawing and verifying, it has the target's distribution.

    Parameters
    ----------
    scheme : Scheme
        For example ``SCHEMES.get("hybrid")()``.
    target_probs_RV, draft_probs_RV : Tensor
        Distributions of the target and of the draft; the latter must be the one that the children were drawn from.
    children_RK : Tensor
        What `draw_checked` returned.
    uniforms_RU : Tensor
        Fresh random numbers in [0, 1), `scheme.verify_uniforms` per row.
    """
    check_distribution("target_probs", target_probs_RV)
    check_distribution("draft_probs", draft_probs_RV)
    if target_probs_RV.shape != draft_probs_RV.shape:
        shapes = f"{tuple(target_probs_RV.shape)} and {tuple(draft_probs_RV.shape)}"
        raise UsageError(f"target_probs and draft_probs have shapes {shapes}; allowed: the same rows and vocabulary")
    check_children(scheme, draft_probs_RV, children_RK)
    check_uniforms(uniforms_RU, len(target_probs_RV), scheme.verify_uniforms)
    return scheme.verify(target_probs_RV.detach(), draft_probs_RV.detach(), children_RK, uniforms_RU)
