"""Distributions after a text: the target's, and those that drafts are chosen from."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from polydraft.beam._distribution import Continuations, DistributionMaker, averaged, joined, no_continuations
from polydraft.beam._node import Node
from polydraft.beam._reader import TreeReader
from polydraft.beam._slots import Reading, SlotTree
from polydraft.beam._workspace import BeamMemory
from polydraft.models import LanguageModel

_FEW_NODES = 16
"""In single precision, logits of up to this many nodes are computed together; with more nodes, on demand."""
_MOST_KEPT = 512
"""Most short distributions of the target that stay on the host for twins."""
_LONGEST_ENDING = 4
"""How many of the last tokens twins can share."""
_MOST_ENDINGS = 2**14


def packed_reading(distribution: DistributionMaker, head: Callable[[Tensor], Tensor]) -> Reading | None:
    """Return the reading with which a pass computes its nodes' distributions; None if these are too long."""
    if not distribution.is_packed:
        return None
    return Reading(distribution.kind, lambda features_TF: distribution.packed(head(features_TF)))


class TargetPredictions:
    """The target's distributions after nodes that it has read.

    If they are short and `packs` is set, the pass computes them, which pays if every copy to the host waits for the device.
    Otherwise logits are computed for all nodes of a pass together, or for single nodes on demand, whichever costs less. With
    `keeps`, short distributions of earlier passes are kept for twins.
    """

    def __init__(
        self, model: LanguageModel, memory: BeamMemory, distribution: DistributionMaker, *, packs: bool, keeps: bool
    ) -> None:
        self.model, self.distribution = model, distribution
        self.tree = SlotTree(memory)
        self.tree.reading = packed_reading(distribution, model.head) if packs else None
        self.most_kept = _MOST_KEPT if keeps and distribution.is_short else 0
        self._found: dict[Node, tuple[Continuations, int]] = {}
        """Distributions on the host: each node's row of some continuations."""
        self._logit_rows: dict[Node, int] = {}
        self._logits_RV: Tensor | None = None
        """Logits of the last pass's nodes, if they were computed together."""

    def __contains__(self, node: Node) -> bool:
        return node in self.tree

    def __len__(self) -> int:
        return len(self._found)

    @property
    def come_with_the_pass(self) -> bool:
        """Whether a pass computes the distributions of its nodes."""
        return self.tree.reading is not None

    def collect(self, nodes: Sequence[Node], running: Iterable[Node]) -> None:
        """Compute the last pass's distributions for all nodes at once, if that pays, and forget old ones."""
        if len(self._found) > 2 * self.most_kept:
            kept = {node: self._found[node] for node in running if node in self._found}
            self._found = dict(list(self._found.items())[len(self._found) - self.most_kept :]) | kept
        nodes = [node for node in nodes if node not in self._found]
        self._logit_rows, self._logits_RV = {}, None
        if not nodes:
            return
        if self.come_with_the_pass:
            self._find(nodes)
            return
        features_RF = self.tree.features(nodes)
        if features_RF.dtype in (torch.bfloat16, torch.float16) or len(nodes) <= _FEW_NODES:
            self._logits_RV = self.model.head(features_RF)
            self._logit_rows = {node: row for row, node in enumerate(nodes)}

    def after(self, nodes: Sequence[Node]) -> Continuations:
        """Return the distribution after each node."""
        return joined(self.rows(nodes))

    def rows(self, nodes: Iterable[Node]) -> list[tuple[Continuations, int]]:
        """Return the distribution after each node as a row of some continuations, for `joined`."""
        nodes = list(nodes)
        # Remove duplicates: independent beams can have the same text.
        missing = list(dict.fromkeys(node for node in nodes if node not in self._found))
        if missing:
            self._find(missing)
        return [self._found[node] for node in nodes]

    def knows(self, node: Node) -> bool:
        """Whether the distribution after a node is on the host or can be brought there."""
        if node in self._found:
            return True
        if node not in self.tree:
            return False
        if self.distribution.has_processors:
            try:
                self._find([node])
            except Exception:  # a processor may fail on texts that no beam will have; if one does, the error is raised then
                return False
        return True

    def _find(self, nodes: Sequence[Node]) -> None:
        packed_RX = self.tree.readings(nodes)
        found = (
            self.distribution(self._logits(nodes), nodes)
            if packed_RX is None
            else self.distribution.unpacked(packed_RX, nodes, self._logits)
        )
        self._found.update({node: (found, row) for row, node in enumerate(nodes)})

    def _logits(self, nodes: Sequence[Node]) -> Tensor:
        if self._logits_RV is None or any(node not in self._logit_rows for node in nodes):
            return self.model.head(self.tree.features(nodes))
        rows = [self._logit_rows[node] for node in nodes]
        return self._logits_RV if rows == list(range(len(self._logits_RV))) else self._logits_RV[rows]


