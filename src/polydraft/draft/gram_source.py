"""N-gram memories of a batch, one per cache and row, and the riders that teach them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polydraft.draft.gram_options import RiderOptions
from polydraft.draft.source import Source
from polydraft.draft.trie import TokenTrie
from polydraft.models import LanguageModel
from polydraft.ngrams import GramCache, GramMemory
from polydraft.registry import Registry
from polydraft.rows import ByRow
from polydraft.sampling import RowParams
from polydraft.trees import DraftTree
from polydraft.verify import Verdict


class Riders(ByRow):
    """Riders of the target's passes: nodes that no walk reaches, and that teach the caches. This base class has none."""

    resting_B: Tensor | None = None
    """Rows that rest in this round, on a CPU; if all do, nothing rides along."""

    @property
    def kind(self) -> Hashable:
        """What captures depend on."""
        return ()

    @property
    def num_uniforms(self) -> int:
        """Random numbers per row and round."""
        return 0

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, and set the parameters of all rows."""

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts."""

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add riders to a pass."""
        return tree

    def commit(self, features_BNF: Tensor) -> Tensor | None:
        """Return what the target says after the riders, as a report for `grams`; None if there are none."""
        return None

    def grams(self, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Yield n-grams of `gram` tokens and the token after them, from a row of the report of `commit`."""
        return iter(())


RIDERS: Registry[Callable[[RiderOptions, LanguageModel, int], Riders]] = Registry("rider")
"""Make the riders of a batch from their options, the target and the number of rows; `polydraft.papers` registers them."""


@dataclass(eq=False)
class GramRow:
    """One row: its text, and the memories that have read it."""

    memories: list[GramMemory]
    read: list[int] = field(default_factory=list)
    """The text that the memories have read."""
    idle: bool = True
    """Whether there is no text, or it has ended."""
    resting: bool = False
    """Whether nothing is drafted in this round because it would not pay."""
    awake: bool = True
    """Whether the memories propose in this round."""
    promised: tuple[bool, bool] = (False, False)
    """Whether the memories promised enough before the last round, and after it."""
    next: TokenTrie | None = None
    """What the memories propose in the next round, if that is known already."""

    def forget(self) -> None:
        """Empty the memories."""
        self.read = []
        for memory in self.memories:
            memory.reset()

    def remember(self, tokens: Sequence[int]) -> None:
        """Let the memories read more text."""
        self.read.extend(tokens)
        for memory in self.memories:
            memory.read(tokens)


class GramSource(Source):
    """N-gram memories of one batch on the host, one per cache and row, and the riders that teach them."""

    ROW_STATE = ("rows",)
    FORGETS = True
    learns = True

    def __init__(self, caches: Sequence[GramCache], riders: Riders, gram: int, batch_size: int) -> None:
        self.names, self.riders, self._gram = [cache.name for cache in caches], riders, gram
        self._caches = caches
        self.rows = [self.new_row("rows") for _ in range(batch_size)]

    def row_parts(self) -> Iterable[ByRow]:
        """Return the riders."""
        return (self.riders,)

    def new_row(self, name: str) -> GramRow:
        """Start with empty memories."""
        return GramRow([cache.open() for cache in self._caches])

    def forget(self, rows: Sequence[int]) -> None:
        """Empty the memories of these rows."""
        for row in rows:
            self.rows[row].forget()

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Read the texts; if a row's new text does not continue the old one, its memories are emptied first."""
        for row in rows:
            own, text = self.rows[row], texts[row]
            if list(text[: len(own.read)]) != own.read:
                own.forget()
            own.remember(text[len(own.read) :])
            own.idle, own.promised, own.next = False, (True, True), None

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Return the riders' report."""
        return self.riders.commit(features_BNF)

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Teach the memories what the riders found."""
        for row, report in zip(self.rows, reports, strict=True):
            if not row.idle and not row.resting:
                for gram in self.riders.grams(report, self._gram):
                    for memory in row.memories:
                        memory.learn(gram)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Read the emitted tokens; a row without any has ended."""
        for row, tokens in zip(self.rows, emitted, strict=True):
            row.idle = not tokens
            row.remember(tokens)
