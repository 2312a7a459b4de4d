"""Memory of beams: features of a tree's nodes, the cache of each model, and the request that uses them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.beam._node import Node
from polydraft.devices import brought, captures, is_host
from polydraft.engine.graphs import GraphCache, tell_obstacle
from polydraft.engine.workspace import Owner
from polydraft.models import Context, Head, LanguageModel

BEFORE = 0
"""Row of the token before the tree."""
NOWHERE = -1
"""Stands for a row if there are no features."""


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Sizes of captured passes and their memory. There are only a few of each, because every size needs a capture."""

    tokens: tuple[int, ...] = (16, 32, 64, 96, 128, 192, 256)
    """Passes are padded to one of these sizes. Larger passes are not captured: their work hides the launches."""
    places: int = 256
    """Uncommitted places that the smallest captured pass attends to; larger numbers are powers of two."""
    rows: int = 512
    """Rows of features allocated at first."""
    spare: int = 512
    """Places and rows allocated for forests, beyond a request's longest text; most requests never need more."""


_SIZES = PassSizes()


class FeatureBank:
    """A model's features of each node that it has read.

    They are in one tensor, which moves only when it grows: captured passes read and write its rows, and the next request reuses
    it.
    """

    def __init__(self, rows: int) -> None:
        self.values_NF: Tensor | None = None
        """Allocated with the first features, whose size and type are not known before."""
        self.rows: dict[Node, int] = {}
        """Row of each node's features."""
        self._used = 1
        self._needed = rows

    @property
    def place(self) -> tuple[int, int] | None:
        """Address and number of the rows, on which captures rely; None before they are allocated."""
        return None if self.values_NF is None else (self.values_NF.data_ptr(), len(self.values_NF))

    def restart(self, rows: int) -> None:
        """Forget everything and make room for this many rows."""
        self.rows, self._used = {}, 1
        self._reserve(rows)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes that were read."""
        assert self.values_NF is not None
        return self.values_NF[[self.rows[node] for node in nodes]]

    def claim(self, nodes: Sequence[Node], size: int) -> int:
        """Give nodes consecutive rows, with room for `size` of them; return the first. The next claim reuses unused rows."""
        start = self._used
        self.rows.update(zip(nodes, range(start, start + len(nodes)), strict=True))
        self._used += len(nodes)
        self._reserve(start + size)
        return start

    def _reserve(self, rows: int) -> None:
        self._needed = max(self._needed, rows)
        if self.values_NF is not None and rows > len(self.values_NF):
            kept_NF = self.values_NF
            self.values_NF = self._made(kept_NF, 2 * rows)
            self.values_NF[: len(kept_NF)] = kept_NF

    def write(self, rows_T: Tensor, features_TF: Tensor) -> None:
        """Write features to claimed rows, or to row `BEFORE`."""
        if self.values_NF is None:
            self.values_NF = self._made(features_TF, self._needed)
        self.values_NF.index_copy_(0, rows_T, features_TF)

    def drop(self, nodes: Sequence[Node]) -> None:
        """Forget nodes; the next `keep` frees their rows."""
        for node in nodes:
            self.rows.pop(node, None)

    def keep(self, alive: Collection[Node]) -> None:
        """Forget all other nodes and compact the rest."""
        rows = [(node, row) for node, row in self.rows.items() if node in alive]
        if rows and self.values_NF is not None:
            kept_R = brought(torch.tensor([row for _, row in rows]), self.values_NF.device)
            self.values_NF[1 : 1 + len(rows)] = self.values_NF[kept_R]
        self.rows = {node: row for row, (node, _) in enumerate(rows, start=1)}
        self._used = 1 + len(rows)

    def _made(self, like_TF: Tensor, rows: int) -> Tensor:
        return torch.zeros(rows, like_TF.shape[-1], dtype=like_TF.dtype, device=like_TF.device)


class BeamMemory:
    """A model's cache with one row, and the captures of its passes if `graphs` is set and the device can capture."""

    def __init__(self, model: LanguageModel | Head, graphs: bool, sizes: PassSizes = _SIZES) -> None:
        self.model, self.sizes = model, sizes
        self.context: Context = model.start(1, 8)
        self.bank = FeatureBank(sizes.rows)
        self.graphs: GraphCache | None = None
        obstacle: str | None = getattr(model, "graph_obstacle", None) or getattr(model, "shape_obstacle", None)
        if graphs and captures(model.device):
            if obstacle is None:
                self.graphs = GraphCache(device=model.device)
            else:
                tell_obstacle(model, obstacle)

    def restart(self, room: int, longest: int) -> None:
        """Forget everything; make room for `room` tokens, or for `longest` if the cache must not move."""
        # The prompt needs no rows, but all new tokens of the beams' common text do, and a forest or two.
        self.bank.restart(longest - room + self.sizes.spare if self.graphs is not None else 0)
        if self.graphs is None:
            self.context = self.model.start(1, room)
            return
        self.context.span = None
        self.context.rewind([0])
        self.context.reserve(longest + self.sizes.spare)


class BeamWorkspace:
    """The memory of one request at a time; later requests replay what earlier ones captured.

    No text is kept, so every request reads its whole prompt. With `packs`, passes compute short distributions along with their
    features; that is the default on devices where copies to the host have to wait. With `ahead`, the next pass is then launched
    before a round's tokens are handed out.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Head | None,
        graphs: bool,
        *,
        packs: bool | None = None,
        ahead: bool = True,
        sizes: PassSizes = _SIZES,
    ) -> None:
        self.target, self.draft, self.graphs = target, draft, graphs
        self.mark = target.mark()
        self.packs, self.ahead = not is_host(target.device) if packs is None else packs, ahead
        self.target_memory = BeamMemory(target, graphs, sizes)
        self.draft_memory = None if draft is None else BeamMemory(draft, graphs, sizes)
        self.claim: Callable[[], Owner | None] = lambda: None
        """Returns the run whose text is in memory; each run sets it."""
        self.spoiled = False
        """Whether work was interrupted, so that the contents are unknown."""
        self._at_work = False

    def restart(self, prompt_length: int, longest: int) -> None:
        """Prepare for a prompt whose texts grow to at most `longest` tokens."""
        self.target_memory.restart(prompt_length + 64, longest)
        if self.draft_memory is not None:
            self.draft_memory.restart(prompt_length, longest)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep other requests out, even if this one is cancelled; an error spoils the contents."""
        self._at_work = True
        try:
            yield
        except BaseException:
            self.spoiled = True
            raise
        finally:
            self._at_work = False

    @property
    def captures(self) -> bool:
        """Whether passes are captured, which makes the workspace worth keeping."""
        memories = (self.target_memory, self.draft_memory)
        return any(memory is not None and memory.graphs is not None for memory in memories)

    @property
    def idle(self) -> bool:
        """Whether another request may start here."""
        run = self.claim()
        return not self._at_work and not self.spoiled and (run is None or run.done)
