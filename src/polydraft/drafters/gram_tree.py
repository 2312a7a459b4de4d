"""Drafting from n-grams: continuations of the text's end, merged into one trie a row and verified by one draw a node.

Guarantee: candidates depend on the past only. At each node of the trie one token is drawn from the target's law, and the walk
goes on where it is one of the children: exact at every temperature, and no verifier accepts more of candidates that are
certain (docs/theory.md).
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.gram_growth import Limits, grow
from polydraft.drafters.gram_options import GramTreeOptions
from polydraft.drafters.riders import RiderOptions, Riders
from polydraft.drafters.trie import TokenTrie, as_draft_tree, rounded
from polydraft.errors import UsageError
from polydraft.models import LanguageModel
from polydraft.ngrams import GRAM_CACHES, GramCache, GramMemory, Match
from polydraft.sampling import RowParams
from polydraft.schemes import Naive, Scheme
from polydraft.trees import DraftTree
from polydraft.walks import AUTO, FlatBlocksWalk, NodeWalk, Verdict, Walk

GRAM_DRAFTERS: dict[str, tuple[str, ...]] = {
    "self-draft": ("context", "corpus"),
    "ngram": ("context",),
    "lookup": ("lookup",),
    "suffix": ("suffix",),
    "corpus": ("corpus",),
}
"""Drafters that need no draft model, with the caches they ask; `self-draft` also has riders."""


class GramTree(Drafter):
    """Propose what n-gram caches know.

    Parameters
    ----------
    name : str
        As the user wrote it.
    caches : sequence of GramCache
        Where chances are equal, the first ones go first.
    options : GramTreeOptions
        Its riders are taken as they are, even if nothing learns from them.
    """

    def __init__(self, name: str, caches: Sequence[GramCache], options: GramTreeOptions) -> None:
        self.name = name  # type: ignore[misc]  # of this drafter alone: it may be a combination
        self.caches, self.options = tuple(caches), options
        self.lossless = not options.flat_blocks  # type: ignore[misc]

    def start(self, params: RowParams, target: LanguageModel) -> "GramTreeSession":
        """Go to work on a batch."""
        return GramTreeSession(self, len(params), target)

    def resolve_walk(self, wish: str, scheme: Scheme) -> Walk:
        """Walk node by node; or as the paper words it, if that was asked for."""
        check_node_walk(self.name, wish)
        return FlatBlocksWalk(1 + self.options.most_nodes) if self.options.flat_blocks else NodeWalk()


def check_node_walk(name: str, wish: str) -> None:
    """Refuse walks over whole paths, whose acceptance is reckoned from the law that every child was drawn from."""
    if wish not in (AUTO, NodeWalk.name):
        raise UsageError(
            f"walk {wish!r} cannot verify n-grams, which drafter {name!r} proposes; allowed: auto, {NodeWalk.name}"
        )


class GramTreeSession(DraftSession):
    """Memories of one batch, one of each cache a row, on the host.

    Depth and random numbers of a round are the same whatever is proposed, so that a row's text does not depend on its
    neighbours; the number of nodes follows what is proposed, as a pass costs by its tokens.
    """

    scheme = Naive()
    """Tokens follow the target's own draw, whatever was proposed."""

    def __init__(self, drafter: GramTree, batch_size: int, target: LanguageModel) -> None:
        self._options, self._device = drafter.options, target.device
        self._sizes = drafter.options.on(target.device)
        sizes = self._sizes
        self._limits = Limits(
            nodes=sizes.nodes, depth=sizes.depth, width=self._options.candidates, least=sizes.least, steps=sizes.steps
        )
        self._riders = Riders(self._sizes.riders, target)
        self._names = [cache.name for cache in drafter.caches]
        self._memories = [[cache.open() for cache in drafter.caches] for _ in range(batch_size)]
        self._read: list[list[int]] = [[] for _ in range(batch_size)]
        """Text that each row's memories have read."""
        self._idle = [False] * batch_size
        self._tries: list[TokenTrie] = []
        self.depth = self._sizes.depth
        self.drafts_on_host = not self._sizes.riders.branches  # type: ignore[misc]  # branches are tensors that grow
        self.num_nodes = 1 + self._sizes.nodes + self._sizes.riders.most

    @property
    def num_uniforms(self) -> int:
        """Random numbers for the first tokens of branches."""
        return self._riders.num_uniforms

    def forget(self, rows: Sequence[int]) -> None:
        """Empty their memories."""
        for row in rows:
            self._forget(row)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Read the texts; memories of a row that its new text does not continue are emptied first."""
        for row in rows:
            text, read = texts[row], self._read[row]
            if list(text[: len(read)]) != read:
                self._forget(row)
            self._remember(row, text[len(self._read[row]) :])
            self._idle[row] = False
        self._riders.begin(texts, rows)

    def _forget(self, row: int) -> None:
        self._read[row] = []
        for memory in self._memories[row]:
            memory.reset()

    def _remember(self, row: int, tokens: Sequence[int]) -> None:
        self._read[row].extend(tokens)
        for memory in self._memories[row]:
            memory.read(tokens)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Merge what the memories know; let the branches ride along."""
        self._tries = [
            self._trie(memories, read[-1]) if not idle else TokenTrie(read[-1])
            for memories, read, idle in zip(self._memories, self._read, self._idle, strict=True)
        ]
        size = 1 + rounded(max(map(len, self._tries)) - 1, self._sizes.nodes, self._sizes.steps)
        tree = as_draft_tree(self._tries, size, self.depth, self._device)
        return self._riders.attach(tree, uniforms_BU)

    def _trie(self, memories: Sequence[GramMemory], root: int) -> TokenTrie:
        """Propose what is likeliest; by the paper's rule, chains that share nothing, those of the longest prefixes first."""
        if not self._options.flat_blocks:
            return grow(root, self._names, memories, self._limits)
        trie, found = TokenTrie(root, shared=False), list[tuple[Match, str]]()
        for name, memory in zip(self._names, memories, strict=True):
            found += [(match, name) for match in memory.matches(self._options.candidates, self.depth)]
        found.sort(key=lambda pair: -pair[0].prefix)  # stable: of equal prefixes the first cache's come first
        for match, name in found:
            trie.add(match.tokens, name, 1 + self._sizes.nodes)
        return trie

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Let the branches grow, and report them."""
        return self._riders.commit(features_BNF)

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Let the context caches learn from the branches."""
        for row, (memories, report, idle) in enumerate(zip(self._memories, reports, self._idle, strict=True)):
            if not idle:
                for gram in self._riders.grams(row, report, self._options.caches.gram):
                    for memory in memories:
                        memory.learn(gram)

    def sources(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the cache that proposed each token."""
        return self._tries[row].followed(tokens)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Read what was emitted; a row that got nothing has ended."""
        for row, tokens in enumerate(emitted):
            self._idle[row] = not tokens
            self._remember(row, tokens)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Take note of texts that were cut off: what was read of them is no beginning of what may come."""


def gram_tree(names: Sequence[str], options: GramTreeOptions) -> GramTree:
    """Make the drafter that asks the caches of all the named ones."""
    label = "+".join(names)
    branches = options.riders if "self-draft" in names and options.context else RiderOptions(branches=0)
    options = dataclasses.replace(options, riders=branches)
    dropped = {name for name, kept in (("context", options.context), ("corpus", options.corpus)) if not kept}
    wanted = dict.fromkeys(cache for name in names for cache in GRAM_DRAFTERS[name] if cache not in dropped)
    caches = [GRAM_CACHES.get(name)(options.caches) for name in wanted]
    if "corpus" in names and options.corpus and any(cache.name == "corpus" and cache.is_empty for cache in caches):
        raise UsageError(
            "drafter 'corpus' has no corpus cache for this tokenizer; make one with polydraft train corpus-cache, and name it "
            "by corpus=FILE"
        )
    caches = [cache for cache in caches if not cache.is_empty]
    if not caches:
        raise UsageError(f"drafter {label!r} has no cache left to draft from; leave out --no-context or --no-corpus")
    return GramTree(label, caches, options)


def _register(name: str) -> None:
    @DRAFTERS.register(name)
    def build(parts: Parts) -> GramTree:
        return gram_tree([name], parts.grams)


for _name in GRAM_DRAFTERS:
    _register(_name)
