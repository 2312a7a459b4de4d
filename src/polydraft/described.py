"""Options described once, as fields of dataclasses: signatures, documentation, flags and parsers are derived from them.

A field's docstring describes the option: the first paragraph appears everywhere, later ones only in Python's documentation. Its
metadata may have

- ``heading``: the heading in `--help`, by default the first line of the class's docstring;
- ``short``: the name in strings such as ``lookup,nodes=8``, by default the field's;
- ``has_text``: False if no string can hold the value.

A class whose fields are described elsewhere says where in `described_in`, such as ``"polydraft.beam.options:BeamOptions"``. The
command line then reads its help there without importing that module, and torch with it.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from polydraft.errors import UsageError, unknown_name

Given = ParamSpec("Given")
Options = TypeVar("Options")
Result = TypeVar("Result")
Self = TypeVar("Self")
Class = TypeVar("Class", bound=type[Any])
_YES = {"yes": True, "no": False}
_WORDS = {int: "whole numbers", float: "numbers", bool: ", ".join(_YES)}
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a dataclass, with its description."""

    name: str
    annotation: Any
    default: Any
    doc: str
    """All paragraphs of the docstring, without line breaks inside."""
    heading: str
    short: str
    """Its name in strings; for a switch `no_x`, it is ``x``."""
    has_text: bool

    @property
    def help(self) -> str:
        """The first paragraph of the docstring."""
        return self.doc.split("\n\n")[0]

    @property
    def kind(self) -> Any:
        """Its type without None."""
        return next((part for part in get_args(self.annotation) if part is not NoneType), self.annotation)

    def read(self, text: str) -> Any:
        """Parse the string after ``short=``; the dataclass checks the value."""
        try:
            if self.kind is bool:
                return _YES[text] != self.name.startswith("no_")  # ``x=no`` turns `no_x` on
            return self.kind(text) if self.kind in _WORDS else text
        except (ValueError, KeyError):
            raise UsageError(f"{self.short}={text!r} is out of range; allowed: {_WORDS[self.kind]}") from None


def options_in(kind: type[Any]) -> list[Option]:
    """Return the fields of a dataclass, those of its own first, then those of each base class."""
    assert dataclasses.is_dataclass(kind)
    fields, found = {field.name: field for field in dataclasses.fields(kind)}, []
    for owner in kind.__mro__[:-1]:
        docs, heading = _docs(owner), (owner.__doc__ or "").split("\n")[0].removesuffix(".")
        for name in inspect.get_annotations(owner):
            field = fields.pop(name, None)
            if field is not None and field.init:
                says = {"heading": heading, "short": name.removeprefix("no_"), "has_text": True, **field.metadata}
                found.append(Option(name=name, annotation=field.type, default=field.default, doc=docs.get(name, ""), **says))
    return found


def _docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of a class's own fields, by field; those named by `described_in` included."""
    found = {}
    if place := vars(kind).get("described_in"):
        found.update(_docs_in(*place.split(":")))
    return found | _docs_in(kind.__module__, kind.__name__)


def _docs_in(module: str, name: str) -> dict[str, str]:
    """Return the docstrings of a class's fields, without importing its module."""
    found = {}
    for statement, following in pairwise(_class_bodies(module).get(name, [])):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = "\n\n".join(re.sub(r"\n\s*", " ", part.strip()) for part in re.split(r"\n\s*\n", text))
    return found


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Parse a module once; `inspect.getsource` of each class would parse it again. Without its source, return nothing."""
    try:
        parsed = ast.parse(inspect.getsource(sys.modules[module]) if module in sys.modules else _source(module))
    except (OSError, TypeError):
        return {}
    return {node.name: node.body for node in parsed.body if isinstance(node, ast.ClassDef)}


def _source(module: str) -> str:
    """Read a module of this package without importing it."""
    _, *rooms, name = module.split(".")
    return Path(__file__).parent.joinpath(*rooms, f"{name}.py").read_text(encoding="utf-8")


def described_by(kind: Callable[Given, Options]) -> Callable[[Callable[[Options], Result]], Callable[Given, Result]]:
    """Return a decorator that turns a function of a dataclass into one of its fields, with names, types and docstrings."""

    def decorate(function: Callable[[Options], Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            _check_names(kind, kwargs)
            return function(kind(*args, **kwargs))

        parameters = _parameters(kind)
        returns = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": returns}
        call.__doc__ = _documented(function.__doc__, kind)
        return call

    return decorate


def made_from(
    kind: Callable[Given, Options],
) -> Callable[[Callable[[Self, Options], None]], Callable[Concatenate[Self, Given], None]]:
    """Return a decorator that does this for a constructor; `documented` describes its class."""

    def decorate(function: Callable[[Self, Options], None]) -> Callable[Concatenate[Self, Given], None]:
        @wraps(function)
        def call(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
            _check_names(kind, kwargs)
            function(self, kind(*args, **kwargs))

        return call

    return decorate


def documented(kind: type[Any]) -> Callable[[Class], Class]:
    """Return a decorator that documents a class whose constructor is `made_from` a dataclass."""

    def decorate(made: Class) -> Class:
        made.__doc__ = _documented(made.__doc__, kind)
        made.__signature__ = inspect.Signature(_parameters(kind))
        return made

    return decorate


def _check_names(kind: Any, given: Iterable[str]) -> None:
    """Refuse options that the dataclass does not have, as Python would, but say which there are."""
    names = {option.name for option in options_in(kind)}
    for name in given:
        if name not in names:
            raise TypeError(str(unknown_name("option", name, names)))


def _parameters(kind: Any) -> list[inspect.Parameter]:
    """Return the parameters of a dataclass in the order of `options_in`, positional ones first."""
    given = inspect.signature(kind).parameters
    return sorted((given[option.name] for option in options_in(kind)), key=lambda one: one.kind)


def _documented(doc: str | None, kind: Any) -> str:
    """Insert a section of parameters after a docstring's first paragraphs, before its other sections."""
    described = {option.name: option for option in options_in(kind)}
    lines = ["", "Parameters", "----------"]
    for parameter in _parameters(kind):
        written = inspect.formatannotation(parameter.annotation).strip("'")
        lines.append(f"{parameter.name} : {written.replace(' | None', ', optional')}")
        text = " ".join(described[parameter.name].doc.split())
        lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    before, section, after = re.split(r"(\n\n\w+\n-+\n|$)", inspect.cleandoc(doc or ""), maxsplit=1)
    return before + "\n" + "\n".join(lines) + section + after
