"""All that a batch keeps on the device, from round to round and from text to text."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from polydraft.devices import assign, captures
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
from polydraft.verify import Walk

_FEWER = 4
"""Ratio between one number of rows that is captured and the next."""
_PRACTISED = 8
"""After this many rounds with the same number of rows, further ones rarely need a new capture."""
_WORTH_A_MOVE, _WORTH_A_CAPTURE = 8, 32
"""Tokens that a text must have left for fewer rows to pay, if rounds of that size are captured, and if not."""


class Owner(Protocol):
    """Whoever uses a workspace: an engine."""

    @property
    def done(self) -> bool:
        """Whether it no longer needs the workspace."""


class Ownership:
    """Lets one run use a workspace at a time, from one thread at a time.

    A later run may take the caches over between two rounds of an earlier one, never during a round. The earlier run then
    fails, because what it wrote is gone (docs/decisions/021-threads-wait-for-the-kept-memory.md).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: Callable[[], Owner | None] = lambda: None

    @contextmanager
    def taken_by(self, owner: Owner) -> Iterator[None]:
        """Give the caches to `owner` once the current round is over, and let it work on them."""
        with self._lock:
            self._owner = weakref.ref(owner)
            yield

    @contextmanager
    def held_by(self, owner: Owner) -> Iterator[None]:
        """Let `owner` work on the caches; raise if another run has taken them over."""
        with self._lock:
            if self._owner() is not owner:
                raise UsageError(
                    "a later call with keep=True has taken over the memory of this stream; finish one stream before the next, "
                    "or leave keep out"
                )
            yield

    @contextmanager
    def settled_by(self, owner: Owner) -> Iterator[bool]:
        """Keep others out while `owner` ends; yields whether the caches are still its own."""
        with self._lock:
            yield self._owner() is owner

    @property
    def idle(self) -> bool:
        """Whether no run needs the caches."""
        owner = self._owner()
        return owner is None or owner.done


