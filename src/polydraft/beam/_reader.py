"""How drafts, models and feature heads, read a tree of beams."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from polydraft.beam._distribution import Indices
from polydraft.beam._node import Node
from polydraft.beam._slots import Inputs, SlotTree
from polydraft.beam._workspace import BEFORE, NOWHERE, BeamMemory
from polydraft.devices import can_sync
from polydraft.models import Head
from polydraft.models.heads.head_context import Entries
from polydraft.models.language_model import Observer
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block, causal_block


class TreeReader(ABC):
    """A draft at work on one request."""

    observer: Observer | None = None
    """Receives the target's features of the prompt without its last token; None if the draft needs none."""

    def __init__(self, memory: BeamMemory) -> None:
        self._draft, self.name = memory.model, memory.model.name
        self.vocabulary: PartialVocabulary | None = memory.model.vocabulary
        """The tokens of its logits' columns; None if the columns are all tokens."""
        self.tree = SlotTree(memory)
        """The nodes that the draft has read."""

    @abstractmethod
    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the prompt; `root` is its last token, and `target` has the features of nodes that the target has read."""

    def read(self, nodes: Sequence[Node]) -> None:
        """Read nodes and their missing ancestors."""
        self.tree.read(nodes)

    def head(self, features_RF: Tensor) -> Tensor:
        """Return the logits for features."""
        return self._draft.head(features_RF)

    def logits(self, nodes: Sequence[Node]) -> Tensor:
        """Return the logits after each node; read nodes first if needed."""
        self.read(nodes)
        return self.head(self.tree.features(nodes))

    def keep(self, leaves: Sequence[Node], below: Sequence[Node] = ()) -> None:
        """Keep the texts that continue after a round; nodes `below` them are drafts under verification."""
        self.tree.keep(leaves, below)


class ModelReader(TreeReader):
    """Reads with a draft model. Nodes that survive a round are not read again."""

    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the prompt, except its last token."""
        self.tree.context.prefill([prompt[:-1]])


