"""Tokens that a grammar forces, proposed like n-grams beside a draft's tree: levels that cost no draft pass.

Guarantee: candidates depend only on the past and the grammar, so they are verified like n-grams: at each node, one token is
drawn from the target's masked distribution, and the walk goes on if it is one of the children. If the mask leaves one token,
that is certain; if several tokens spell the same forced text, it is as likely as the target makes it.
"""

from collections.abc import Sequence

from polydraft.draft.drafter import Drafter
from polydraft.draft.gram_options import GramTreeOptions, RiderOptions
from polydraft.draft.grams import GramTree
from polydraft.draft.tree_drafter import Combination, TreeDrafter
from polydraft.ngrams import GramCache, GramMemory
from polydraft.ngrams.cache import Way
from polydraft.sampling import SamplingParams
from polydraft.sampling.grammar import GrammarProcessor
from polydraft.sampling.processing import grammars_of

NAME = "grammar"
_DEPTH = 16
"""Most forced tokens in a round."""


def with_forced(drafter: Drafter) -> Drafter:
    """Return a drafter that also proposes what grammars force; drafters other than a draft's tree are returned unchanged."""
    if not isinstance(drafter, TreeDrafter):
        return drafter
    options = GramTreeOptions(nodes=_DEPTH, depth=_DEPTH, riders=RiderOptions(branches=0))
    return Combination(drafter, GramTree(NAME, [ForcedCache()], options, costs=drafter.costs, added=True))


class _ForcedMemory(GramMemory):
    """A text and its grammar. A place is the tokens that the grammar forces from there on."""

    def __init__(self) -> None:
        self._grammar: GrammarProcessor | None = None
        self.reset()

    def reset(self) -> None:
        self._text: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def expect(self, params: SamplingParams) -> None:
        """Take the text's grammar, if it has one."""
        self._grammar = next(grammars_of(params), None)

    def end(self) -> tuple[int, ...]:
        """Return the tokens forced after the text."""
        return () if self._grammar is None else tuple(self._grammar.forced(self._text, _DEPTH))

    def step(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Move along the forced tokens; any other token leads nowhere."""
        return place[1:] if place[:1] == (token,) else ()

    def ways(self, place: tuple[int, ...], width: int) -> Sequence[Way]:
        """Return the next forced token."""
        return [(place[0], 1.0)] if place else []


class ForcedCache(GramCache):
    """Tokens that a text's grammar forces, see `SamplingParams.grammar`."""

    name = NAME

    def open(self) -> _ForcedMemory:
        """Return the memory of a new text."""
        return _ForcedMemory()
