"""One request's beams in one row of a model's memory: the prompt once, below it a tree of slots."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from polydraft.beam.node import Node, common_path, with_ancestors
from polydraft.models import Context
from polydraft.trees import Block

_SLACK = 96
"""Dead slots that are left where they are: masked work on a few costs less than moving all layers' keys about."""
_COMMITTED = -1

Pass = Callable[[Tensor, Block, Sequence[Node]], Tensor]
"""`(tokens_1T, block, nodes) -> features_1TF`: how tokens go through the model."""


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
    """

    def __init__(self, context: Context, forward: Pass | None = None) -> None:
        assert context.batch_size == 1
        self.context = context
        self._forward = forward or (lambda tokens_1T, block, nodes: context.extend(tokens_1T, block))
        self._places: dict[Node, int] = {}
        self._features: dict[Node, tuple[Tensor, int]] = {}
        self._visible_UU = np.zeros((64, 64), dtype=bool)
        self._used = 0
        self._base = 0
        """Depth of the first node that is not committed text."""
        self.passes = 0
        self.passed_tokens = 0

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
        self._make_room(stop + 1)
        for place, node in enumerate(nodes, start):
            above = _COMMITTED if node.parent is None else self._places.get(node.parent, _COMMITTED)
            self._visible_UU[place] = False if above == _COMMITTED else self._visible_UU[above]
            self._visible_UU[place, place] = True
            self._places[node] = place
        tokens = [node.token for node in nodes]
        depths = [node.depth - self._base for node in nodes]
        if len(nodes) == 1 and not self._visible_UU[start, :stop].all():
            # A context takes one token alone to see everything: a second one, which nobody will see, calls for the mask.
            self._visible_UU[stop] = False
            self._visible_UU[stop, stop] = True
            tokens, depths, stop = tokens * 2, depths * 2, stop + 1
        device = self.context.device
        visible_1TU = torch.from_numpy(self._visible_UU[None, start:stop, :stop].copy()).to(device)
        block = Block(start, torch.tensor([depths], device=device), visible_1TU)
        features_1TF = self._forward(torch.tensor([tokens], device=device), block, nodes)
        for row, node in enumerate(nodes):
            self._features[node] = (features_1TF[0], row)
        self._used = stop
        self.passes += 1
        self.passed_tokens += len(nodes)

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
