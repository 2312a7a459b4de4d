"""Tries of what n-gram memories propose, one per row, with as many candidates as pay."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polydraft.draft.builder import Builder
from polydraft.draft.gram_options import GramTreeOptions, Sizes
from polydraft.draft.gram_source import GramRow, GramSource
from polydraft.draft.policy import RowPolicy
from polydraft.draft.trie import Limits, TokenTrie, as_draft_tree, check_node_walk, grow
from polydraft.ngrams import GramMemory
from polydraft.ngrams.prediction import PREDICTION
from polydraft.registry import Registry
from polydraft.sampling import RowParams
from polydraft.trees import DraftTree
from polydraft.verify import Naive, NodeWalk, Walk

_SUFFICES = 4.0
"""A round skips the draft for rows whose prediction promises this many tokens."""
_WAKES, _WAKES_BESIDE_DRAFT = 0.5, 3.0
"""Tokens that a prediction must promise for rounds to wait for it: alone, and beside a draft that brings some as well."""
NOTHING_FOUND = "n-grams had nothing to propose that would pay"


class TrieBuilder(Builder):
    """Merge what the memories of each row propose.

    Depth and random numbers of a round do not depend on what is proposed, so that a row's text does not depend on other rows;
    the number of nodes does, because a pass costs by its tokens.

    A round that needs the host's trie cannot be launched ahead. So rows that have only a prediction sleep while it promises too
    little. This is judged by the text of one round earlier, whether or not the round is launched ahead.
    """

    elastic = True
    on_host = True
    scheme = Naive()
    """The emitted token is the target's own draw, whatever was proposed."""

    def __init__(
        self,
        source: GramSource,
        sizes: Sizes,
        options: GramTreeOptions,
        device: torch.device,
        name: str,
        policy: RowPolicy | None = None,
    ) -> None:
        self.source: GramSource = source
        self._options, self._device, self._name = options, device, name
        # A policy knows what each candidate costs, so rounds are not filled up.
        self._limits: Limits = sizes if policy is None else replace(sizes, ladder=None)
        self._tries: list[TokenTrie] = []
        self.policy = policy
        self._sleeps = policy is None and all(name == PREDICTION for name in source.names)
        self.depth, self.num_nodes = sizes.depth, 1 + sizes.nodes + sizes.riders.most

    @property
    def kind(self) -> Hashable:
        """The riders' kind, and whether there is no trie."""
        return self.source.riders.kind, self.asleep

    def wake(self, *, ahead: bool) -> None:
        """Wake the rows whose memories promised enough."""
        if self._sleeps:
            for row in self.source.rows:
                row.awake = row.promised[ahead] and not row.idle
            self.asleep = not any(row.awake for row in self.source.rows)

    @property
    def num_uniforms(self) -> int:
        """The riders' random numbers."""
        return self.source.riders.num_uniforms

    @property
    def suffices(self) -> Sequence[bool] | None:
        """Rows whose prediction promises so much that they need no draft."""
        if PREDICTION not in self.source.names:
            return None
        pairs = (zip(trie.sources, trie.chances, strict=True) for trie in self._tries)
        return [sum(chance for source, chance in one if source == PREDICTION) >= _SUFFICES for one in pairs]

    @property
    def rest_reason(self) -> str:
        """The policy's reason if rows rest; else that the caches found nothing."""
        policy = self.policy if any(row.resting for row in self.source.rows) else None
        return NOTHING_FOUND if policy is None else policy.rest_reason

    def resolve_walk(self, name: str) -> Walk:
        """Return the node walk, the only one that can verify n-grams."""
        check_node_walk(self._name, name)
        return NodeWalk()

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Merge what the memories propose."""
        rows, riders = self.source.rows, self.source.riders
        if self.policy is not None:
            for row, drafts in zip(rows, self.policy.drafting, strict=True):
                row.resting = not drafts
            if riders.num_uniforms:
                riders.resting_B = torch.tensor([row.resting for row in rows], device=self._device)
        self._tries = [self._proposed(row) for row in rows]
        if self.policy is not None:
            self._keep_what_pays(self.policy)
        most = max(map(len, self._tries))
        ladder = self._limits.ladder
        if most == 1 and ladder is None:
            return DraftTree.bare(tail_B2[:, 1], self.depth)
        size = most if ladder is None else ladder.holding(most).nodes
        return as_draft_tree(self._tries, size, self.depth, self._device)

    def _proposed(self, row: GramRow) -> TokenTrie:
        """Return what a row's memories propose in this round: a lone root if the row does not draft."""
        if row.idle or row.resting or not row.awake:
            return TokenTrie(row.read[-1] if row.read else 0)
        return row.next or self.trie(row.memories, row.read[-1])

    def _keep_what_pays(self, policy: RowPolicy) -> None:
        """Cut the tries to the candidates that pay, and tell the policy what they promise."""
        most = max(map(len, self._tries)) - 1
        counts = [0] * len(self._tries)
        if most:
            chances_BM = torch.tensor([trie.chances[1:] + [0.0] * (most - len(trie) + 1) for trie in self._tries]).double()
            counts = policy.counts(chances_BM).tolist()
        for trie, count in zip(self._tries, counts, strict=True):
            trie.cut(count)
        # A row without candidates decodes plainly, unless its branches ride along.
        rides = self.source.riders.num_uniforms > 0
        pairs = zip(self.source.rows, counts, strict=True)
        drafts = [int(not row.resting and (count > 0 or rides)) for row, count in pairs]
        policy.plan([sum(trie.chances[1:]) for trie in self._tries], counts, drafts)

    def took(self, counts: Sequence[int]) -> None:
        """Tell the policy how many candidates were accepted."""
        if self.policy is not None:
            self.policy.learn(counts, [not row.idle for row in self.source.rows])

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows."""
        super().begin(texts, rows, params)
        for row in rows:
            for memory in self.source.rows[row].memories:
                memory.expect(params.rows[row])
        self.source.riders.begin(texts, rows, params)

    def use(self, params: RowParams) -> None:
        """Pass the rows' parameters on to the riders."""
        self.source.riders.use(params)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Pass new tokens on to the riders; if rows may sleep, grow the next tries, and note what they promise."""
        self.source.riders.advance(emitted)
        if self._sleeps:
            enough = _WAKES_BESIDE_DRAFT if self.beside_draft else _WAKES
            for row in self.source.rows:
                row.next = None if row.idle else self.trie(row.memories, row.read[-1])
                row.promised = row.promised[1], row.next is not None and sum(row.next.chances[1:]) >= enough

    def attached(self, tree: DraftTree, uniforms_BU: Tensor) -> DraftTree:
        """Add the riders."""
        return self.source.riders.attach(tree, uniforms_BU)

    def trie(self, memories: Sequence[GramMemory], root: int) -> TokenTrie:
        """Grow a trie of the likeliest candidates."""
        return grow(root, self.source.names, memories, self._limits)

    def credits(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the cache that proposed each token."""
        return self._tries[row].followed(tokens)


LOSSY_TRIES: Registry[type[TrieBuilder]] = Registry("lossy trie")
"""Tries whose verification changes the distribution of the text; `polydraft.papers` registers them."""
