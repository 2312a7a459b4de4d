"""Subjects of a certificate: find rules and walks by name, wrap users' functions as schemes, and set how much to try."""

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import FailureError, UsageError, first_line, member, unknown_name
from polydraft.sampling import NO_TOKEN
from polydraft.verify import (
    SCHEMES,
    WALKS,
    RejectionWithoutReplacement,
    RejectionWithReplacement,
    Scheme,
    Top,
    Walk,
    resolve_walk,
)
from polydraft.verify.weights import normalised

_ALLOWED = (
    "a Scheme or Walk subclass, distribution(target_probs, draft_probs, children) "
    "or verify(target_probs, draft_probs, children, rng)"
)
_NODE = "node"
_FORMER_NAMES = {"law": "distribution", "child_law": "child_distribution"}
"""Names in rules for earlier versions. Such methods would be ignored, and another rule certified in their place."""
_RANDOM_NAMES = {"rng", "generator", "random"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of cases and samples."""

    vocabularies: tuple[int, ...] = (2, 3, 4, 6)
    counts: tuple[int, ...] = (1, 2, 3)
    """Numbers of drafts at a node."""
    cases: int = 120
    """Random pairs of distributions per vocabulary and number of drafts, in addition to awkward ones."""
    node_samples: int = 20_000
    texts: int = 4_000
    """Texts of four tokens, over 32 tokens and fixture F."""
    small_texts: int = 20_000
    """Texts of three tokens, over a vocabulary of three."""
    prompts: int = 40
    greedy_tokens: int = 20


FULL = Sizes()
QUICK = Sizes(
    vocabularies=(2, 3, 4),
    counts=(1, 2),
    cases=40,
    node_samples=12_000,
    texts=400,
    small_texts=1_500,
    prompts=6,
    greedy_tokens=10,
)
"""For `--quick`, and for tests of the kit itself."""


class Draws(StrEnum):
    """How the children that a rule verifies are drawn from the draft's distribution."""

    WITH_REPLACEMENT = "with-replacement"
    WITHOUT_REPLACEMENT = "without-replacement"
    TOP = "top"

    def scheme(self) -> Scheme:
        """Return a scheme that draws this way."""
        if self is Draws.TOP:
            return Top()
        return RejectionWithReplacement() if self is Draws.WITH_REPLACEMENT else RejectionWithoutReplacement()


class Arrays(StrEnum):
    """The kind of arrays that a rule takes."""

    TORCH = "torch"
    NUMPY = "numpy"


class RuleError(FailureError):
    """A rule failed or returned something invalid; carries the arguments of that call."""

    def __init__(self, reason: str, target_probs: Tensor, draft_probs: Tensor, children: list[int]) -> None:
        super().__init__(reason)
        self.target_probs, self.draft_probs, self.children = target_probs, draft_probs, children


class OwnRule(Scheme):
    """A user's function as a scheme: it is called for each node, and `draws` says how its children are drawn.

    The function gets float64 probabilities that sum to one, and a list of children; all are copies that it may change.
    """

    name = "own"

    def __init__(self, function: Callable[..., Any], draws: Draws, arrays: Arrays = Arrays.TORCH) -> None:
        self.draws, self._function, self._arrays = draws, function, arrays
        self._drawing = draws.scheme()

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Return the distribution of the way of drawing that the user named."""
        return self._drawing.child_distribution(draft_probs_RV, earlier_RJ, count)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw children in the way that the user named."""
        return self._drawing.draw(draft_probs_RV, uniforms_RK)

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Refuse: a black box does not state its distribution."""
        raise NotImplementedError("this rule only returns tokens, not their distribution")

    def _called(
        self,
        accept: Callable[[Any, int], Any],
        target_probs_RV: Tensor,
        draft_probs_RV: Tensor,
        children_RK: Tensor,
        *more: Any,
    ) -> list[Any]:
        """Call the function for each row; `accept` checks and converts its answers."""
        answers = []
        distributions_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        for target_V, draft_V, row in zip(*distributions_RV, children_RK.tolist(), strict=True):
            children = [child for child in row if child != NO_TOKEN]
            numpy = self._arrays is Arrays.NUMPY
            distributions = [
                distribution_V.numpy().copy() if numpy else distribution_V.clone() for distribution_V in (target_V, draft_V)
            ]
            try:
                answers.append(accept(self._function(*distributions, list(children), *more), len(target_V)))
            except Exception as error:  # a user's function may raise anything; Ctrl-C is not an Exception
                kind = "" if isinstance(error, FailureError) else f"raised {type(error).__name__}: "
                raise RuleError(f"{kind}{first_line(error)}", target_V, draft_V, children) from error
        return answers


class OwnDistribution(OwnRule):
    """A function `distribution(target_probs, draft_probs, children) -> probs` of the emitted token given the children."""

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Call the function node by node."""
        distribution_RV = normalised(target_probs_RV).clone()
        row_S = (children_RK != NO_TOKEN).any(-1).nonzero()[:, 0]  # without children, the distribution is the target's
        if len(row_S):
            distributions = self._called(_as_distribution, target_probs_RV[row_S], draft_probs_RV[row_S], children_RK[row_S])
            distribution_RV[row_S] = torch.stack(distributions)
        return distribution_RV


class OwnToken(OwnRule):
    """A function `verify(target_probs, draft_probs, children, rng) -> token`: a black box that can only be sampled."""

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Call the function node by node, with a generator seeded by the first random number."""
        seed = int(uniforms_RU[0, 0].item() * 2**53)
        numpy = self._arrays is Arrays.NUMPY
        rng = np.random.default_rng(seed) if numpy else torch.Generator().manual_seed(seed)
        return torch.tensor(self._called(_as_token, target_probs_RV, draft_probs_RV, children_RK, rng))


def _as_distribution(answer: Any, vocabulary: int) -> Tensor:
    try:
        distribution_V = torch.as_tensor(answer, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise FailureError(f"wrong shape: returned {type(answer).__name__}, allowed: {vocabulary} probabilities") from None
    if distribution_V.shape != (vocabulary,):
        raise FailureError(f"wrong shape: returned {tuple(distribution_V.shape)}, allowed: ({vocabulary},)")
    return distribution_V


def _as_token(answer: Any, vocabulary: int) -> int:
    try:
        token = operator.index(answer)
    except (TypeError, ValueError):
        raise FailureError(f"returned {answer!r}, allowed: a token, 0 to {vocabulary - 1}") from None
    if not 0 <= token < vocabulary:
        raise FailureError(f"returned token {token}, allowed: 0 to {vocabulary - 1}")
    return token


@dataclass(frozen=True, eq=False)
class Subject:
    """A rule for one node, and the walk that applies it to a tree."""

    name: str
    scheme: Scheme
    walk: Walk
    has_distribution: bool = True
    """Whether the rule states the distribution of the token that it emits, so that it can be enumerated."""
    texts_only: bool = False
    """True if the scheme is certified separately and only the walk is left to check."""

    @property
    def kind(self) -> str:
        """Description for certificates."""
        if isinstance(self.scheme, OwnRule):
            return (
                f"{'distribution' if self.has_distribution else 'black box, sampled only'}; children drawn {self.scheme.draws}"
            )
        elsewhere = "; the scheme is certified separately" if self.texts_only else ""
        return f"scheme {self.scheme.name}, walk {self.walk.name}{elsewhere}"


def find_subject(name: str, draws: str | None = None, arrays: str = Arrays.TORCH) -> Subject:
    """Return the subject that a user names.

    A name is a registered scheme, a walk (which gets a scheme that fits), ``scheme+walk``, or ``module:attribute``: a subclass
    of `Scheme` or `Walk`, or a function for one node, ``distribution(target_probs, draft_probs, children) -> probs`` or
    ``verify(target_probs, draft_probs, children, rng) -> token``. `draws` and `arrays` are for functions.
    """
    kind = member(Arrays, "arrays", arrays)
    if ":" in name and name.partition("+")[0] not in SCHEMES:
        return _own(name, draws, kind)
    if draws is not None:
        raise UsageError(f"--draws {draws} works only with your own function, module:function; {name!r} draws its own children")
    if "+" not in name and name not in [*SCHEMES, *WALKS]:
        raise unknown_name("scheme or walk", name, [*SCHEMES, *WALKS])
    scheme_name, _, walk = name.partition("+")
    scheme = _usual_scheme(WALKS.get(name)) if name in WALKS else SCHEMES.get(scheme_name)()
    walk = name if name in WALKS else WALKS.get(walk or _NODE).name
    return Subject(name, scheme, resolve_walk(walk, scheme))  # resolve_walk refuses a walk that cannot use the scheme


def all_subjects() -> list[Subject]:
    """Return every registered scheme, and every other walk with each scheme that fits it."""
    others = [walk for walk in WALKS if walk != _NODE]
    pairs = [(scheme, walk) for walk in others for scheme in SCHEMES if WALKS.get(walk).fits(SCHEMES.get(scheme))]
    walks = [replace(find_subject(f"{scheme}+{walk}"), texts_only=True) for scheme, walk in pairs]
    return [*map(find_subject, SCHEMES), *walks]


def _usual_scheme(walk: type[Walk]) -> Scheme:
    """Return the first scheme with several children that fits a walk."""
    schemes = [SCHEMES.get(name) for name in SCHEMES]
    return next(scheme() for scheme in schemes if scheme.max_children != 1 and walk.fits(scheme))


def _own(name: str, draws: str | None, arrays: Arrays) -> Subject:
    rule = _imported(name)
    walk = WALKS.get(_NODE)()
    if isinstance(rule, type):
        rule = _made(name, rule)
    if isinstance(rule, Scheme | Walk) and draws is not None:
        raise UsageError(f"--draws {draws} works only with a function; {name!r} is a class that knows how it draws")
    if isinstance(rule, Scheme):
        return Subject(name, rule, walk)
    if isinstance(rule, Walk):
        return Subject(name, _usual_scheme(type(rule)), rule)
    if not callable(rule):
        raise UsageError(f"{name!r} is a {type(rule).__name__}, which cannot be called; allowed: {_ALLOWED}")
    is_distribution = _tells_distribution(name, rule)
    if draws is None:
        raise UsageError(f"say how the children of {name!r} are drawn: --draws {' or '.join(list(Draws))}")
    kind = OwnDistribution if is_distribution else OwnToken
    return Subject(name, kind(rule, member(Draws, "draws", draws), arrays), walk, has_distribution=is_distribution)


def _imported(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} does not name a rule; write module:function or module:Class")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does, because rules are often in the working folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        why = first_line(error, kind=True)
        raise UsageError(f"cannot import module {module_name!r} ({why}); run from its folder, or install it") from None
    finally:
        sys.path.remove(here)
    if not hasattr(module, attribute):
        former = next((name for name, now in _FORMER_NAMES.items() if now == attribute and hasattr(module, name)), None)
        if former is not None:
            raise UsageError(f"module {module_name!r} has {former}(...), which is now called {attribute}(...); rename it")
        public = [one for one in vars(module) if not one.startswith("_") and callable(getattr(module, one))]
        raise unknown_name(f"name in module {module_name!r}:", attribute, public)
    return getattr(module, attribute)


def _made(name: str, rule: type) -> Scheme | Walk:
    if not issubclass(rule, Scheme | Walk):
        raise UsageError(f"class {name!r} is not a subclass of polydraft's Scheme or Walk; allowed: {_ALLOWED}")
    for former, now in _FORMER_NAMES.items():
        if hasattr(rule, former):
            raise UsageError(f"class {name!r} has {former}(...), which is now called {now}(...); rename it")
    try:
        made: Scheme | Walk = rule()
        return made
    except Exception as error:  # its constructor may raise anything
        raise UsageError(f"cannot create {name!r} without arguments ({error}); allowed: a class that needs none") from None


def _tells_distribution(name: str, rule: Callable[..., Any]) -> bool:
    """Return whether a function is a distribution, and not a black box, by its arguments."""
    try:
        parameters = list(inspect.signature(rule).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(f"cannot inspect the arguments of {name!r}; wrap it in a function; allowed: {_ALLOWED}") from None
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is one.empty]
    if len(needed) == 3 and not (len(places) > 3 and places[3].name in _RANDOM_NAMES):
        return True
    if len(needed) in (3, 4) and len(places) >= 4:
        return False
    raise UsageError(f"{name!r} takes {len(needed)} arguments; allowed: {_ALLOWED}")
