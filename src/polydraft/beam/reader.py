"""Drafts that read a tree of beams: what each says of the token after a node."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.beam.node import Node
from polydraft.beam.slots import SlotTree
from polydraft.beam.workspace import BeamMemory
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.feature_head import HeadContext
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block, causal_block


class TreeReader(ABC):
    """A draft at work on one request."""

    name: str
    vocabulary: PartialVocabulary | None
    """What the columns of its logits mean, where they are not all tokens."""

    reads_features: ClassVar[bool] = False
    """Whether it wants to see the target's features of the prompt, through `observe`."""

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_1TF: Tensor) -> None:
        """See the target's features of the prompt, part by part, all but its last token's."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the prompt; `root` is its last token, `target` holds the target's features of nodes that it has passed."""

    @abstractmethod
    def logits(self, nodes: Sequence[Node]) -> Tensor:
        """Return the logits of what follows each node."""

    @abstractmethod
    def keep(self, leaves: Sequence[Node]) -> None:
        """Take note, after a round, of which texts go on."""


class ModelReader(TreeReader):
    """A draft model; nodes that survive a round are not read again."""

    def __init__(self, model: LanguageModel, memory: BeamMemory | None = None) -> None:
        self.name, self.vocabulary, self._model = model.name, model.vocabulary, model
        self._memory = memory or BeamMemory(model, graphs=False)
        self._tree: SlotTree | None = None

    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the prompt with the draft."""
        self._memory.context.prefill([prompt[:-1]])
        self._tree = SlotTree(self._memory.context, recorder=self._memory.recorder)

    def logits(self, nodes: Sequence[Node]) -> Tensor:
        """Pass the nodes, and what the draft has not seen above them."""
        assert self._tree is not None, "begin() comes first"
        self._tree.read(nodes)
        return self._model.head(self._tree.features(nodes))

    def keep(self, leaves: Sequence[Node]) -> None:
        """Let dead nodes go."""
        assert self._tree is not None, "begin() comes first"
        self._tree.keep(leaves)


class HeadReader(TreeReader):
    """A feature head, which reads the target's features; see `polydraft.drafters.head_tree` for what an entry is.

    A node's entry joins its token with the target's features of its parent. Inside a forest these are not known yet and the
    head's own outputs take their place; such entries are guesses, and read again once the target has passed their parents.
    """

    reads_features = True

    def __init__(self, head: FeatureHead, memory: BeamMemory | None = None) -> None:
        self.name, self.vocabulary, self._head = head.name, head.vocabulary, head
        memory = memory or BeamMemory(head, graphs=False)
        assert isinstance(memory.context, HeadContext)
        self._context = memory.context
        self._tree = SlotTree(self._context, self._read, self._fused_inputs, memory.recorder)
        self._prompt: Sequence[int] = ()
        self._before_root_F: Tensor | None = None
        self._target: SlotTree | None = None
        self._guesses: list[Node] = []
        self._observed: list[Tensor] = []

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_1TF: Tensor) -> None:
        """Keep the features until the prompt is known in whole."""
        self._observed.append(features_1TF[:, : counts[0]])

    def begin(self, prompt: Sequence[int], root: Node, target: SlotTree) -> None:
        """Read the entries of the prompt, all but that of its last token."""
        self._target, device = target, self._head.device
        if not self._observed:
            return
        self._before_root_F = self._observed[-1][0, -1].clone()
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

    def logits(self, nodes: Sequence[Node]) -> Tensor:
        """Pass the nodes' entries, and what is missing above them."""
        for level in self._levels(nodes):
            self._tree.read(level)
        return self._head.head(self._tree.features(nodes))

    def _levels(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return the nodes that need passes one after another: a guess needs the head's own output for its parent first."""
        levels: dict[int, dict[Node, None]] = {}
        for leaf in nodes:
            node = leaf
            levels.setdefault(node.depth, {})[node] = None
            while node.parent is not None and not self._is_known(node) and node.parent not in self._tree:
                node = node.parent
                levels.setdefault(node.depth, {})[node] = None
        return [list(levels[depth]) for depth in sorted(levels)]

    def _read(self, tokens_1T: Tensor, block: Block, fused_1TH: Tensor) -> Tensor:
        return self._context.read(tokens_1T, fused_1TH, block)

    def _fused_inputs(self, nodes: Sequence[Node], size: int) -> tuple[Tensor]:
        """Return the features that entries join with their tokens."""
        fused_TH = torch.zeros(size, self._head.shape.hidden_size, dtype=self._head.dtype, device=self._head.device)
        known: list[int] = []
        guessed: list[int] = []
        for index, node in enumerate(nodes):
            (known if self._is_known(node) else guessed).append(index)
        if known:
            fused_TH[known] = self._fused([nodes[index] for index in known])
        if guessed:
            guesses = [nodes[index] for index in guessed]
            fused_TH[guessed] = self._tree.features([node.parent for node in guesses if node.parent is not None])
            self._guesses += guesses
        return (fused_TH[None],)

    def _is_known(self, node: Node) -> bool:
        assert self._target is not None, "begin() comes first"
        return node.parent is None or node.parent in self._target

    def _fused(self, nodes: Sequence[Node]) -> Tensor:
        """Return the target's features of the nodes' parents, ready for the head."""
        assert self._target is not None, "begin() comes first"
        if nodes[0].parent is None:  # the root comes first, and in a first round alone
            if self._before_root_F is None:  # a text of one token: nothing precedes its entry
                return torch.zeros(1, self._head.shape.hidden_size, dtype=self._head.dtype, device=self._head.device)
            return self._head.fused(self._before_root_F[None])
        return self._head.fused(self._target.features([node.parent for node in nodes if node.parent is not None]))

    def keep(self, leaves: Sequence[Node]) -> None:
        """Let dead nodes and guesses go."""
        self._tree.forget(self._guesses)
        self._guesses = []
        if self._before_root_F is None:
            root = leaves[0].path()[0].parent if leaves and leaves[0].depth else None
            if root is not None:
                self._tree.pretend(root)
        self._tree.keep(leaves)


def tree_reader(draft: LanguageModel | FeatureHead, memory: BeamMemory | None = None) -> TreeReader:
    """Return the reader that a draft calls for; with a memory of that draft's it reads into that one."""
    return HeadReader(draft, memory) if isinstance(draft, FeatureHead) else ModelReader(draft, memory)
