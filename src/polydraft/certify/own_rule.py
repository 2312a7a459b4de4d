"""A user's own rule, a plain function for one node, as a scheme that all checks can run."""

import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import FailureError
from polydraft.sampling import NO_TOKEN
from polydraft.schemes import RejectionWithoutReplacement, RejectionWithReplacement, Scheme, Top
from polydraft.schemes.arithmetic import normalised


class Draws(StrEnum):
    """How the children that a rule verifies are drawn from the draft's law."""

    WITH_REPLACEMENT = "with-replacement"
    WITHOUT_REPLACEMENT = "without-replacement"
    TOP = "top"

    def scheme(self) -> Scheme:
        """Return a scheme that draws so."""
        if self is Draws.TOP:
            return Top()
        return RejectionWithReplacement() if self is Draws.WITH_REPLACEMENT else RejectionWithoutReplacement()


class Arrays(StrEnum):
    """What a rule's probabilities come as."""

    TORCH = "torch"
    NUMPY = "numpy"


class RuleError(FailureError):
    """A rule that did not return what it must, with the arguments it was given."""

    def __init__(self, reason: str, target_probs: Tensor, draft_probs: Tensor, children: list[int]) -> None:
        super().__init__(reason)
        self.target_probs, self.draft_probs, self.children = target_probs, draft_probs, children


class OwnRule(Scheme):
    """What both kinds of functions share: the drawing, and calls node by node.

    Parameters
    ----------
    function : callable
        Called with float64 probabilities that sum to one and a list of children, which may be changed at will.
    draws : Draws
    arrays : Arrays
    """

    name = "own"

    def __init__(self, function: Callable[..., Any], draws: Draws, arrays: Arrays = Arrays.TORCH) -> None:
        self.draws, self._function, self._arrays = draws, function, arrays
        self._drawing = draws.scheme()

    def child_law(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Draw as the user says that children are drawn."""
        return self._drawing.child_law(draft_probs_RV, earlier_RJ, count)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw as the user says that children are drawn."""
        return self._drawing.draw(draft_probs_RV, uniforms_RK)

    def law(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Say that there is none."""
        raise NotImplementedError("this rule only returns tokens, not their law")

    def _called(
        self,
        accept: Callable[[Any, int], Any],
        target_probs_RV: Tensor,
        draft_probs_RV: Tensor,
        children_RK: Tensor,
        *more: Any,
    ) -> list[Any]:
        """Call the function for each row, and have `accept` look at its answers."""
        answers = []
        laws_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        for target_V, draft_V, row in zip(*laws_RV, children_RK.tolist(), strict=True):
            children = [child for child in row if child != NO_TOKEN]
            numpy = self._arrays is Arrays.NUMPY
            laws = [law_V.numpy().copy() if numpy else law_V.clone() for law_V in (target_V, draft_V)]
            try:
                answers.append(accept(self._function(*laws, list(children), *more), len(target_V)))
            except Exception as error:  # a user's function raises what it likes; Ctrl-C is not among these
                lines = str(error).strip().splitlines() or [""]
                reason = lines[0] if isinstance(error, FailureError) else f"raised {type(error).__name__}: {lines[0]}"
                raise RuleError(reason, target_V, draft_V, children) from error
        return answers


class OwnLaw(OwnRule):
    """A function `law(target_probs, draft_probs, children) -> probs`: the law of the emitted token given the children."""

    def law(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Ask the function, node by node."""
        law_RV = normalised(target_probs_RV).clone()
        row_S = (children_RK != NO_TOKEN).any(-1).nonzero()[:, 0]  # without children every rule emits the target's law
        if len(row_S):
            laws = self._called(_as_law, target_probs_RV[row_S], draft_probs_RV[row_S], children_RK[row_S])
            law_RV[row_S] = torch.stack(laws)
        return law_RV


class OwnToken(OwnRule):
    """A function `verify(target_probs, draft_probs, children, rng) -> token`: a black box that can only be sampled."""

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Ask the function, node by node, with random numbers of its own that follow from the first one given."""
        seed = int(uniforms_RU[0, 0].item() * 2**53)
        numpy = self._arrays is Arrays.NUMPY
        rng = np.random.default_rng(seed) if numpy else torch.Generator().manual_seed(seed)
        return torch.tensor(self._called(_as_token, target_probs_RV, draft_probs_RV, children_RK, rng))


def _as_law(answer: Any, vocabulary: int) -> Tensor:
    try:
        law_V = torch.as_tensor(answer, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise FailureError(f"wrong shape: returned {type(answer).__name__}, allowed: {vocabulary} probabilities") from None
    if law_V.shape != (vocabulary,):
        raise FailureError(f"wrong shape: returned {tuple(law_V.shape)}, allowed: ({vocabulary},)")
    return law_V


def _as_token(answer: Any, vocabulary: int) -> int:
    try:
        token = operator.index(answer)
    except (TypeError, ValueError):
        raise FailureError(f"returned {answer!r}, allowed: a token, 0 to {vocabulary - 1}") from None
    if not 0 <= token < vocabulary:
        raise FailureError(f"returned token {token}, allowed: 0 to {vocabulary - 1}")
    return token
