"""MCSD's ablation "no tree attention" (Table 4): each root-to-leaf path is a separate batch row with a copied cache.

For benchmarks only: the text is the same, at a higher cost in time and memory.
"""

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models import Context, LanguageModel
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.trees import Block, Topology, causal_block


class FlatModel(LanguageModel):
    """A target that scores trees of one given shape as a batch of sequences."""

    graph_obstacle = "every candidate gets a cache of its own in each round"

    def __init__(self, model: HFModel, topology: Topology) -> None:
        self.inner, self.topology = model, topology
        self.name, self.vocab_size = f"{model.name} (flat)", model.vocab_size
        self.device, self.dtype, self.max_positions = model.device, model.dtype, model.max_positions
        self.paths_PD, self.place_of_N2 = _paths(topology, model.device)

    def start(self, batch_size: int, capacity: int) -> "FlatContext":
        """Return an empty context."""
        return FlatContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the target's head."""
        return self.inner.head(features_RF)


class FlatContext(Context):
    """One cache for the committed text, copied in each round for every root-to-leaf path."""

    def __init__(self, model: FlatModel, batch_size: int, capacity: int) -> None:
        self._committed = model.inner.start(batch_size, capacity)
        super().__init__(model, self._committed.cache, batch_size, capacity, model.device, model.max_positions)
        self._model = model
        self._candidates: HFContext | None = None

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Score a tree path by path, or a plain sequence without copies."""
        self._share_lengths()
        if block.size == 1 or block.size != self._model.topology.num_nodes:
            if not torch.equal(block.visible_BTU[0], torch.ones_like(block.visible_BTU[0]).tril()):
                raise UsageError("the flat mode scores only the tree it was made for; build FlatModel with the drafter's tree")
            self._candidates = None
            return self._committed.extend(tokens_BT, block)
        copies, width = self._model.paths_PD.shape
        candidates = self._model.inner.start(self.batch_size * copies, max(self.lengths) + width)
        candidates.rewind([length for length in self.lengths for _ in range(copies)])
        for own_LBHSC, text_LBHSC in self._shared(candidates):
            used = text_LBHSC[:, :, :, : max(self.lengths)]
            own_LBHSC[:, :, :, : used.shape[3]] = used.repeat_interleave(copies, dim=1)
        tokens_RD = tokens_BT[:, self._model.paths_PD].flatten(0, 1)
        features_RDF = candidates.extend(tokens_RD, causal_block(len(tokens_RD), width, self.device))
        self._candidates = candidates
        features_BPDF = features_RDF.view(self.batch_size, copies, width, -1)
        copy_N, depth_N = self._model.place_of_N2.T
        return features_BPDF[:, copy_N, depth_N]

    def _share_lengths(self) -> None:
        self._committed.lengths, self._committed.lengths_B = self.lengths, self.lengths_B

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        raise AssertionError("extend() does the work here")

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Commit tokens of the copies, or those of a plain sequence."""
        if self._candidates is None:
            super().commit(places_BD, counts_B, in_place=in_place)
            return
        target_BD = self.lengths_B[:, None] + torch.arange(places_BD.shape[1], device=self.device)
        copy_BD, depth_BD = self._model.place_of_N2[places_BD].unbind(-1)
        rows_BD, source_BD = self._rows_B1 * len(self._model.paths_PD) + copy_BD, self.lengths_B[:, None] + depth_BD
        for own_LBHSC, text_LBHSC in self._shared(self._candidates):
            text_LBHSC[:, self._rows_B1, :, target_BD] = own_LBHSC[:, rows_BD, :, source_BD]
        self.lengths_B += counts_B

    def _shared(self, candidates: HFContext) -> list[tuple[Tensor, Tensor]]:
        """Return the keys of the copies with those of the text, and the values of both; nothing before any text was read."""
        keys_LBHSC, values_LBHSC = self._committed.cache.keys_LBHSC, self._committed.cache.values_LBHSC
        if keys_LBHSC is None or values_LBHSC is None:
            return []
        like_B = keys_LBHSC.new_empty(candidates.batch_size)
        own = candidates.cache.held(like_B, keys_LBHSC.shape[2], keys_LBHSC.shape[4])
        return list(zip(own, (keys_LBHSC, values_LBHSC), strict=True))

    @property
    def divisible(self) -> bool:
        """False, because rows share the committed text's context."""
        return False

    def _grow(self, capacity: int) -> None:
        self._committed.reserve(capacity)


def _paths(topology: Topology, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the nodes of each root-to-leaf path, and for each node one (path, depth) where it occurs."""
    paths = []
    for node in range(topology.num_nodes):
        if not topology.children[node]:
            path = [node]
            while path[-1]:
                path.append(topology.parents[path[-1]])
            path.reverse()
            paths.append(path + [node] * (topology.depth + 1 - len(path)))
    place = {path[depth]: (row, depth) for row, path in enumerate(paths) for depth in reversed(range(len(path)))}
    places = [place[node] for node in range(topology.num_nodes)]
    return torch.tensor(paths, device=device), torch.tensor(places, device=device)
