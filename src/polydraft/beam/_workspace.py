"""Memories of beams: features of a tree's nodes, one model's memory, and who works on them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from polydraft.beam._node import Node
from polydraft.engine.graphs import GraphCache, tell_obstacle
from polydraft.engine.workspace import Owner
from polydraft.models import Context, FeatureHead, LanguageModel
from polydraft.transfers import brought

FEWEST_PLACES = 256
"""Uncommitted places that a captured pass looks at; from there on powers of two."""
BEFORE = 0
"""The row of what precedes the tree."""
NOWHERE = -1
"""In place of a row, for what has no features."""
_FIRST_ROWS = 512
_FIRST_PLACES = 2 * FEWEST_PLACES
"""Room for a forest that is made beforehand: most requests never ask for more."""


class FeatureBank:
    """What a model has computed of each node that it has passed.

    All of it lies in one tensor, which stays where it is as long as it is large enough: captured passes write to its rows and
    read from them, and a request hands it on to the next.
    """

    def __init__(self) -> None:
        self.values_NF: Tensor | None = None
        """Made by the first features, which show what they look like."""
        self.rows: dict[Node, int] = {}
        """Where each node's features lie."""
        self._used = 1
        self._needed = _FIRST_ROWS

    @property
    def place(self) -> tuple[int, int] | None:
        """Where the rows begin and how many there are, once there are some: what captures rely on."""
        return None if self.values_NF is None else (self.values_NF.data_ptr(), len(self.values_NF))

    def restart(self, rows: int) -> None:
        """Hold nothing, with room for so many rows."""
        self.rows, self._used = {}, 1
        self._reserve(rows)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes that are here."""
        assert self.values_NF is not None
        return self.values_NF[[self.rows[node] for node in nodes]]

    def claim(self, nodes: Sequence[Node], size: int) -> int:
        """Give nodes rows in a row, with room for `size`, and return the first; the next claim takes what they do not fill."""
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
        """Put features into rows that were claimed."""
        if self.values_NF is None:
            self.values_NF = self._made(features_TF, self._needed)
        self.values_NF.index_copy_(0, rows_T, features_TF)

    def write_before(self, features_F: Tensor) -> None:
        """Put down the features of what precedes the tree."""
        if self.values_NF is None:
            self.values_NF = self._made(features_F[None], self._needed)
        self.values_NF[BEFORE] = features_F

    def drop(self, nodes: Sequence[Node]) -> None:
        """Forget nodes; their rows are free again after the next `keep`."""
        for node in nodes:
            self.rows.pop(node, None)

    def keep(self, alive: Collection[Node]) -> None:
        """Forget all other nodes, and move what is left together."""
        rows = [(node, row) for node, row in self.rows.items() if node in alive]
        if rows and self.values_NF is not None:
            kept_R = brought(torch.tensor([row for _, row in rows]), self.values_NF.device)
            self.values_NF[1 : 1 + len(rows)] = self.values_NF[kept_R]
        self.rows = {node: row for row, (node, _) in enumerate(rows, start=1)}
        self._used = 1 + len(rows)

    def _made(self, like_TF: Tensor, rows: int) -> Tensor:
        return torch.zeros(rows, like_TF.shape[-1], dtype=like_TF.dtype, device=like_TF.device)


class BeamMemory:
    """One model's memory of one row, and the graphs of passes over it where these can be captured.

    Parameters
    ----------
    graphs : bool
        Capture passes where the device can.
    """

    def __init__(self, model: LanguageModel | FeatureHead, graphs: bool) -> None:
        self._model = model
        self.context: Context = model.start(1, 8)
        self.bank = FeatureBank()
        self.graphs: GraphCache | None = None
        obstacle: str | None = getattr(model, "graph_obstacle", None) or getattr(model, "shape_obstacle", None)
        if graphs and model.device.type == "cuda":
            if obstacle is None:
                self.graphs = GraphCache(device=model.device)
            else:
                tell_obstacle(model, obstacle)

    def restart(self, room: int, longest: int) -> None:
        """Hold nothing, with room for so many tokens, or for a text of `longest` if the memory should not move."""
        # The prompt has no rows, all new tokens of the beams' common text have one, and so has a forest or two.
        self.bank.restart(longest - room + _FIRST_PLACES if self.graphs is not None else 0)
        if self.graphs is None:
            self.context = self._model.start(1, room)
            return
        self.context.span = None
        self.context.rewind([0])
        self.context.reserve(longest + _FIRST_PLACES)


class BeamWorkspace:
    """The memories of one request after another; kept, they let a later one replay what an earlier one captured.

    Nothing of a text is kept: every request reads its whole prompt.

    Parameters
    ----------
    graphs : bool
        Capture passes where the device can.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel | FeatureHead | None, graphs: bool) -> None:
        self.target, self.draft, self.graphs = target, draft, graphs
        self.target_memory = BeamMemory(target, graphs)
        self.draft_memory = None if draft is None else BeamMemory(draft, graphs)
        self.claim: Callable[[], Owner | None] = lambda: None
        """Whose text is in the memories; a later run puts itself here."""
        self.spoiled = False
        """Whether something went wrong half-way, so that nobody knows what is in the memories."""
        self._at_work = False

    @torch.inference_mode()
    def begin(self, prompt_length: int, longest: int) -> None:
        """Make ready for a prompt and for the texts of up to `longest` tokens that it becomes."""
        with self.at_work():
            self.target_memory.restart(prompt_length + 64, longest)
            if self.draft_memory is not None:
                self.draft_memory.restart(prompt_length, longest)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the memories, whatever their run says meanwhile; an error on the way spoils them."""
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
        """Whether passes are captured, and worth keeping for other texts."""
        memories = (self.target_memory, self.draft_memory)
        return any(memory is not None and memory.graphs is not None for memory in memories)

    @property
    def idle(self) -> bool:
        """Whether a run may begin here."""
        run = self.claim()
        return not self._at_work and not self.spoiled and (run is None or run.done)
