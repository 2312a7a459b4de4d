"""What a batch keeps on the device, from round to round and from one text to the next."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from polydraft.devices import captures
from polydraft.draft import Drafter
from polydraft.engine.graphs import GraphCache, Launcher
from polydraft.engine.logprobs import PromptReader
from polydraft.engine.round import State
from polydraft.engine.sequence import TokenSequence
from polydraft.errors import FailureError, UsageError, first_line
from polydraft.models import Context, LanguageModel, Memory
from polydraft.models.blocks import Pool
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.models.prefixes import Prefixes
from polydraft.rows import ByRow
from polydraft.sampling import IDLE, RowParams, Warper
from polydraft.transfers import assign
from polydraft.verify import Walk

_FEWER = 4
"""Each size of captured rounds has this many times fewer rows than the one before."""
_PRACTISED = 8
"""Rounds with the same number of rows after which further ones rarely need a new capture."""
_WORTH_A_MOVE, _WORTH_A_CAPTURE = 8, 32
"""Tokens left from which fewer rows pay: where rounds of that size have run before, and where they must be captured first."""


class Owner(Protocol):
    """A run, as far as its workspace is concerned."""

    @property
    def done(self) -> bool:
        """Whether it needs the workspace no more."""


class Ownership:
    """One run at a time, one thread at a time.

    A later run may take the memories over between two rounds of an earlier one, never during a round. The earlier run is
    refused from then on: what it wrote is gone (docs/decisions/021-threads-wait-for-the-kept-memory.md).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: Callable[[], Owner | None] = lambda: None

    @contextmanager
    def taken_by(self, owner: Owner) -> Iterator[None]:
        """Let `owner` have the memories, once the round under way is over, and work on them."""
        with self._lock:
            self._owner = weakref.ref(owner)
            yield

    @contextmanager
    def held_by(self, owner: Owner) -> Iterator[None]:
        """Let `owner` work on the memories, if they are still its own."""
        with self._lock:
            if self._owner() is not owner:
                raise UsageError(
                    "a later call with keep=True has taken over the memory of this stream; finish one stream before the next, "
                    "or leave keep out"
                )
            yield

    @contextmanager
    def settled_by(self, owner: Owner) -> Iterator[bool]:
        """Keep others out while `owner` ends; gives whether the memories are still its own."""
        with self._lock:
            yield self._owner() is owner

    @property
    def idle(self) -> bool:
        """Whether no run needs the memories."""
        owner = self._owner()
        return owner is None or owner.done


