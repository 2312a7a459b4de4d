"""The interface of all schemes, and their registry."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.registry import Registry
from polydraft.sampling import draw_distinct, draw_independent, draw_one
from polydraft.verify.weights import normalised, without


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
