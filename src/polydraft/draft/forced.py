"""Tokens that a grammar leaves no choice about, beside a draft's tree: levels that cost no draft pass.

Guarantee: candidates depend on the past and on the grammar only, so they are verified as n-grams are: at each node one token is
drawn from the target's masked distribution, and the walk goes on where it is one of the children. Where the mask leaves one
token, that is certain; where several tokens spell the same forced text, it is as likely as the target makes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.draft.builder import Builder
from polydraft.draft.drafter import Drafter
from polydraft.draft.session import DraftSession
from polydraft.draft.source import Source
from polydraft.draft.tree_drafter import TreeDrafter
from polydraft.draft.trie import TokenTrie, as_draft_tree, trie_ladder
from polydraft.models import LanguageModel
from polydraft.sampling import RowParams
from polydraft.sampling.grammar import GrammarProcessor
from polydraft.sampling.processing import grammars_of
from polydraft.trees import DraftTree
from polydraft.verify import Naive, NodeWalk, Walk

NAME = "grammar"
_DEPTH = 16
_LADDER = trie_ladder(_DEPTH)


def with_forced(drafter: Drafter) -> Drafter:
    """Let a drafter propose what grammars force as well; one that draws no tree stays as it is."""
    return Forced(drafter) if isinstance(drafter, TreeDrafter) else drafter


class Forced(Drafter):
    """A drawn tree, and what the rows' grammars force.

    Parameters
    ----------
    tree : TreeDrafter
    """

    def __init__(self, tree: TreeDrafter) -> None:
        self.tree, self.name, self.lossless = tree, f"{NAME}+{tree.name}", tree.lossless
        self.model, self.topology, self.by_load = tree.model, tree.topology, tree.by_load

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Go to work on a batch."""
        certain = ForcedBuilder(len(params), target.device)
        return DraftSession(self.tree.name, drawn=self.tree.builder(params, target), certain=certain)


class _NoMemory(Source):
    """Texts are all there is to know."""

    @property
    def obstacle(self) -> str | None:
        return "grammars are followed on the host"


class ForcedBuilder(Builder):
    """Chains of what grammars force, one per row.

    Parameters
    ----------
    batch_size : int
    device : torch.device
    """

    ROW_STATE = ("_texts", "_grammars")
    FORGETS = True
    elastic = True
    scheme = Naive()
    """Tokens follow the target's own draw, whatever was proposed."""
    num_uniforms = 0

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.source: Source = _NoMemory()
        self.depth, self.num_nodes, self._device = _DEPTH, 1 + _DEPTH, device
        self._texts: list[list[int]] = [[] for _ in range(batch_size)]
        self._grammars: list[GrammarProcessor | None] = [None] * batch_size
        self._tries: list[TokenTrie] = []

    def resolve_walk(self, wish: str) -> Walk:
        """Walk node by node: walks over whole paths need the distribution that every child was drawn from."""
        return NodeWalk()

    def new_row(self, name: str) -> list[int] | None:
        """Begin with no text and no grammar."""
        return [] if name == "_texts" else None

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Take note of the texts of new rows, and of their grammars."""
        for row in rows:
            self._texts[row] = list(texts[row])
        self._grammars = [next(grammars_of(own), None) for own in params]

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts."""
        for text, tokens in zip(self._texts, emitted, strict=True):
            text.extend(tokens)

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Hang each row's chain below its pending token."""
        self._tries = []
        for text, grammar in zip(self._texts, self._grammars, strict=True):
            trie = TokenTrie(text[-1])
            trie.add([] if grammar is None else grammar.forced(text, _DEPTH), NAME, self.num_nodes)
            self._tries.append(trie)
        size = _LADDER.holding(max(map(len, self._tries))).nodes
        return as_draft_tree(self._tries, size, self.depth, self._device)

    def credits(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the grammar."""
        return self._tries[row].followed(tokens)