class HeadReader(TreeReader):
    """Reads with a feature head, which uses the target's features; see `polydraft.draft.head_source` for its entries.

    A node's entry joins its token with the target's features of its parent. Inside a forest these are unknown, so the head's
    own outputs replace them. Such entries are guesses, and are read again once the target has read their parents.
    """

    def __init__(self, memory: BeamMemory) -> None:
        super().__init__(memory)
        assert isinstance(memory.model, Head) and isinstance(memory.context, Entries)
        self._head, self._context, self.observer = memory.model, memory.context, self._observe
        inputs = Inputs(self._feature_rows, lambda: self._target and self._target.bank.place)
        self.tree = SlotTree(memory, self._read, inputs)
        self._begun = False
        """Whether the prompt has tokens before the root."""
        self._root: Node | None = None
        self._target: SlotTree | None = None
        self._guesses: list[Node] = []
        self._observed: list[Tensor] = []

    def _observe(self, rows: slice, starts: Sequence[int], counts: Sequence[int], features_1TF: Tensor) -> None:
        """Keep a chunk's features until the whole prompt is known."""
        self._observed.append(features_1TF[:, : counts[0]])

    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the entries of the prompt, except that of its last token."""
        self._target, self._root, device = target, root, self._head.device
        if not self._observed:
            return
        self._begun = True
        target.bank.write(torch.tensor([BEFORE], device=device), self._observed[-1][0, -1:])
        following, position = list(prompt[1:-1]), 0
        for features_1TF in self._observed:
            tokens = following[position : position + features_1TF.shape[1]]
            if tokens:
                fused_1TH = self._head.fused(features_1TF[:, : len(tokens)])
                self._context.reserve(position + len(tokens))
                self._context.read(torch.tensor([tokens], device=device), fused_1TH, causal_block(1, len(tokens), device))
                position += len(tokens)
                self._context.rewind([position])
        self._observed = []

    def read(self, nodes: Sequence[Node]) -> None:
        """Read the entries of nodes and of their missing ancestors."""
        self._take_back()
        for level in self._levels(nodes):
            self.tree.read(level)

    def _take_back(self) -> None:
        """Forget the entry of a text's first token once the target has read it, because training has no such entry."""
        if self._root is not None and not self._begun and self._root in self._passed:
            self.tree.pretend(self._root)

    def _levels(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return nodes level by level, because a guess needs the head's output for its parent."""
        levels: dict[int, dict[Node, None]] = {}
        passed, read = self._passed, self.tree.bank.rows
        for leaf in nodes:
            node = leaf
            levels.setdefault(node.depth, {})[node] = None
            while node.parent is not None and node.parent not in passed and node.parent not in read:
                node = node.parent
                levels.setdefault(node.depth, {})[node] = None
        return [list(levels[depth]) for depth in sorted(levels)]

    @property
    def _passed(self) -> Mapping[Node, int]:
        """Nodes that the target has read, with the rows of their features; entries of their children are not guesses."""
        assert self._target is not None, "begin() comes first"
        return self._target.bank.rows

    def _read(self, tokens_1T: Tensor, block: Block, known_1T: Tensor, guessed_1T: Tensor) -> Tensor:
        return self._context.read(tokens_1T, self._joined(known_1T[0], guessed_1T[0])[None], block)

    def _feature_rows(self, nodes: Sequence[Node]) -> Indices:
        """Return the rows of the features that entries use, in the target's bank and in the head's own."""
        passed, read = self._passed, self.tree.bank.rows
        known, guessed = [NOWHERE] * len(nodes), [NOWHERE] * len(nodes)
        for index, node in enumerate(nodes):
            if node.parent is None:
                known[index] = BEFORE if self._begun else NOWHERE  # a prompt of one token has nothing before the root
            elif node.parent in passed:
                known[index] = passed[node.parent]
            else:
                guessed[index] = read[node.parent]
                self._guesses.append(node)
        return np.array([known, guessed])

    def _joined(self, known_T: Tensor, guessed_T: Tensor) -> Tensor:
        """Return the features `[T, H]` in rows of the two banks, with zeros for rows that are `NOWHERE`."""
        assert self._target is not None, "begin() comes first"
        head, (own_NH, theirs_NF) = self._head, (self.tree.bank.values_NF, self._target.bank.values_NF)
        joined_TH = torch.zeros(len(known_T), head.hidden_size, dtype=head.dtype, device=head.device)
        if can_sync(joined_TH) and not self.tree.captures:
            # Compute only the rows that are needed.
            for rows_T, bank, ready in ((guessed_T, own_NH, lambda own_RH: own_RH), (known_T, theirs_NF, head.fused)):
                here_T = rows_T >= 0
                if bank is not None and here_T.any():
                    joined_TH[here_T] = ready(bank[rows_T[here_T]]).to(head.dtype)
            return joined_TH
        if own_NH is not None:
            joined_TH = torch.where(guessed_T[:, None] >= 0, own_NH[guessed_T.clamp(min=0)], joined_TH)
        if theirs_NF is not None:
            fused_TH = head.fused(theirs_NF[known_T.clamp(min=0)]).to(head.dtype)
            joined_TH = torch.where(known_T[:, None] >= 0, fused_TH, joined_TH)
        return joined_TH

    def keep(self, leaves: Sequence[Node], below: Sequence[Node] = ()) -> None:
        """Forget dead nodes, and all guesses, so that they are read again with the target's features."""
        self._take_back()
        self.tree.forget(self._guesses)
        self._guesses = []
        self.tree.keep(leaves)


def tree_reader(memory: BeamMemory) -> TreeReader:
    """Return the reader for the draft whose memory this is."""
    return HeadReader(memory) if isinstance(memory.model, Head) else ModelReader(memory)
