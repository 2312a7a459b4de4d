"""Memory of beams: features of a tree's nodes, each model's cache, and which request uses them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.beam._node import Node
from polydraft.devices import captures, is_host
from polydraft.engine.graphs import GraphCache, tell_obstacle
from polydraft.engine.workspace import Owner
from polydraft.models import Context, Head, LanguageModel
from polydraft.transfers import brought

BEFORE = 0
"""The row of what precedes the tree."""
NOWHERE = -1
"""Stands for a row where there are no features."""


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Sizes of captured passes and of their memory. There are few of each, because every size needs a capture."""

    tokens: tuple[int, ...] = (16, 32, 64, 96, 128, 192, 256)
    """Passes are padded to one of these. Larger passes are not captured: their work hides the launches."""
    places: int = 256
    """Uncommitted places that the smallest captured pass looks at; larger ones are powers of two."""
    rows: int = 512
    """Rows of features allocated at first."""
    spare: int = 512
    """Places and rows allocated for forests beyond a request's longest text: most never need more."""


class FeatureBank:
    """A model's features of each node that it has passed.

    They are in one tensor, which moves only to grow: captured passes read and write its rows, and the next request takes it
    over.
    """

    def __init__(self, sizes: PassSizes | None = None) -> None:
        self.values_NF: Tensor | None = None
        """Allocated with the first features, which tell their size and type."""
        self.rows: dict[Node, int] = {}
        """Where each node's features lie."""
        self._used = 1
        self._needed = (sizes or PassSizes()).rows

    @property
    def place(self) -> tuple[int, int] | None:
        """Address and number of the rows, once allocated: what captures rely on."""
        return None if self.values_NF is None else (self.values_NF.data_ptr(), len(self.values_NF))

    def restart(self, rows: int) -> None:
        """Forget everything and make room for this many rows."""
        self.rows, self._used = {}, 1
        self._reserve(rows)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes."""
        assert self.values_NF is not None
        return self.values_NF[[self.rows[node] for node in nodes]]

    def claim(self, nodes: Sequence[Node], size: int) -> int:
        """Give nodes consecutive rows, with room for `size` in all, and return the first; the next claim reuses the rest."""
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
        """Write features to claimed rows, or to that of what precedes the tree."""
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
    """One model's cache with one row, and the captures of its passes, if `graphs` is set and the device can capture."""

    def __init__(self, model: LanguageModel | Head, graphs: bool, sizes: PassSizes | None = None) -> None:
        self._model, self.sizes = model, sizes or PassSizes()
        self.context: Context = model.start(1, 8)
        self.bank = FeatureBank(self.sizes)
        self.graphs: GraphCache | None = None
        obstacle: str | None = getattr(model, "graph_obstacle", None) or getattr(model, "shape_obstacle", None)
        if graphs and captures(model.device):
            if obstacle is None:
                self.graphs = GraphCache(device=model.device)
            else:
                tell_obstacle(model, obstacle)

    def restart(self, room: int, longest: int) -> None:
        """Forget everything; make room for `room` tokens, or for `longest` if the cache must not move."""
        # The prompt has no rows; all new tokens of the beams' common text have one, and so has a forest or two.
        self.bank.restart(longest - room + self.sizes.spare if self.graphs is not None else 0)
        if self.graphs is None:
            self.context = self._model.start(1, room)
            return
        self.context.span = None
        self.context.rewind([0])
        self.context.reserve(longest + self.sizes.spare)


class BeamWorkspace:
    """The memory of one request after another; later requests replay what earlier ones captured.

    No text is kept: every request reads its whole prompt. With `packs`, passes compute short distributions along with their
    features (by default, where copies to the host wait for the device); with `ahead`, the next pass is then launched before a
    round's tokens are handed out.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Head | None,
        graphs: bool,
        *,
        packs: bool | None = None,
        ahead: bool = True,
        sizes: PassSizes | None = None,
    ) -> None:
        self.target, self.draft, self.graphs = target, draft, graphs
        self.mark = target.mark()
        self.packs, self.ahead = not is_host(target.device) if packs is None else packs, ahead
        self.target_memory = BeamMemory(target, graphs, sizes)
        self.draft_memory = None if draft is None else BeamMemory(draft, graphs, sizes)
        self.claim: Callable[[], Owner | None] = lambda: None
        """Whose text is in memory; each run puts itself here."""
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
        """Whether passes are captured, so that the workspace is worth keeping."""
        memories = (self.target_memory, self.draft_memory)
        return any(memory is not None and memory.graphs is not None for memory in memories)

    @property
    def idle(self) -> bool:
        """Whether another request may start here."""
        run = self.claim()
        return not self._at_work and not self.spoiled and (run is None or run.done)
