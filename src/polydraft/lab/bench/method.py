"""What the harness knows about a method: a name, parameters, and a function that yields tokens with their sources."""

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polydraft.described import Option
from polydraft.engine import Stats
from polydraft.errors import UsageError
from polydraft.models.loading import Loaded
from polydraft.registry import Registry
from polydraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a measured text."""

    token_id: int
    source: str
    """`"target"`, or what proposed it."""
    target_pass: int | None
    """Which forward pass of the target made it certain, counted from 0; None if a peer does not report it."""


Tokens = Generator[Token, None, Stats | None]
"""Tokens as they come; the generator's return value is the engine's own statistics, where it has some."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all methods of one benchmark share."""

    target: Loaded
    draft: Any
    """The draft `LanguageModel` or `Head`, or None."""
    params: SamplingParams
    max_new_tokens: int
    longest_prompt: int
    """Tokens of the longest prompt, for engines that allocate or compile once for all texts."""
    target_name: str = ""
    """As the user wrote it."""
    corpus: str = "auto"
    """Corpus cache, for methods that have one."""

    def draft_for(self, spec: "MethodSpec") -> Any:
        """Return the draft, for a method that needs one."""
        if self.draft is None:
            raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
        return self.draft


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to generate, ready to be measured."""

    name: str
    """As the user wrote it."""
    generate: Callable[[list[int], int], Tokens]
    """`(prompt, seed) -> tokens`, to the end of the text (an end-of-text token included) or `max_new_tokens`."""
    generate_batch: Callable[[list[list[int]], int], tuple[list[list[Token]], list[Stats]]] | None = None
    """The same for several prompts at a time, with statistics of each text, the first of which hold the time of all; None for
    methods that take one prompt at a time."""
    parents: tuple[int, ...] | None = None
    """Shape of a static draft tree, for the report."""
    warm_up: Callable[[], Any] | None = None
    """Does what the first texts would otherwise wait for, if generating some is not enough."""
    comparable: bool = True
    """Whether its greedy text must equal the target's; not for peers with other weights."""


@dataclass(frozen=True)
class MethodSpec:
    """A method as the user writes it: ``name``, ``name:argument``, each with ``,option=value`` behind.

    Every method takes ``,arm=NAME``, which only gives it another name, so that it can be measured twice.
    """

    text: str
    name: str
    argument: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "MethodSpec":
        """Read a specification."""
        head, *pairs = re.split(r",(?![\d,\[\]]*\])", text)  # a tree as a list of paths has commas of its own
        name, _, argument = head.partition(":")
        options = {}
        for pair in pairs:
            key, separator, value = pair.partition("=")
            if not separator:
                raise UsageError(f"method {text!r}: {pair!r} is not an option with a value; write name:argument,option=value")
            options[key] = value
        options.pop("arm", None)
        return cls(text, name, argument, options)

    def take(self, *allowed: str) -> dict[str, str]:
        """Return the options, refusing any that the method does not have."""
        for key in self.options:
            if key not in allowed:
                known = ", ".join(allowed) or "none"
                raise UsageError(f"method {self.text!r} has no option {key!r}; allowed: {known}")
        return self.options

    def read(self, options: Iterable[Option], *others: str) -> dict[str, Any]:
        """Return the values of the given `options`, by field; refuse anything that is neither one of them nor in `others`."""
        known = {option.short: option for option in options}
        given = self.take(*known, *others)
        with self.named_in_errors():
            return {known[key].name: known[key].read(text) for key, text in given.items() if key in known}

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Name the method in errors about its values."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"method {self.text!r}: {error}") from None

    def take_nothing(self) -> None:
        """Refuse an argument and options."""
        self.take()
        if self.argument:
            raise UsageError(f"method {self.text!r} takes no argument; write {self.name}")

    def count(self, *, default: int) -> int:
        """Return the argument as a positive whole number, or the default if there is none."""
        if not self.argument:
            return default
        if not self.argument.isascii() or not self.argument.isdigit() or int(self.argument) < 1:
            raise UsageError(f"method {self.text!r}: {self.argument!r} is not a token count; allowed: whole numbers from 1")
        return int(self.argument)


METHODS: Registry[Callable[[MethodSpec, Bench], Method]] = Registry("method")
"""Ways to make a method, by name. Registering is all it takes to be benchmarked."""


COMBINED = "A+B"
"""The method for names joined by ``+``."""


def _maker(name: str) -> Callable[[MethodSpec, Bench], Method]:
    return METHODS.get(COMBINED if "+" in name else name)


def build_methods(texts: list[str], bench: Bench) -> list[Method]:
    """Make the methods that the user named, in that order, each once."""
    return [_maker(spec.name)(spec, bench) for spec in map(MethodSpec.parse, dict.fromkeys(texts))]


def check_method_names(texts: list[str]) -> None:
    """Refuse unknown methods before any model is loaded."""
    for text in texts:
        _maker(MethodSpec.parse(text).name)
