"""Drafting from n-grams: continuations of the text's end, merged into one trie per row and verified by one draw per node.

Guarantee: candidates depend on the past only. At each node of the trie one token is drawn from the target's distribution, and
the walk goes on where it is one of the children: exact at every temperature, and no verifier accepts more of candidates that
are certain (docs/theory.md).
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.draft.builder import Builder
from polydraft.draft.costs import GRAMS, measured_costs
from polydraft.draft.device_trie import DeviceTrieBuilder, on_device
from polydraft.draft.drafter import DRAFTERS, Drafter, Parts
from polydraft.draft.gram_options import GramTreeOptions, RiderOptions, Sizes
from polydraft.draft.policy import FAIR, Belief, RowPolicy
from polydraft.draft.session import DraftSession
from polydraft.draft.source import Source
from polydraft.draft.speedup import Costs
from polydraft.draft.trie import Limits, TokenTrie, as_draft_tree, check_node_walk, grow
from polydraft.errors import UsageError
from polydraft.models import LanguageModel
from polydraft.ngrams import GRAM_CACHES, GramCache, GramMemory
from polydraft.ngrams.prediction import PREDICTION
from polydraft.registry import Registry
from polydraft.rows import ByRow
from polydraft.sampling import RowParams
from polydraft.trees import DraftTree
from polydraft.verify import Naive, NodeWalk, Verdict, Walk

GRAM_DRAFTERS: dict[str, tuple[str, ...]] = {
    "self-draft": ("context", "corpus"),
    "ngram": ("context",),
    "lookup": ("lookup",),
    "suffix": ("suffix",),
    "corpus": ("corpus",),
}
"""Drafters that need no draft model, with the caches they use; `self-draft` also has riders (`RIDERS`)."""
_SUFFICES = 4.0
"""A round skips the draft for rows whose prediction promises this many tokens."""
_WAKES, _WAKES_BESIDE_DRAFT = 0.5, 3.0
"""Tokens that a prediction must promise for rounds to wait for it, alone and beside a draft that gets some by itself."""
NOTHING_FOUND = "n-grams had nothing to propose that would pay"


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
    pauses : bool
        On a CPU, propose no more than pays, and nothing while proposals do not pay.
    costs : Costs, optional
        What passes cost, for that; measured when first needed, and kept for this machine, if not given.
    belief : Belief
        Of the caches, before the first round.
    added : bool
        Whether they were added for one request: a walk that cannot verify them is then replaced, not refused.
    """

    def __init__(
        self,
        name: str,
        caches: Sequence[GramCache],
        options: GramTreeOptions,
        *,
        pauses: bool = False,
        costs: Costs | None = None,
        belief: Belief = FAIR,
        added: bool = False,
    ) -> None:
        self.name, self.lossless, self.added = name, not options.flat_blocks, added
        self.caches, self.options, self.costs = tuple(caches), options, costs
        self.pauses, self.belief = pauses and self.lossless, belief
        self.predicts = any(cache.name == PREDICTION for cache in self.caches)

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Open a session for a batch."""
        return DraftSession(self.name, certain=self.builder(len(params), target, self.name))

    def builder(self, batch_size: int, target: LanguageModel, name: str) -> Builder:
        """Return what builds the tries of a batch, for a drafter of some name."""
        name = "" if self.added else name
        sizes = self.options.on(target.device)
        if self.lossless and on_device(self.caches, sizes, target.device):
            return DeviceTrieBuilder(self.caches, sizes, batch_size, target.device, name)
        policy = None
        if self.pauses and is_host(target.device):
            policy = self._pacing(sizes, batch_size, target)
            if sizes.riders.branches and policy.hopeless:  # branches cannot pay for themselves here
                sizes = dataclasses.replace(sizes, riders=RiderOptions(branches=0))
                policy = self._pacing(sizes, batch_size, target)
        kind = "drawn-branches" if sizes.riders.drawn else "branches"
        riders = RIDERS.get(kind)(sizes.riders, target, batch_size) if sizes.riders.branches else Riders()
        source = GramSource(self.caches, riders, self.options.caches.gram, batch_size)
        make = TrieBuilder if self.lossless else LOSSY_TRIES.get("flat-blocks")
        return make(source, sizes, self.options, target.device, name, policy)

    def _pacing(self, sizes: Sizes, batch_size: int, target: LanguageModel) -> RowPolicy:
        """Return the policy that says how many candidates pay. Branches ride along in every pass: their cost is overhead."""
        most, riders = 1 + sizes.nodes, sizes.riders.most
        costs = self.costs or measured_costs(target, None, most, GRAMS)
        overhead = costs.overhead + costs.tree_pass(1 + riders) - costs.tree_pass(1)
        return RowPolicy(dataclasses.replace(costs, overhead=overhead), batch_size, most, belief=self.belief)


class Riders(ByRow):
    """Riders of the target's passes, nodes that no walk reaches and that teach the caches; this base class has none."""

    resting_B: Tensor | None = None
    """Rows that rest in this round, on a CPU; where all do, nothing rides along."""

    @property
    def kind(self) -> Hashable:
        """What captures depend on."""
        return ()

    @property
    def num_uniforms(self) -> int:
        """Random numbers per row and round."""
        return 0

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Begin anew in some rows."""

    def admit(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Take the new parameters of all rows, and new texts in some of them."""

    def use(self, params: RowParams) -> None:
        """Take the rows' new parameters: the number of rows has changed."""

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts."""

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add riders to a pass."""
        return tree

    def commit(self, features_BNF: Tensor) -> Tensor | None:
        """Read the target's tokens after the riders; return a report for `grams`, or None."""
        return None

    def grams(self, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Read n-grams of `gram` tokens, and the one after them, off a row of what `commit` returned."""
        return iter(())


RIDERS: Registry[Callable[[RiderOptions, LanguageModel, int], Riders]] = Registry("rider")
"""Riders of a batch, from their options, the target and the number of rows; `polydraft.papers` registers them."""


_NEW_ROW: dict[str, Callable[[], object]] = {
    "read": list,
    "idle": bool,
    "resting": bool,
    "promised": lambda: (False, False),
    "awake": lambda: True,
}


class GramSource(Source):
    """Memories of one batch, one of each cache per row, on the host, and the riders that teach them."""

    ROW_STATE = ("memories", "read", "idle", "resting", "promised", "awake")
    FORGETS = True
    learns = True

    def __init__(self, caches: Sequence[GramCache], riders: Riders, gram: int, batch_size: int) -> None:
        self.names, self.riders, self._gram = [cache.name for cache in caches], riders, gram
        self._caches = caches
        self.memories = [self._opened() for _ in range(batch_size)]
        self.read: list[list[int]] = [[] for _ in range(batch_size)]
        """Text that each row's memories have read."""
        self.idle = [False] * batch_size
        self.resting = [False] * batch_size
        """Rows that draft nothing in this round, because it would not pay."""
        self.promised = [(False, False)] * batch_size
        """Whether each row's memories promised enough one round before its last one, and after its last one."""
        self.awake = [True] * batch_size
        """Rows whose memories are asked in this round."""

    def row_parts(self) -> Iterable[ByRow]:
        """Return the branches."""
        return (self.riders,)

    def new_row(self, name: str) -> object:
        """Begin with empty memories."""
        return self._opened() if name == "memories" else _NEW_ROW[name]()

    def _opened(self) -> list[GramMemory]:
        return [cache.open() for cache in self._caches]

    def forget(self, rows: Sequence[int]) -> None:
        """Empty their memories."""
        for row in rows:
            self._forget(row)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Read the texts; memories of a row that its new text does not continue are emptied first."""
        for row in rows:
            text, read = texts[row], self.read[row]
            if list(text[: len(read)]) != read:
                self._forget(row)
            self._remember(row, text[len(self.read[row]) :])
            self.idle[row], self.promised[row] = False, (True, True)
        self.riders.begin(texts, rows)

    def _forget(self, row: int) -> None:
        self.read[row] = []
        for memory in self.memories[row]:
            memory.reset()

    def _remember(self, row: int, tokens: Sequence[int]) -> None:
        self.read[row].extend(tokens)
        for memory in self.memories[row]:
            memory.read(tokens)

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Let the riders report what they saw."""
        return self.riders.commit(features_BNF)

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Let the context caches learn from the riders."""
        for memories, report, idle, resting in zip(self.memories, reports, self.idle, self.resting, strict=True):
            if not idle and not resting:
                for gram in self.riders.grams(report, self._gram):
                    for memory in memories:
                        memory.learn(gram)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Read what was emitted; a row that got nothing has ended."""
        for row, tokens in enumerate(emitted):
            self.idle[row] = not tokens
            self._remember(row, tokens)


class TrieBuilder(Builder):
    """Merge what the memories of each row propose.

    Depth and random numbers of a round are the same whatever is proposed, so that a row's text does not depend on its
    neighbours; the number of nodes follows what is proposed, as a pass costs by its tokens.

    A round that needs the host's trie cannot be launched ahead. So a row that has nothing but a prediction sleeps while that
    promises too little. This is judged by the text of one round earlier, whether or not the round is launched ahead.
    """

    elastic = True
    on_host = True
    scheme = Naive()
    """Tokens follow the target's own draw, whatever was proposed."""

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
        # A policy knows what each candidate costs: then there is no filling up.
        self._ladder = sizes.ladder if policy is None else None
        self._limits = Limits(
            nodes=sizes.nodes, depth=sizes.depth, width=options.candidates, least=sizes.least, ladder=self._ladder
        )
        self._tries: list[TokenTrie] = []
        self.policy = policy
        self._sleeps = policy is None and all(name == PREDICTION for name in source.names)
        self.depth, self.num_nodes = sizes.depth, 1 + sizes.nodes + sizes.riders.most

    @property
    def kind(self) -> Hashable:
        """What the riders' captures depend on, and whether there is a trie."""
        return self.source.riders.kind, self.asleep

    def wake(self, *, ahead: bool) -> None:
        """Say which rows' memories promised enough."""
        if self._sleeps:
            rows = zip(self.source.promised, self.source.idle, strict=True)
            self.source.awake = [promised[ahead] and not idle for promised, idle in rows]
            self.asleep = not any(self.source.awake)

    @property
    def num_uniforms(self) -> int:
        """Those of the riders."""
        return self.source.riders.num_uniforms

    @property
    def suffices(self) -> Sequence[bool] | None:
        """Rows whose prediction promises more than drafts bring."""
        if PREDICTION not in self.source.names:
            return None
        pairs = (zip(trie.sources, trie.chances, strict=True) for trie in self._tries)
        return [sum(chance for source, chance in one if source == PREDICTION) >= _SUFFICES for one in pairs]

    @property
    def rest_reason(self) -> str:
        """The policy's reason if rows rest; otherwise the caches found nothing."""
        policy = self.policy if any(self.source.resting) else None
        return NOTHING_FOUND if policy is None else policy.rest_reason

    def resolve_walk(self, name: str) -> Walk:
        """Walk node by node."""
        check_node_walk(self._name, name)
        return NodeWalk()

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Merge what the memories know."""
        source = self.source
        if self.policy is not None:
            source.resting = [not drafts for drafts in self.policy.drafting]
            if source.riders.num_uniforms:
                source.riders.resting_B = torch.tensor(source.resting, device=self._device)
        self._tries = [
            self.trie(memories, read[-1]) if awake and not idle and not resting else TokenTrie(read[-1])
            for awake, memories, read, idle, resting in zip(
                source.awake, source.memories, source.read, source.idle, source.resting, strict=True
            )
        ]
        if self.policy is not None:
            self._keep_what_pays(self.policy)
        most = max(map(len, self._tries))
        if most == 1 and self._ladder is None:
            return DraftTree.bare(tail_B2[:, 1], self.depth)
        size = most if self._ladder is None else self._ladder.holding(most).nodes
        return as_draft_tree(self._tries, size, self.depth, self._device)

    def _keep_what_pays(self, policy: RowPolicy) -> None:
        """Cut the tries to as many candidates as pay, and tell the policy what they promise."""
        most = max(map(len, self._tries)) - 1
        counts = [0] * len(self._tries)
        if most:
            chances_BM = torch.tensor([trie.chances[1:] + [0.0] * (most - len(trie) + 1) for trie in self._tries]).double()
            counts = policy.counts(chances_BM).tolist()
        for trie, count in zip(self._tries, counts, strict=True):
            trie.cut(count)
        # A row without candidates decodes plainly, unless its branches ride along.
        rides = self.source.riders.num_uniforms > 0
        drafts = [int(not resting and (count > 0 or rides)) for resting, count in zip(self.source.resting, counts, strict=True)]
        policy.plan([sum(trie.chances[1:]) for trie in self._tries], counts, drafts)

    def took(self, counts: Sequence[int]) -> None:
        """Let the policy compare the round with its plan."""
        if self.policy is not None:
            self.policy.learn(counts, [not idle for idle in self.source.idle])

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows."""
        super().begin(texts, rows, params)
        for row in rows:
            for memory in self.source.memories[row]:
                memory.expect(params.rows[row])
        self.source.riders.admit(texts, rows, params)

    def use(self, params: RowParams) -> None:
        """Pass new parameters on to the riders."""
        self.source.riders.use(params)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Let the riders know the text, and see what it makes memories promise."""
        self.source.riders.advance(emitted)
        if self._sleeps:
            enough, source = _WAKES_BESIDE_DRAFT if self.beside_draft else _WAKES, self.source
            for row, (_, last) in enumerate(source.promised):
                trie = TokenTrie(0) if source.idle[row] else self.trie(source.memories[row], source.read[row][-1])
                source.promised[row] = last, sum(trie.chances[1:]) >= enough

    def attached(self, tree: DraftTree, uniforms_BU: Tensor) -> DraftTree:
        """Let the riders ride along."""
        return self.source.riders.attach(tree, uniforms_BU)

    def trie(self, memories: Sequence[GramMemory], root: int) -> TokenTrie:
        """Propose what is likeliest."""
        return grow(root, self.source.names, memories, self._limits)

    def credits(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the cache that proposed each token."""
        return self._tries[row].followed(tokens)


LOSSY_TRIES: Registry[type[TrieBuilder]] = Registry("lossy trie")
"""Tries whose verification changes the distribution of the text; `polydraft.papers` registers them."""


def gram_tree(names: Sequence[str], options: GramTreeOptions, *, pauses: bool = False) -> GramTree:
    """Make the drafter that asks the caches of all the named ones."""
    label = "+".join(names)
    branches = options.riders if "self-draft" in names and options.context else RiderOptions(branches=0)
    options = dataclasses.replace(options, riders=branches)
    dropped = {name for name, kept in (("context", options.context), ("corpus", options.corpus)) if not kept}
    wanted = dict.fromkeys(cache for name in names for cache in GRAM_DRAFTERS[name] if cache not in dropped)
    caches = [GRAM_CACHES.get(name)(options.caches) for name in wanted]
    if "corpus" in names and options.corpus and any(cache.name == "corpus" and cache.is_empty for cache in caches):
        raise UsageError(
            "drafter 'corpus' has no corpus cache for this tokenizer; make one with polydraft train corpus-cache, and pass it "
            "with --corpus FILE"
        )
    caches = [cache for cache in caches if not cache.is_empty]
    if not caches:
        raise UsageError(f"drafter {label!r} has no cache left to draft from; leave out context=no or corpus=no")
    return GramTree(label, caches, options, pauses=pauses)


def _register(name: str) -> None:
    @DRAFTERS.register(name)
    def build(parts: Parts) -> GramTree:
        return gram_tree([name], parts.grams, pauses=parts.pauses and not parts.grams.sized)


for _name in GRAM_DRAFTERS:
    _register(_name)
