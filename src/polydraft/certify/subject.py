"""What is to be certified, found by its name."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polydraft.certify.own_rule import Arrays, Draws, OwnLaw, OwnRule, OwnToken
from polydraft.errors import UsageError, unknown_name
from polydraft.schemes import SCHEMES, Scheme
from polydraft.walks import WALKS, Walk, resolve_walk

_ALLOWED = (
    "a Scheme or Walk subclass, law(target_probs, draft_probs, children) or verify(target_probs, draft_probs, children, rng)"
)
_NODE = "node"
_RANDOM_NAMES = {"rng", "generator", "random"}


@dataclass(frozen=True, eq=False)
class Subject:
    """A rule for one node, and the walk that takes it through a tree."""

    name: str
    scheme: Scheme
    walk: Walk
    has_law: bool = True
    """Whether the rule tells the law of what it emits, so that it can be enumerated."""
    texts_only: bool = False
    """Whether the rule for one node is certified elsewhere, so that only its walk is left to check."""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if isinstance(self.scheme, OwnRule):
            return f"{'law' if self.has_law else 'black box, sampled only'}; children drawn {self.scheme.draws}"
        elsewhere = "; what the scheme does at one node is certified apart" if self.texts_only else ""
        return f"scheme {self.scheme.name}, walk {self.walk.name}{elsewhere}"


def find_subject(name: str, draws: str | None = None, arrays: str = Arrays.TORCH) -> Subject:
    """Find what a user names.

    Parameters
    ----------
    name : str
        A registered scheme, a registered walk (taken with a scheme that suits it), ``scheme+walk``, or ``module:attribute``: a
        subclass of `Scheme` or `Walk`, or a function for one node, ``law(target_probs, draft_probs, children) -> probs`` or
        ``verify(target_probs, draft_probs, children, rng) -> token``.
    draws : str, optional
        How a function's children are drawn, see `Draws`.
    arrays : str
        What a function's probabilities come as, see `Arrays`.
    """
    if ":" in name and name.partition("+")[0] not in SCHEMES:
        return _own(name, draws, _choice(Arrays, "arrays", arrays))
    if draws is not None:
        raise UsageError(f"--draws {draws} goes with a function of yours, module:function; {name!r} draws its children itself")
    scheme, plus, walk = name.partition("+")
    if plus:
        return _pair(name, SCHEMES.get(scheme)(), WALKS.get(walk).name)
    if name in SCHEMES:
        return _pair(name, SCHEMES.get(name)(), _NODE)
    if name in WALKS:
        return _pair(name, _usual_scheme(WALKS.get(name)), name)
    raise unknown_name("scheme or walk", name, [*SCHEMES, *WALKS])


def all_subjects() -> list[Subject]:
    """Return every registered scheme, and every other walk with each scheme that it takes."""
    others = [walk for walk in WALKS if walk != _NODE]
    pairs = [(scheme, walk) for walk in others for scheme in SCHEMES if WALKS.get(walk).fits(SCHEMES.get(scheme))]
    walks = [replace(find_subject(f"{scheme}+{walk}"), texts_only=True) for scheme, walk in pairs]
    return [*map(find_subject, SCHEMES), *walks]


def _pair(name: str, scheme: Scheme, walk: str) -> Subject:
    # A walk refuses, in its own words, a scheme that it cannot use.
    return Subject(name, scheme, resolve_walk(walk, scheme))


def _usual_scheme(walk: type[Walk]) -> Scheme:
    """Return the first scheme of several children that a walk takes."""
    schemes = [SCHEMES.get(name) for name in SCHEMES]
    return next(scheme() for scheme in schemes if scheme.max_children != 1 and walk.fits(scheme))


def _choice(kind: Any, option: str, value: str) -> Any:
    allowed = [one.value for one in kind]
    if value not in allowed:
        raise unknown_name(option, value, allowed)
    return kind(value)


def _own(name: str, draws: str | None, arrays: Arrays) -> Subject:
    rule = _imported(name)
    walk = WALKS.get(_NODE)()
    if isinstance(rule, type):
        rule = _made(name, rule)
    if isinstance(rule, Scheme | Walk) and draws is not None:
        raise UsageError(f"--draws {draws} goes with a function; {name!r} is a class that knows how children are drawn")
    if isinstance(rule, Scheme):
        return Subject(name, rule, walk)
    if isinstance(rule, Walk):
        return Subject(name, _usual_scheme(type(rule)), rule)
    if not callable(rule):
        raise UsageError(f"{name!r} is a {type(rule).__name__}, which cannot be called; allowed: {_ALLOWED}")
    is_law = _tells_law(name, rule)
    if draws is None:
        raise UsageError(f"say how the children of {name!r} are drawn: --draws {' or '.join(list(Draws))}")
    kind = OwnLaw if is_law else OwnToken
    return Subject(name, kind(rule, _choice(Draws, "draws", draws), arrays), walk, has_law=is_law)


def _imported(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} names no rule; write module:function or module:Class")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does: a rule being written lies where one works
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"cannot import module {module_name!r} ({type(error).__name__}: {lines[0]}); run from its folder, or install it"
        ) from None
    finally:
        sys.path.remove(here)
    if not hasattr(module, attribute):
        public = [one for one in vars(module) if not one.startswith("_") and callable(getattr(module, one))]
        raise unknown_name(f"name in module {module_name!r}:", attribute, public)
    return getattr(module, attribute)


def _made(name: str, rule: type) -> Scheme | Walk:
    if not issubclass(rule, Scheme | Walk):
        raise UsageError(f"class {name!r} is no subclass of polydraft's Scheme or Walk; allowed: {_ALLOWED}")
    try:
        made: Scheme | Walk = rule()
        return made
    except Exception as error:  # its constructor may raise anything
        raise UsageError(f"cannot make {name!r} without arguments ({error}); allowed: a class that needs none") from None


def _tells_law(name: str, rule: Callable[..., Any]) -> bool:
    """Tell a law from a black box by the arguments it wants."""
    try:
        parameters = list(inspect.signature(rule).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(f"the arguments of {name!r} cannot be seen; wrap it in a function; allowed: {_ALLOWED}") from None
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is one.empty]
    if len(needed) == 3 and not (len(places) > 3 and places[3].name in _RANDOM_NAMES):
        return True
    if len(needed) in (3, 4) and len(places) >= 4:
        return False
    raise UsageError(f"{name!r} takes {len(needed)} arguments; allowed: {_ALLOWED}")