class TwinIndex:
    """Finds nodes that the target has read by the last tokens of their texts.

    A *twin* of a text is another text with the same ending. Beams often differ only in a word some tokens back, or repeat what
    another beam wrote a step ago: almost every second drafted text had a twin (beam search, six prompts). The target's
    distribution after a twin is a good draft: it covers the whole vocabulary and needs no pass.
    """

    def __init__(self, prompt: Sequence[int], most: int = _MOST_ENDINGS) -> None:
        self._before_root = tuple(prompt[-1 - _LONGEST_ENDING : -1])
        self._most = most
        self._latest: dict[tuple[int, ...], Node] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, nodes: Sequence[Node]) -> None:
        """Add nodes that the target has read; drop the oldest endings when there are too many."""
        for node in nodes:
            ending = self._ending(node)
            for length in range(1, len(ending) + 1):
                key = ending[-length:]
                self._latest.pop(key, None)  # so that the key moves to the end
                self._latest[key] = node
        while len(self._latest) > self._most:
            del self._latest[next(iter(self._latest))]

    def of(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yield twins of a node with the number of last tokens that they share, largest number first."""
        ending, before = self._ending(node), None
        for start in range(len(ending)):
            twin = self._latest.get(ending[start:])
            if twin is not None and twin is not before:
                before = twin
                yield twin, len(ending) - start

    def _ending(self, node: Node) -> tuple[int, ...]:
        if node.ending is None:
            before = self._before_root if node.parent is None else self._ending(node.parent)
            node.ending = (*before, node.token)[-_LONGEST_ENDING:]
        return node.ending


class DraftPredictions:
    """Distributions that drafts are chosen from; verification is exact whatever they are.

    The reader, a draft model or head, comes with its `DistributionMaker`; without a reader, only twins are used. With
    `model_only`, the reader is used for every text, whatever the target has predicted.
    """

    def __init__(
        self,
        target: TargetPredictions,
        prompt: Sequence[int],
        reader: TreeReader | None = None,
        distribution: DistributionMaker | None = None,
        *,
        packs: bool = False,
        model_only: bool = False,
    ) -> None:
        assert (reader is None) == (distribution is None)
        assert reader is not None or not model_only
        self._model_only = model_only
        self.twins = TwinIndex(prompt)
        self.trusted = 3
        """Twins that share at least this many last tokens replace the draft; others are averaged with it."""
        self._target, self._reader, self._distribution = target, reader, distribution
        if reader is not None and distribution is not None and packs:
            reader.tree.reading = packed_reading(distribution, reader.head)

    @property
    def name(self) -> str:
        """Name of the draft."""
        return "twins" if self._reader is None else self._reader.name

    def learn(self, nodes: Sequence[Node]) -> None:
        """Record nodes that the target has read, as twins."""
        if not self._model_only:
            self.twins.add(nodes)

    def after(self, nodes: Sequence[Node]) -> Continuations:
        """Return the target's distribution after each node that it has read, and a guess after the others.

        The target's distribution is known for beams inside the last round's forest. A guess is the target's distribution after
        a twin, the draft's distribution, or their mean.
        """
        if self._model_only:
            return self._guess(nodes)
        trusted: dict[int, Node] = {}
        hints: dict[int, Node] = {}
        for index, node in enumerate(nodes):
            twin, shared = self._best_twin(node)
            if twin is not None:
                (trusted if shared >= self.trusted else hints)[index] = twin
        rows = dict(zip(trusted, self._target.rows(trusted.values()), strict=True))
        guessed = [index for index in range(len(nodes)) if index not in trusted]
        if guessed:
            guess = self._guess([nodes[index] for index in guessed])
            if hints:
                guess = averaged(guess, self._target.after(list(hints.values())), [guessed.index(index) for index in hints])
            rows |= {index: (guess, row) for row, index in enumerate(guessed)}
        return joined([rows[index] for index in range(len(nodes))])

    def keep(self, leaves: Sequence[Node], below: Sequence[Node]) -> None:
        """Keep the texts that continue after a round; nodes `below` them are drafts under verification."""
        if self._reader is not None:
            self._reader.keep(leaves, below)

    def _guess(self, nodes: Sequence[Node]) -> Continuations:
        """Return the draft's own distribution after each node; empty without a draft."""
        if self._reader is None or self._distribution is None:
            return no_continuations(len(nodes), self._target.model.vocab_size)
        self._reader.read(nodes)
        packed_RX = self._reader.tree.readings(nodes)
        if packed_RX is None:
            return self._distribution(self._reader.logits(nodes), nodes)
        return self._distribution.unpacked(packed_RX, nodes, self._reader.logits)

    def _best_twin(self, node: Node) -> tuple[Node | None, int]:
        """Return the node's best twin, which may be itself, and how many last tokens the two share."""
        if node in self._target and self._target.knows(node):
            return node, self.trusted
        for twin, shared in self.twins.of(node):
            # Averaging full distributions would take longer than a hint is worth.
            useful = shared >= self.trusted or self._target.distribution.is_short
            if useful and self._target.knows(twin):
                return twin, shared
        return None, 0
