"""All beams of a request in one row of a model's cache: the prompt, and below it a tree of slots."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.beam._distribution import Floats, Indices
from polydraft.beam._node import Node, common_path, with_ancestors
from polydraft.beam._workspace import NOWHERE, BeamMemory
from polydraft.devices import brought, captures
from polydraft.engine.graphs import Arriving
from polydraft.trees import Block

_SLACK = 96
"""Dead slots to tolerate: masking a few costs less than moving the keys of all layers."""
_COMMITTED = -1
"""Place of nodes in committed text. It is also the last row of the mask, which belongs to no node and is all false."""
_OWN_NUMBERS = 4
"""Inputs per node: token, depth, place, row of the bank."""

Pass = Callable[..., Tensor]
"""`(tokens_1T, block, *rows_1T) -> features_1TF`: how tokens go through the model."""


@dataclass(frozen=True)
class Inputs:
    """Additional inputs of a pass: a few numbers per node."""

    rows: Callable[[Sequence[Node]], Indices]
    """`nodes -> rows_XT`; padding tokens get `NOWHERE`."""
    kind: Callable[[], Hashable]
    """Returns what captures with these inputs depend on."""


@dataclass(frozen=True)
class Reading:
    """What a pass also computes from its features for the host, in the same capture."""

    kind: Hashable
    function: Callable[[Tensor], Tensor]
    """`features_TF -> values_TX`."""


_NO_INPUTS = Inputs(lambda nodes: np.empty((0, len(nodes)), dtype=np.int64), lambda: None)


class SlotTree:
    """Keeps a tree of nodes in slots of a cache's only row, after the committed text.

    Beams have no caches of their own: shared nodes are stored once, and a mask lets each node attend to its ancestors. A beam
    that dies leaves dead slots, which `keep` reclaims now and then; a prefix that all beams share becomes committed text.

    `forward`, by default `Context.extend`, passes tokens through the model, with additional `inputs` if there are any. If the
    memory has captures, passes are captured and replayed, padded to a few sizes so that few captures are needed.
    """

    def __init__(self, memory: BeamMemory, forward: Pass | None = None, inputs: Inputs | None = None) -> None:
        self.context, self.bank = memory.context, memory.bank
        self.reading: Reading | None = None
        """What passes also compute for the host; `readings` returns it."""
        self._forward, self._inputs = forward or memory.context.extend, inputs or _NO_INPUTS
        self._graphs, self._sizes = memory.graphs, memory.sizes
        self._places: dict[Node, int] = {}
        self._latest: list[Node] = []
        self._arriving: Arriving | None = None
        """The last pass's reading of the latest nodes, on its way to the host."""
        self._visible_UU = np.zeros((64, 64), dtype=bool)
        self._used = 0
        self._base = 0
        """Depth of the first node that is not committed text."""
        self.passed_tokens = 0
        self.replayed_passes = 0

    def __contains__(self, node: Node) -> bool:
        return node in self.bank.rows

    @property
    def captures(self) -> bool:
        """Whether passes may be captured."""
        return self._graphs is not None

    def read(self, leaves: Sequence[Node]) -> None:
        """Pass the leaves and their missing ancestors through the model, in one pass."""
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
        size = None if self._graphs is None else next((size for size in self._sizes.tokens if size >= len(nodes)), None)
        places = stop + 1 if size is None else max(1 << (start + size - 1).bit_length(), self._sizes.places)
        self._make_room(places)
        self._place(nodes)
        outcome, replayed = self._extend(nodes) if size is None else self._replay(nodes, size, places)
        self._latest = list(nodes)
        self._arriving = None if self.reading is None else Arriving.send(outcome)
        self.passed_tokens += len(nodes)
        self.replayed_passes += replayed

    def _place(self, nodes: Sequence[Node]) -> None:
        """Give nodes the next places, and let each see itself and its ancestors."""
        places, start = self._places, self._used
        above: list[int] = []
        for place, node in enumerate(nodes, start):
            parent = _COMMITTED if node.parent is None else places.get(node.parent, _COMMITTED)
            if parent >= start:  # the parent's row of the mask must be set first
                self._see(start, above)
                start, above = place, []
            above.append(parent)
            places[node] = place
        self._see(start, above)

    def _see(self, start: int, above: list[int]) -> None:
        """Let the places from `start` on see themselves, and everything that their parents, in `above`, see."""
        stop = start + len(above)
        assert not self._visible_UU[_COMMITTED].any(), "the row that stands for committed text must stay empty"
        self._visible_UU[start:stop] = self._visible_UU[above]
        self._visible_UU[range(start, stop), range(start, stop)] = True

    def readings(self, nodes: Sequence[Node]) -> Floats | None:
        """Wait for the last pass's reading of nodes and return it; None if there is none, or a node was not in that pass."""
        if self._arriving is None:
            return None
        rows: Any = slice(len(nodes))
        if nodes != self._latest:
            known = {node: row for row, node in enumerate(self._latest)}
            if any(node not in known for node in nodes):
                return None
            rows = [known[node] for node in nodes]
        values_RX: Floats = self._arriving.arrived().numpy()[rows]
        return values_RX

    def _extend(self, nodes: Sequence[Node]) -> tuple[Tensor, bool]:
        """Pass nodes without padding."""
        start, stop = self._used, self._used + len(nodes)
        tokens = [node.token for node in nodes]
        depths = [node.depth - self._base for node in nodes]
        rows_XT = self._inputs.rows(nodes)
        if len(nodes) == 1 and not self._visible_UU[start, :stop].all():
            # A context lets a single token see everything. Add a second, unused token, so that it applies the mask.
            self._visible_UU[stop] = False
            self._visible_UU[stop, stop] = True
            tokens, depths, stop = tokens * 2, depths * 2, stop + 1
            rows_XT = np.repeat(rows_XT, 2, axis=1)
        device, self.context.span = self.context.device, None
        visible_1TU = torch.from_numpy(self._visible_UU[None, start:stop, :stop].copy()).to(device)
        block = Block(start, torch.tensor([depths], device=device), visible_1TU)
        rows_1T = [torch.from_numpy(rows_T[None]).to(device) for rows_T in rows_XT]
        first = self.bank.claim(nodes, len(tokens))
        features_TF = self._forward(torch.tensor([tokens], device=device), block, *rows_1T)[0]
        self.bank.write(torch.arange(first, first + len(tokens), device=features_TF.device), features_TF)
        self._used = stop
        return features_TF if self.reading is None else self.reading.function(features_TF), False

    def _replay(self, nodes: Sequence[Node], size: int, places: int) -> tuple[Tensor, bool]:
        """Pass nodes, padded to `size` tokens, with a capture.

        Padding comes after the nodes, and sees only itself and the committed text; no node sees it, and the next pass
        overwrites it. Places are inputs, so that one capture serves all of them. All inputs are sent in one copy.
        """
        assert self._graphs is not None
        start, count = self._used, len(nodes)
        rows_XT = self._inputs.rows(nodes)
        first = self.bank.claim(nodes, size)
        kinds = _OWN_NUMBERS + len(rows_XT)
        sending_X = torch.zeros(size * (8 * kinds + places), dtype=torch.uint8, pin_memory=captures(self.context.device))
        sent_X = sending_X.numpy()
        numbers_X1T = sent_X[: 8 * kinds * size].view(np.int64).reshape(kinds, 1, size)
        numbers_X1T[0, 0, :count] = [node.token for node in nodes]
        numbers_X1T[1, 0, :count] = [node.depth - self._base for node in nodes]
        numbers_X1T[2, 0] = np.arange(start, start + size)
        numbers_X1T[3, 0] = np.arange(first, first + size)
        numbers_X1T[_OWN_NUMBERS:, 0, :count] = rows_XT
        numbers_X1T[_OWN_NUMBERS:, 0, count:] = NOWHERE
        visible_TU = sent_X[8 * kinds * size :].view(bool).reshape(size, places)
        visible_TU[:count, : start + count] = self._visible_UU[start : start + count, : start + count]
        filling = np.arange(count, size)
        visible_TU[filling, start + filling] = True
        context, bank, forward, reading = self.context, self.bank, self._forward, self.reading
        context.places = places

        def function(sent_X: Tensor) -> Tensor:
            numbers_X1T = sent_X[: 8 * kinds * size].view(torch.int64).view(kinds, 1, size)
            visible_1TU = sent_X[8 * kinds * size :].view(torch.bool).view(1, size, places)
            tokens_1T, depths_1T, places_1T, bank_1T, *rows_1T = numbers_X1T
            features_1TF = forward(tokens_1T, Block(0, depths_1T, visible_1TU, places_1T), *rows_1T)
            bank.write(bank_1T[0], features_1TF[0])
            return features_1TF[0] if reading is None else reading.function(features_1TF[0])

        reads = reading and reading.kind
        kind = (size, places, context.fix_span(), context.capacity, context.address, bank.place, self._inputs.kind(), reads)
        self._used += count
        if bank.place is None:  # a capture must not allocate the bank
            return function(sending_X.to(context.device)), False
        return self._graphs.run(kind, function, sending_X)

    def features(self, nodes: Sequence[Node]) -> Tensor:
        """Return the features `[R, F]` of nodes that were read."""
        return self.bank.features(nodes)

    def pretend(self, node: Node) -> None:
        """Treat a node as committed text although it has no slot, so that its children see nothing before them."""
        self.bank.drop([node])
        self._places[node] = _COMMITTED

    def forget(self, nodes: Sequence[Node]) -> None:
        """Forget nodes, so that they are read again; none of their descendants may be kept."""
        for node in nodes:
            self._places.pop(node, None)
        self.bank.drop(nodes)

    def keep(self, leaves: Sequence[Node], below: Sequence[Node] = (), slack: int = _SLACK) -> None:
        """Reclaim dead slots, those of nodes that no leaf descends from, if there are more than `slack`.

        Also keep nodes `below` leaves, whose pass is under way. This never waits for the device.
        """
        alive = with_ancestors([*leaves, *below])
        live = [node for node, place in self._places.items() if place != _COMMITTED and node in alive]
        if self._used - len(live) <= slack:
            return
        live.sort(key=lambda node: self._places[node])
        on_all_paths = {*common_path(leaves), *(node for node in live if node.parent is None)}
        shared = sorted((node for node in live if node in on_all_paths), key=lambda node: node.depth)
        order = shared + [node for node in live if node not in on_all_paths]
        sources = [self._places[node] for node in order]
        if sources:
            self.context.rearrange(brought(torch.tensor([sources]), self.context.device))
        count = len(shared)
        self.context.advance(brought(torch.tensor([count]), self.context.device))
        self.context.settle([self.context.lengths[0] + count])
        rest = np.array(sources[count:], dtype=np.int64)
        self._visible_UU[: len(rest), : len(rest)] = self._visible_UU[np.ix_(rest, rest)]
        committed = [node for node, place in self._places.items() if place == _COMMITTED and node in alive]
        self._places = dict.fromkeys([*committed, *shared], _COMMITTED)
        self._places.update({node: place for place, node in enumerate(order[count:])})
        self.bank.keep(alive)
        self._used, self._base = len(rest), self._base + count

    def _make_room(self, places: int) -> None:
        if places >= len(self._visible_UU):  # the last row must stay free: it stands for committed text
            size = 2 * max(places, len(self._visible_UU))
            wider_UU = np.zeros((size, size), dtype=bool)
            wider_UU[: self._used, : self._used] = self._visible_UU[: self._used, : self._used]
            self._visible_UU = wider_UU
        needed = self.context.lengths[0] + places
        if needed > self.context.capacity:
            self.context.reserve(needed + max(needed // 2, 64))
