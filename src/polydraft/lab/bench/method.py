"""What a benchmark method is: a name, options, and a function that yields tokens with their sources."""

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
    """Which forward pass of the target settled it, counted from 0; None if a peer does not report it."""


Tokens = Generator[Token, None, Stats | None]
"""Tokens as they are generated; the generator returns the engine's own statistics, or None for peers."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all methods of one benchmark share."""

    target: Loaded
    draft: Any
    """The draft `LanguageModel` or `Head`, or None."""
    params: SamplingParams
    max_new_tokens: int
    longest_prompt: int
    """Length of the longest prompt in tokens, for engines that allocate or compile once for all texts."""
    target_name: str = ""
    """As the user wrote it."""
    corpus: str = "auto"
    """Corpus cache, for methods that use one."""

    def draft_for(self, spec: "MethodSpec") -> Any:
        """Return the draft for a method that needs one; refuse if there is none."""
        if self.draft is None:
            raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
        return self.draft


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to generate, ready to be measured."""

    name: str
    """As the user wrote it."""
    generate: Callable[[list[int], int], Tokens]
    """`(prompt, seed) -> tokens`, up to and including an end-of-text token, or up to `max_new_tokens`."""
    generate_batch: Callable[[list[list[int]], int], tuple[list[list[Token]], list[Stats]]] | None = None
    """The same for several prompts at a time, with statistics per text (the first holds the time of all texts); None for
    methods that take one prompt at a time."""
    parents: tuple[int, ...] | None = None
    """Shape of a static draft tree, for the report."""
    warm_up: Callable[[], Any] | None = None
    """Prepares what generating a text or two does not, such as captures of every size."""
    comparable: bool = True
    """Whether its greedy text must equal the target's; false for lossy methods and peers with other weights."""


@dataclass(frozen=True)
class MethodSpec:
    """A method as the user writes it: ``name`` or ``name:argument``, followed by any number of ``,option=value``.

    Every method takes ``,arm=NAME``, which only changes its name, so that it can be measured twice.
    """

    text: str
    name: str
    argument: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "MethodSpec":
        """Read a specification."""
        head, *pairs = re.split(r",(?![\d,\[\]]*\])", text)  # not at commas inside a tree given as a list of paths
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
        """Return the values given for `options`, by field; refuse options that are neither among them nor in `others`."""
        known = {option.short: option for option in options}
        given = self.take(*known, *others)
        with self.named_in_errors():
            return {known[key].name: known[key].read(text) for key, text in given.items() if key in known}

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Prefix errors about its options with the method."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"method {self.text!r}: {error}") from None

    def take_nothing(self) -> None:
        """Refuse any argument and any options."""
        self.take()
        self.refuse_argument()

    def refuse_argument(self, instead: str = "") -> None:
        """Refuse an argument; `instead` says what to write, by default the name."""
        if self.argument:
            raise UsageError(f"method {self.text!r} takes no argument; write {instead or self.name}")

    def count(self, *, default: int) -> int:
        """Return the argument as a positive whole number, or the default if there is none."""
        if not self.argument:
            return default
        if not self.argument.isascii() or not self.argument.isdigit() or int(self.argument) < 1:
            raise UsageError(f"method {self.text!r}: {self.argument!r} is not a token count; allowed: whole numbers from 1")
        return int(self.argument)


METHODS: Registry[Callable[[MethodSpec, Bench], Method]] = Registry("method")
"""Functions that make a method, by name. A registered method can be benchmarked; nothing else is needed."""

COMBINED = "A+B"
"""Registered name of the method that handles all names joined by ``+``."""


def _maker(name: str) -> Callable[[MethodSpec, Bench], Method]:
    return METHODS.get(COMBINED if "+" in name else name)


def build_methods(texts: list[str], bench: Bench) -> list[Method]:
    """Make the methods that the user named, in order, without repetitions."""
    return [_maker(spec.name)(spec, bench) for spec in map(MethodSpec.parse, dict.fromkeys(texts))]


def check_method_names(texts: list[str]) -> None:
    """Refuse unknown methods before any model is loaded."""
    for text in texts:
        _maker(MethodSpec.parse(text).name)
