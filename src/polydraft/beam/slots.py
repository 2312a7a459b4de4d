"""One request's beams in one row of a model's memory: the prompt once, below it a tree of slots."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.beam.node import Node, common_path, with_ancestors
from polydraft.engine.recorder import Recorder
from polydraft.models import Context
from polydraft.models.tree_attention import power_of_two
from polydraft.trees import Block

_SLACK = 96
"""Dead slots that are left where they are: masked work on a few costs less than moving all layers' keys about."""
_COMMITTED = -1

FEWEST_PLACES = 256
"""Uncommitted places that a recorded pass looks at; from there on powers of two."""
_PASS_SIZES = (16, 32, 64, 96, 128, 192, 256)
"""Tokens of recorded passes: few sizes, because each is a recording of its own. Larger passes hide their launches by work."""

Inputs = Callable[[Sequence[Node], int], tuple[Tensor, ...]]
"""`(nodes, size) -> tensors [1, size, ..]`: what a pass takes beside tokens, filled up to `size`."""
Pass = Callable[..., Tensor]
"""`(tokens_1T, block, *inputs) -> features_1TF`: how tokens go through the model, a function of these and of the memory."""


class SlotTree:
    """Which node lies in which slot.

    No beam has a cache of its own: nodes that beams share are stored once, and a node attends to its ancestors by mask. A
    beam that dies leaves dead slots behind, which `keep` reclaims now and then; what all beams share by then becomes
    committed text.

    Parameters
    ----------
    context : Context
        One row, with what precedes the tree committed.
    forward : callable, optional
        How tokens go through the model; `Context.extend` otherwise.
    inputs : callable, optional
        What it takes beside tokens; nothing otherwise.
    recorder : Recorder, optional
        Records passes and replays them: they are filled up to a few sizes then, so that a few recordings serve for all.
    """

    def __init__(
        self, context: Context, forward: Pass | None = None, inputs: Inputs | None = None, recorder: Recorder | None = None
    ) -> None:
        assert context.batch_size == 1
        self.context = context
        self._forward = forward or context.extend
        self._inputs = inputs or (lambda nodes, size: ())
        self._recorder = recorder
        self._places: dict[Node, int] = {}
        self._features: dict[Node, tuple[Tensor, int]] = {}
        self._visible_UU = np.zeros((64, 64), dtype=bool)
        self._used = 0
        self._base = 0
        """Depth of the first node that is not committed text."""
        self.passes = 0
        self.passed_tokens = 0
        self.replayed_passes = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._features

    def read(self, leaves: Sequence[Node]) -> None:
        """Pass the leaves, and whatever of their ancestors is missing, through the model together."""
        missing: list[Node] = []
        known = self._places.keys()
        listed: set[Node] = set()
        for leaf in leaves:
            chain: list[Node] = []
            node: Node | None = leaf
            while node is not None and node not in known and node not in listed:
                chain.append(node)
                node = node.parent
            listed.update(chain)
            missing += reversed(chain)
        if missing:
            self._pass(missing)

    def _pass(self, nodes: Sequence[Node]) -> None:
        """Pass nodes, parents first, through the model."""
        start, stop = self._used, self._used + len(nodes)
        size = None if self._recorder is None else next((size for size in _PASS_SIZES if size >= len(nodes)), None)
        places = stop + 1 if size is None else max(power_of_two(start + size), FEWEST_PLACES)
        self._make_room(places)
        for place, node in enumerate(nodes, start):
            above = _COMMITTED if node.parent is None else self._places.get(node.parent, _COMMITTED)
            self._visible_UU[place] = False if above == _COMMITTED else self._visible_UU[above]
            self._visible_UU[place, place] = True
            self._places[node] = place
        features_TF = self._extend(nodes) if size is None else self._replay(nodes, size, places)
        for row, node in enumerate(nodes):
            self._features[node] = (features_TF, row)
        self.passes += 1
        self.passed_tokens += len(nodes)

    def _extend(self, nodes: Sequence[Node]) -> Tensor:
        """Compute the features of nodes, as many as there are."""
        start, stop = self._used, self._used + len(nodes)
        tokens = [node.token for node in nodes]
        depths = [node.depth - self._base for node in nodes]
        if len(nodes) == 1 and not self._visible_UU[start, :stop].all():
            # A context takes one token alone to see everything: a second one, which nobody will see, calls for the mask.
            self._visible_UU[stop] = False
            self._visible_UU[stop, stop] = True
            tokens, depths, stop = tokens * 2, depths * 2, stop + 1
        device, self.context.span = self.context.device, None
        visible_1TU = torch.from_numpy(self._visible_UU[None, start:stop, :stop].copy()).to(device)
        block = Block(start, torch.tensor([depths], device=device), visible_1TU)
        inputs = self._inputs(nodes, len(tokens))
        self._used = stop
        return self._forward(torch.tensor([tokens], device=device), block, *inputs)[0]

    def _replay(self, nodes: Sequence[Node], size: int, places: int) -> Tensor:
        """Compute the features of nodes together with tokens that fill them up to `size`.

        These come behind the nodes, see nobody but the committed text and themselves, and nobody sees them: the next pass
        overwrites them. Where all of them go is an input, so that a recording serves for every place.
        """
        assert self._recorder is not None
        start, count = self._used, len(nodes)
        numbers_31T = np.zeros((3, 1, size), dtype=np.int64)
        numbers_31T[0, 0, :count] = [node.token for node in nodes]
        numbers_31T[1, 0, :count] = [node.depth - self._base for node in nodes]
        numbers_31T[2, 0] = np.arange(start, start + size)
        visible_1TU = np.zeros((1, size, places), dtype=bool)
        visible_1TU[0, :count, : start + count] = self._visible_UU[start : start + count, : start + count]
        filling = np.arange(count, size)
        visible_1TU[0, filling, start + filling] = True
        context, forward = self.context, self._forward
        context.places = places
        kind = (size, places, context.fix_span(), context.capacity, context.address)

        def function(numbers_31T: Tensor, visible_1TU: Tensor, *inputs: Tensor) -> Tensor:
            tokens_1T, depths_1T, places_1T = numbers_31T
            return forward(tokens_1T, Block(0, depths_1T, visible_1TU, places_1T), *inputs)

        sent = (self._sent(numbers_31T), self._sent(visible_1TU), *self._inputs(nodes, size))
        features_1TF, replayed = self._recorder.run(kind, function, *sent)
        self._used += count
        self.replayed_passes += replayed
        # The next replay overwrites what this one returned.
        return features_1TF[0, :count].clone() if replayed else features_1TF[0]

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Bring values to the device without waiting for it."""
        if self.context.device.type != "cuda":
            return torch.from_numpy(values).to(self.context.device)
        return torch.from_numpy(values).pin_memory().to(self.context.device, non_blocking=True)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes that were read."""
        held = [self._features[node] for node in nodes]
        first = held[0][0]
        if all(block is first for block, _ in held):
            return first[[row for _, row in held]]
        return torch.stack([block[row] for block, row in held])

    def pretend(self, node: Node) -> None:
        """Take a node for committed text although it has no slot: nothing precedes what follows it."""
        self._features.pop(node, None)
        self._places[node] = _COMMITTED

    def forget(self, nodes: Sequence[Node]) -> None:
        """Take nodes out again, to be read anew; nothing that is kept may lie below them."""
        for node in nodes:
            self._places.pop(node, None)
            self._features.pop(node, None)

    def keep(self, leaves: Sequence[Node], slack: int = _SLACK) -> None:
        """Reclaim the slots of nodes that no leaf has above it, if more than `slack` of them are dead."""
        alive = with_ancestors(leaves)
        live = [node for node, place in self._places.items() if place != _COMMITTED and node in alive]
        if self._used - len(live) <= slack:
            return
        live.sort(key=lambda node: self._places[node])
        on_all_paths = {*common_path(leaves), *(node for node in live if node.parent is None)}
        shared = sorted((node for node in live if node in on_all_paths), key=lambda node: node.depth)
        order = shared + [node for node in live if node not in on_all_paths]
        sources = [self._places[node] for node in order]
        if sources:
            self.context.rearrange(torch.tensor([sources], device=self.context.device))
        count = len(shared)
        self.context.advance(torch.tensor([count], device=self.context.device))
        self.context.settle([self.context.lengths[0] + count])
        rest = np.array(sources[count:], dtype=np.int64)
        self._visible_UU[: len(rest), : len(rest)] = self._visible_UU[np.ix_(rest, rest)]
        committed = [node for node, place in self._places.items() if place == _COMMITTED and node in alive]
        self._places = dict.fromkeys([*committed, *shared], _COMMITTED)
        self._places.update({node: place for place, node in enumerate(order[count:])})
        # Clones, because a view would hold on to the features of all that was passed together with it.
        self._features = {
            node: (block[row : row + 1].clone(), 0) for node, (block, row) in self._features.items() if node in alive
        }
        self._used, self._base = len(rest), self._base + count

    def _make_room(self, places: int) -> None:
        if places > len(self._visible_UU):
            size = 2 * max(places, len(self._visible_UU))
            wider_UU = np.zeros((size, size), dtype=bool)
            wider_UU[: self._used, : self._used] = self._visible_UU[: self._used, : self._used]
            self._visible_UU = wider_UU
        needed = self.context.lengths[0] + places
        if needed > self.context.capacity:
            self.context.reserve(needed + max(needed // 2, 64))