class Workspace:
    """All that a batch keeps on the device; kept, it lets a later run reuse the text they share.

    Parameters
    ----------
    target : LanguageModel
    drafter : Drafter
    params : RowParams
        One `SamplingParams` per row.
    graphs : bool
        Capture rounds where the device can.
    ahead : bool
        Allow a replayed round to be launched before the outcome of the last one is known.
    pool : Pool, optional
        Where texts take memory as they grow, those of other workspaces too; all of it is there from the beginning if not given.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        params: RowParams,
        graphs: bool = True,
        ahead: bool = True,
        pool: Pool | None = None,
    ) -> None:
        captured = graphs and captures(target.device)
        self.target, self.params, self.asked = target, params, params
        """Parameters of the rows at work, and those that the workspace was made for."""
        self._mark = target.mark()
        self.session = drafter.start(params, target)
        self.memory = Memory(target, len(params), behind=1, places=self.session.target_places)
        self.session.borrow(self.memory.context)
        self.ownership = Ownership()
        """Whose texts are in the memories."""
        self.state: State | None = None
        """What rounds work on, once there are texts."""
        self.launcher = Launcher(GraphCache() if captured else None, ahead)
        self.pool = pool if self.elastic else None
        if self.pool is not None:
            for context in self.contexts:
                context.lend(self.pool)

    @property
    def is_current(self) -> bool:
        """Whether the target is still what it was: no other weights, no adapter switched."""
        return self._mark == self.target.mark()

    @property
    def contexts(self) -> tuple[Context, ...]:
        """All memories that rounds write to."""
        return (self.memory.context, *self.session.contexts)

    @property
    def captures(self) -> bool:
        """Whether rounds are captured, in whole or behind a draft of the host's, and worth keeping for other texts."""
        return self.launcher.graphs is not None and self.session.capturable.never is None

    @property
    def elastic(self) -> bool:
        """Whether the number of rows may change from round to round, see `have_rows`.

        Where rounds may be captured, idle rows must come back as they were, which they do only if rounds are captured.
        """
        can = self.session.elastic and all(one.elastic for one in self.contexts)
        return can and (not self.has_graphs or (self.captures and self.session.movable))

    @property
    def has_graphs(self) -> bool:
        """Whether rounds may be captured, so that tensors must stay where they are."""
        return self.launcher.graphs is not None

    def size_for(self, wanted: int) -> int:
        """Return how many rows to have where so many are wanted."""
        if not self.has_graphs:
            return wanted
        # What is allocated before the first round must have rows for all texts.
        return len(self.asked) if self.state is None else min(size for size in self.sizes if size >= wanted)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that captured rounds may have, largest first: each is captured by itself, so there are few."""
        found = [len(self.asked)]
        while self.elastic and found[-1] > 1:
            found.append(-(-found[-1] // _FEWER))
        return found

    @property
    def _by_row(self) -> list[ByRow]:
        """What has a row for each text."""
        return [self.memory, self.session, *([] if self.state is None else [self.state])]

    def have_rows(self, rows: int) -> None:
        """Have so many rows: the first ones stay as they are, further ones are to `begin`; never more than at first.

        Where rounds are captured, those that go sleep where they are, so that tensors stay at their addresses.
        """
        self.params = RowParams((*self.params.rows, *([IDLE] * rows))[:rows])
        for part in self._by_row:
            part.resize(rows, len(self.asked))
        self.session.use(self.params)
        if self.state is not None:
            self.state.use(self.params)

    def trade_rows(self, first: int, second: int) -> None:
        """Swap two rows at work between two rounds."""
        rows = self.params.rows
        self.params = self.params.replaced({first: rows[second], second: rows[first]})
        for part in self._by_row:
            part.swap_rows(first, second)

    def begin(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        *,
        rows: Sequence[int],
        unread: Sequence[int],
        keep: bool,
        params: RowParams,
        wishes: Mapping[int, TokenSequence],
    ) -> None:
        """Read new texts, which may grow to `longest` tokens.

        Parameters
        ----------
        texts : sequence of token-id lists, one per row
        longest : int
        rows : sequence of int
            Rows whose texts are new, or have become longer; the others go on.
        unread : sequence of int
            Those of them that the target reads from their beginnings; of the others it reads what is not in its memory already.
        keep : bool
            Let drafters use what they have learnt of earlier texts.
        params : RowParams
            Of all rows, from now on.
        wishes : mapping from row to TokenSequence
            Those of which log-probabilities are noted while they are read.
        """
        self.params = params
        for context in self.contexts:
            context.span = None
        self.memory.context.graphs = self.launcher.graphs
        reading = self.session.prepare(texts, longest, rows, unread, keep)
        observer = PromptReader(self.target, wishes, reading.observer) if wishes else reading.observer
        self.memory.align(texts, longest, reading.limits, observer)
        self.session.begin(texts, longest, rows, params)
        state = self.state
        if state is None:
            state = self.state = self._new_state(texts, params)
        else:
            state.warper.admit(params, rows, [texts[row] for row in rows])
        assign(state.greedy_B, params.greedy)
        assign(state.tail_B2, [[0, *text[-2:]][-2:] for text in texts])

    def room(self, length: int, rounds: int) -> int:
        """Return how many bytes of the pool a text of that length takes, beyond those of an idle row; see `hold`."""
        slots = length + rounds * (self.session.depth + 1)
        return sum(one.cache.row_bytes(slots + one.places) for one in self.contexts) - self.idle_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the pool that a row without a text takes."""
        return sum(context.cache.row_bytes(context.idle_slots) for context in self.contexts)

    def hold(self, row: int, length: int, rounds: int) -> bool:
        """Have memory for a text of that length in a row, and for what so many rounds may add; return whether there is."""
        slots = length + rounds * (self.session.depth + 1)
        return all(context.cache.hold(row, slots + context.places) for context in self.contexts)

    def rest(self, row: int) -> None:
        """Give back the memory that a row without a text does not need."""
        for context in self.contexts:
            context.cache.trim(row, context.idle_slots)

    def take_row(self, row: int) -> list[Any]:
        """Return all that is kept of a row but the slots of its text, which may be read again in another one."""
        taken = [part.take_row(row) for part in self._by_row]
        self.session.use(self.params)
        self.begun.use(self.params)
        return taken

    def put_row(self, row: int, taken: Sequence[Any]) -> None:
        """Go on in a row with what `take_row` returned; its text has been read."""
        for part, of_part in zip(self._by_row, taken, strict=True):
            part.put_row(row, of_part)

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> int:
        """Hold in a row what is known of a text's beginning, and nothing else; return how many tokens the target knows."""
        self.session.recall(row, text, space, prefixes)
        return self.memory.recall(row, text, space, prefixes)

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Keep copies of what the memories hold in a row for texts that begin alike, of whole blocks only or to its end."""
        self.memory.keep(row, space, prefixes, whole=whole)
        self.session.keep(row, space, prefixes, whole=whole)

    def _new_state(self, texts: Sequence[Sequence[int]], params: RowParams) -> State:
        warper = Warper(params, self.target.vocab_size, texts, self.target.device)
        warper.processing.errors = {}  # a tree has nodes that no walk gets to
        return State(
            target=self.target,
            session=self.session,
            memory=self.memory,
            warper=warper,
            tail_B2=torch.zeros(len(params), 2, dtype=torch.long, device=self.target.device),
            active_B=torch.ones(len(params), dtype=torch.bool, device=self.target.device),
            greedy_B=torch.zeros(len(params), dtype=torch.bool, device=self.target.device),
        )

    def activate(self, active: Sequence[bool]) -> None:
        """Say which rows take part in rounds."""
        assign(self.begun.active_B, active)

    def num_uniforms(self, walk: Walk) -> int:
        """Random numbers per row that the next round uses."""
        return self.session.num_uniforms + walk.uniforms(self.session.scheme, self.session.depth)

    def worth(self, rows: int) -> int:
        """Return how many tokens some text must have left for it to pay to shrink to so many rows."""
        if not self.has_graphs or self.launcher.rounds[rows] >= _PRACTISED:
            return _WORTH_A_MOVE
        return _WORTH_A_CAPTURE

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Record on the host the texts after a round, and the tokens that it added."""
        self.begun.warper.advance(emitted)
        self.memory.settle(texts)
        self.session.settle(texts, emitted)

    @torch.inference_mode()
    def adopt(self, memory: list[Context]) -> None:
        """Take over discarded contexts that fit, before the first text, and remove them from the list."""
        for own in self.contexts:
            if (found := next((one for one in memory if own.adopt(one)), None)) is not None:
                memory.remove(found)

    def reserve(self, longest: int, places: Sequence[int] = ()) -> None:
        """Make room for texts of that length once and for all, with so many places for candidates in each context at least."""
        for number, context in enumerate(self.contexts):
            # Where rows do not divide, all of them are padded along while one reads.
            padding = 0 if context.elastic else PREFILL_CHUNK
            most = max([context.places, *places[number : number + 1]])
            context.reserve(longest + most + padding)
            context.idle_slots = 1 + most
            if context.lent:
                context.open()
                for row in range(len(self.asked)):
                    context.cache.trim(row, context.idle_slots)  # of an earlier workspace's text
                    if not context.cache.hold(row, context.idle_slots):
                        raise torch.OutOfMemoryError("too little memory for so many texts")

    def clear(self, row: int) -> None:
        """Wipe what the memories hold in a row."""
        for context in self.contexts:
            context.cache.clear(row)

    def path_logits(self, row: int, count: int) -> Tensor:
        """Return the target's own logits, `[count, V]`, of the first tokens that the last round brought a row."""
        path_BDF = self.begun.path_features_BDF
        assert path_BDF is not None, "rounds keep them where they are asked to"
        return self.target.head(path_BDF[row, :count])

    def last_tree(self, row: int) -> list[tuple[int, int]]:
        """Return the candidates of the last round's tree in a row, the root first: parents and tokens.

        The root has parent -1, and a node without a token was not drawn.
        """
        tree = self.begun.tree
        assert tree is not None, "rounds keep it where they are asked to"
        # A node's nearest ancestor is the last before it: parents come before their children.
        above_NN = tree.ancestors_BNN[row].tril(-1)
        parents = [max((node for node, is_above in enumerate(line) if is_above), default=-1) for line in above_NN.tolist()]
        return list(zip(parents, tree.tokens_BN[row].tolist(), strict=True))

    def retire(self, texts: Sequence[Sequence[int]], active: Sequence[bool]) -> None:
        """Let ended rows idle: memories drop what was cut off at the end and grow no more."""
        self.activate(active)
        self.memory.rewind(texts)
        self.session.rewind(texts)

    @property
    def begun(self) -> State:
        """What rounds work on; there are texts."""
        assert self.state is not None, "begin() comes first"
        return self.state


def device_failure(error: RuntimeError) -> FailureError:
    """Say in one line what a GPU's error means."""
    if isinstance(error, torch.OutOfMemoryError):
        return FailureError("out of GPU memory; use a smaller batch, fewer new tokens, a smaller tree, or another dtype")
    return FailureError(f"the GPU failed: {first_line(error)}; try again, or use --device cpu")
