"""N-gram memories of a batch, one per cache and row, and the riders that teach them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from torch import Tensor

from polydraft.draft.gram_options import RiderOptions
from polydraft.draft.source import Source
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

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Start over in some rows."""

    def admit(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Set the parameters of all rows, and take new texts in some of them."""

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


_NEW_ROW: dict[str, Callable[[], object]] = {
    "read": list,
    "idle": lambda: True,  # until a text begins
    "resting": bool,
    "promised": lambda: (False, False),
    "awake": lambda: True,
}


class GramSource(Source):
    """N-gram memories of one batch on the host, one per cache and row, and the riders that teach them."""

    ROW_STATE = ("memories", "read", "idle", "resting", "promised", "awake")
    FORGETS = True
    learns = True

    def __init__(self, caches: Sequence[GramCache], riders: Riders, gram: int, batch_size: int) -> None:
        self.names, self.riders, self._gram = [cache.name for cache in caches], riders, gram
        self._caches = caches
        self.memories = [self._opened() for _ in range(batch_size)]
        self.read: list[list[int]] = [[] for _ in range(batch_size)]
        """The text that each row's memories have read."""
        self.idle = [False] * batch_size
        self.resting = [False] * batch_size
        """Rows that draft nothing in this round because it would not pay."""
        self.promised = [(False, False)] * batch_size
        """Whether each row's memories promised enough before its last round, and after it."""
        self.awake = [True] * batch_size
        """Rows whose memories propose in this round."""

    def row_parts(self) -> Iterable[ByRow]:
        """Return the riders."""
        return (self.riders,)

    def new_row(self, name: str) -> object:
        """Start with empty memories."""
        return self._opened() if name == "memories" else _NEW_ROW[name]()

    def _opened(self) -> list[GramMemory]:
        return [cache.open() for cache in self._caches]

    def forget(self, rows: Sequence[int]) -> None:
        """Empty the memories of these rows."""
        for row in rows:
            self._forget(row)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Read the texts; if a row's new text does not continue the old one, its memories are emptied first."""
        for row in rows:
            text, read = texts[row], self.read[row]
            if list(text[: len(read)]) != read:
                self._forget(row)
            self._remember(row, text[len(self.read[row]) :])
            self.idle[row], self.promised[row] = False, (True, True)
        self.riders.begin(texts, rows)

    def _forget(self, row: int) -> None:
        self.read[row] = []
        for memory in self.memories[row]:
            memory.reset()

    def _remember(self, row: int, tokens: Sequence[int]) -> None:
        self.read[row].extend(tokens)
        for memory in self.memories[row]:
            memory.read(tokens)

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Return the riders' report."""
        return self.riders.commit(features_BNF)

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Teach the memories what the riders found."""
        for memories, report, idle, resting in zip(self.memories, reports, self.idle, self.resting, strict=True):
            if not idle and not resting:
                for gram in self.riders.grams(report, self._gram):
                    for memory in memories:
                        memory.learn(gram)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Read the emitted tokens; a row without any has ended."""
        for row, tokens in enumerate(emitted):
            self.idle[row] = not tokens
            self._remember(row, tokens)