class Workspace:
    """All that a batch keeps on the device; a later run may continue with it and reuse the text they share.

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
        Memory that texts, also those of other workspaces, take as they grow; without one, all memory is allocated at once.
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
        """`params`: of the rows in use; `asked`: those that the workspace was made for."""
        self._mark = target.mark()
        self.session = drafter.start(params, target)
        self.memory = Memory(target, len(params), behind=1, places=self.session.target_places)
        self.session.borrow(self.memory.context)
        self.ownership = Ownership()
        """Whose texts are in the caches."""
        self.state: State | None = None
        """What rounds work on; None before the first text."""
        self.launcher = Launcher(GraphCache() if captured else None, ahead)
        self.pool = pool if self.elastic else None
        if self.pool is not None:
            for context in self.contexts:
                context.lend(self.pool)

    @property
    def is_current(self) -> bool:
        """Whether the target is unchanged: same weights, no adapter switched."""
        return self._mark == self.target.mark()

    @property
    def contexts(self) -> tuple[Context, ...]:
        """All caches that rounds write to."""
        return (self.memory.context, *self.session.contexts)

    @property
    def captures(self) -> bool:
        """Whether rounds are captured, in whole or after a tree of the host's, and can be replayed for later texts."""
        return self.launcher.graphs is not None and self.session.capturable.never is None

    @property
    def elastic(self) -> bool:
        """Whether the number of rows may change from round to round, see `have_rows`.

        With CUDA graphs, that needs rounds that are captured, and rows that can be swapped.
        """
        can = self.session.elastic and all(one.elastic for one in self.contexts)
        return can and (not self.has_graphs or (self.captures and self.session.movable))

    @property
    def has_graphs(self) -> bool:
        """Whether rounds may be captured, so that tensors must keep their addresses."""
        return self.launcher.graphs is not None

    def size_for(self, wanted: int) -> int:
        """Return how many rows to have if at least `wanted` are needed."""
        if not self.has_graphs:
            return wanted
        # Before the first round tensors are allocated, with rows for all texts.
        return len(self.asked) if self.state is None else min(size for size in self.sizes if size >= wanted)

    @property
    def sizes(self) -> list[int]:
        """How many rows captured rounds may have, largest number first; few, because each needs its own captures."""
        found = [len(self.asked)]
        while self.elastic and found[-1] > 1:
            found.append(-(-found[-1] // _FEWER))
        return found

    @property
    def _by_row(self) -> list[ByRow]:
        """Everything that has a row for each text."""
        return [self.memory, self.session, *([] if self.state is None else [self.state])]

    def have_rows(self, rows: int) -> None:
        """Change the number of rows, to at most the initial one: existing rows stay as they are, new ones must `begin`.

        If rounds are captured, rows beyond `rows` stay allocated, so that tensors keep their addresses.
        """
        self.params = RowParams((*self.params.rows, *([IDLE] * rows))[:rows])
        for part in self._by_row:
            part.resize(rows, len(self.asked))
        self.session.use(self.params)
        if self.state is not None:
            self.state.use(self.params)

    def trade_rows(self, first: int, second: int) -> None:
        """Swap two rows between two rounds."""
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
        with_logprobs: Mapping[int, TokenSequence],
    ) -> None:
        """Read new texts, which may grow to `longest` tokens.

        Parameters
        ----------
        texts : sequence of token-id lists, one per row
        longest : int
        rows : sequence of int
            Rows whose texts are new or longer than before; the others go on.
        unread : sequence of int
            Rows that the target reads from the start; of other rows, it reads what is not yet in its cache.
        keep : bool
            Let drafters use what they have learnt from earlier texts.
        params : RowParams
            Parameters of all rows from now on.
        with_logprobs : mapping from row to TokenSequence
            Sequences whose prompts get log-probabilities.
        """
        self.params = params
        for context in self.contexts:
            context.span = None
        self.memory.context.graphs = self.launcher.graphs
        limits, observer = self.session.prepare(texts, longest, rows, unread, keep)
        if with_logprobs:
            observer = PromptReader(self.target, with_logprobs, observer)
        self.memory.align(texts, longest, limits, observer)
        self.session.begin(texts, longest, rows, params)
        state = self.state
        if state is None:
            state = self.state = self._new_state(texts, params)
        else:
            state.warper.admit(params, rows, [texts[row] for row in rows])
        assign(state.greedy_B, params.greedy)
        assign(state.tail_B2, [[0, *text[-2:]][-2:] for text in texts])

    def room(self, length: int, rounds: int) -> int:
        """Return how many bytes of the pool a text of that length takes beyond an idle row; parameters as for `hold`."""
        slots = length + rounds * (self.session.depth + 1)
        return sum(one.cache.row_bytes(slots + one.places) for one in self.contexts) - self.idle_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the pool that an idle row takes."""
        return sum(context.cache.row_bytes(context.idle_slots) for context in self.contexts)

    def hold(self, row: int, length: int, rounds: int) -> bool:
        """Reserve memory in a row for a text of that length and `rounds` more rounds; return whether there was enough."""
        slots = length + rounds * (self.session.depth + 1)
        return all(context.cache.hold(row, slots + context.places) for context in self.contexts)

    def rest(self, row: int) -> None:
        """Give back the memory that an idle row does not need."""
        for context in self.contexts:
            context.cache.trim(row, context.idle_slots)

    def take_row(self, row: int) -> list[Any]:
        """Take a row's state out, except for its cache: the text can be read again in another row."""
        taken = [part.take_row(row) for part in self._by_row]
        self.session.use(self.params)
        self.begun.use(self.params)
        return taken

    def put_row(self, row: int, taken: Sequence[Any]) -> None:
        """Put what `take_row` returned into a row whose text has been read."""
        for part, of_part in zip(self._by_row, taken, strict=True):
            part.put_row(row, of_part)

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> int:
        """Paste a text's cached prefix into a row, in place of all else; return how many tokens the target now holds."""
        self.session.recall(row, text, space, prefixes)
        return self.memory.recall(row, text, space, prefixes)

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Copy a row's caches into the prefix cache: whole blocks only, or all of it."""
        self.memory.keep(row, space, prefixes, whole=whole)
        self.session.keep(row, space, prefixes, whole=whole)

    def _new_state(self, texts: Sequence[Sequence[int]], params: RowParams) -> State:
        warper = Warper(params, self.target.vocab_size, texts, self.target.device)
        warper.processing.errors = {}  # kept, not raised: a walk may never get to the node that failed
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
        """Return how many random numbers per row the next round uses."""
        return self.session.num_uniforms + walk.uniforms(self.session.scheme, self.session.depth)

    def worth(self, rows: int) -> int:
        """Return how many tokens some text must have left for it to pay to shrink to `rows` rows."""
        if not self.has_graphs or self.launcher.rounds[rows] >= _PRACTISED:
            return _WORTH_A_MOVE
        return _WORTH_A_CAPTURE

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Tell the host's parts the texts after a round, and the tokens that it added."""
        self.begun.warper.advance(emitted)
        self.memory.settle(texts)
        self.session.settle(texts, emitted)

    @torch.inference_mode()
    def adopt(self, memory: list[Context]) -> None:
        """Before the first text, reuse discarded contexts that fit, and remove them from the list."""
        for own in self.contexts:
            if (found := next((one for one in memory if own.adopt(one)), None)) is not None:
                memory.remove(found)

    def reserve(self, longest: int, places: Sequence[int] = ()) -> None:
        """Allocate each context for texts of that length once and for all, with at least `places` places for candidates."""
        for number, context in enumerate(self.contexts):
            # If rows cannot be passed separately, all of them are padded while one reads.
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
        """Overwrite a row of all caches with zeros."""
        for context in self.contexts:
            context.cache.clear(row)

    def path_logits(self, row: int, count: int) -> Tensor:
        """Return the target's own logits, `[count, V]`, for the first tokens that a row got in the last round."""
        path_BDF = self.begun.path_features_BDF
        assert path_BDF is not None, "rounds keep them if `watched`"
        return self.target.head(path_BDF[row, :count])

    def last_tree(self, row: int) -> list[tuple[int, int]]:
        """Return parent and token of each node of a row's last tree, root first.

        The root has parent -1; nodes with token -1 were not drawn.
        """
        tree = self.begun.tree
        assert tree is not None, "rounds keep it if `watched`"
        # A node's nearest ancestor is the last before it: parents come before their children.
        above_NN = tree.ancestors_BNN[row].tril(-1)
        parents = [max((node for node, is_above in enumerate(line) if is_above), default=-1) for line in above_NN.tolist()]
        return list(zip(parents, tree.tokens_BN[row].tolist(), strict=True))

    def retire(self, texts: Sequence[Sequence[int]], active: Sequence[bool]) -> None:
        """Let ended rows idle: caches drop what was cut off at the end, and do not grow any more."""
        self.activate(active)
        self.memory.rewind(texts)
        self.session.rewind(texts)

    @property
    def begun(self) -> State:
        """`state`, once there are texts."""
        assert self.state is not None, "begin() comes first"
        return self.state


def device_failure(error: RuntimeError) -> FailureError:
    """Return an error that says in one line what a GPU's error means."""
    if isinstance(error, torch.OutOfMemoryError):
        return FailureError("out of GPU memory; use a smaller batch, fewer new tokens, a smaller tree, or another dtype")
    return FailureError(f"the GPU failed: {first_line(error)}; try again, or use --device cpu")
