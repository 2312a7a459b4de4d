"""The one interface of all verifiers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.registry import Registry
from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes.arithmetic import Ranked


@dataclass(frozen=True, eq=False)
class Selection:
    """One child a row, picked but not yet accepted."""

    token_R: Tensor
    """The child, or `NO_TOKEN` where a row has none."""
    law_RV: Tensor
    """Law of the picked child over drawing and picking, given both laws only; float64, a zero row where there is none.

    Accepting the child with chance min(1, p/r) and else emitting from (p − r)₊ is exact; block verification multiplies
    these ratios along a path.
    """


class Scheme(ABC):
    """A way of drawing the children of a node, and the verification that is exact for exactly that way.

    A scheme says two things. `child_law`: the law of the next child given the earlier ones. `law`: the law of the
    emitted token given all children. Averaged over the drawing, `law` must be the target's law; the test suite
    enumerates that for every registered scheme.

    All tensors have rows R, any number of nodes side by side. Probabilities may arrive in any floating dtype and need
    not sum to one exactly; children are token ids in draw order with `NO_TOKEN` at the end where there are fewer.
    """

    name: ClassVar[str]
    max_children: ClassVar[int | None] = None
    """Most children a node may have; None for any number."""
    verify_uniforms: ClassVar[int] = 1
    """Random numbers that `verify` uses a node."""
    select_uniforms: ClassVar[int | None] = None
    """Random numbers that `select` uses a node; None for schemes that cannot pick a child before accepting it."""
    follows_target: ClassVar[bool] = False
    """Whether the emitted token is one draw from the target's law, whatever the children and whatever their law."""
    needs_order_only: ClassVar[bool] = False
    """Whether drawing the children takes the order of the draft's tokens and not their law."""
    replacement: ClassVar[bool | None] = None
    """Whether children are drawn from the draft law with or without replacement; None where they are drawn otherwise."""

    @classmethod
    def with_setting(cls, text: str) -> type["Scheme"]:
        """Return this scheme with a setting that a user has written behind its name, as in ``hybrid:0.7``."""
        raise UsageError(f"scheme {cls.name!r} has no setting, but {cls.name}:{text} is given; use {cls.name}")

    @abstractmethod
    def child_law(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Return the law of child number J of `count`, given the J earlier ones; a zero row where there is none."""

    @abstractmethod
    def law(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Return the law of the emitted token, given the children, as float64."""

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw K children a row. Override where there is a faster way to draw from the same `child_law`."""
        count = uniforms_RK.shape[1]
        children_RJ = uniforms_RK.new_empty(len(draft_probs_RV), 0, dtype=torch.long)
        for rank in range(count):
            law_RV = self.child_law(draft_probs_RV, children_RJ, count)
            child_R = draw_one(law_RV, uniforms_RK[:, rank])
            children_RJ = torch.cat([children_RJ, child_R[:, None]], dim=1)
        return children_RJ

    def draw_some(self, draft_probs_RV: Tensor, uniforms_RK: Tensor, count_R1: Tensor, ranked: Ranked | None = None) -> Tensor:
        """Draw as many of K children as each row says, `NO_TOKEN` behind them. Override where there is a faster way.

        Whoever has the K `largest` weights of these laws already may pass them on as `ranked`; nothing else depends on it.
        """
        children_RK = torch.full_like(uniforms_RK, NO_TOKEN, dtype=torch.long)
        for count in range(1, uniforms_RK.shape[1] + 1):
            drawn_RJ = self.draw(draft_probs_RV, uniforms_RK[:, :count])
            children_RK[:, :count] = torch.where(count_R1 == count, drawn_RJ, children_RK[:, :count])
        return children_RK

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Return the emitted token of each row: one draw from `law`."""
        return draw_one(self.law(target_probs_RV, draft_probs_RV, children_RK), uniforms_RU[:, 0])

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick one child of each row, for walks that accept whole paths; only where `select_uniforms` is a number."""
        raise NotImplementedError(f"scheme {self.name!r} does not pick before it accepts")


class _Schemes(Registry[type[Scheme]]):
    """Schemes by name, with their setting behind a colon where there is one."""

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
