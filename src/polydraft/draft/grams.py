"""Drafting from n-grams: continuations of the text, merged into one trie per row and verified by one draw per node.

Guarantee: candidates depend only on the past. At each node of the trie one token is drawn from the target's distribution, and
the walk goes on if it is one of the children. That is exact at every temperature, and no verifier accepts more of such
candidates (docs/theory.md).
"""

import dataclasses
from collections.abc import Sequence

from polydraft.devices import is_host
from polydraft.draft.builder import Builder
from polydraft.draft.costs import measured_costs
from polydraft.draft.device_trie import DeviceTrieBuilder, on_device
from polydraft.draft.drafter import DRAFTERS, Drafter, Parts
from polydraft.draft.gram_options import GramTreeOptions, RiderOptions, Sizes
from polydraft.draft.gram_source import RIDERS, GramSource, Riders
from polydraft.draft.policy import FAIR, Belief, RowPolicy
from polydraft.draft.session import DraftSession
from polydraft.draft.speedup import Costs
from polydraft.draft.trie_builder import LOSSY_TRIES, TrieBuilder
from polydraft.errors import UsageError
from polydraft.models import LanguageModel
from polydraft.ngrams import GRAM_CACHES, GramCache
from polydraft.ngrams.prediction import PREDICTION
from polydraft.sampling import RowParams

GRAM_DRAFTERS: dict[str, tuple[str, ...]] = {
    "self-draft": ("context", "corpus"),
    "ngram": ("context",),
    "lookup": ("lookup",),
    "suffix": ("suffix",),
    "corpus": ("corpus",),
}
"""Drafters without a draft model, and their caches; `self-draft` also has riders (`RIDERS`)."""


class GramTree(Drafter):
    """Propose what n-gram caches find.

    Parameters
    ----------
    name : str
        As the user wrote it.
    caches : sequence of GramCache
        If chances are equal, the first one wins.
    options : GramTreeOptions
        Its riders are used even if nothing learns from them.
    pauses : bool
        On a CPU, propose no more than pays, and nothing while proposals do not pay.
    costs : Costs, optional
        What passes cost, to decide that; measured when first needed, and kept for this machine, if not given.
    belief : Belief
        What to assume of the caches before the first round.
    added : bool
        Whether they were added for one request: a walk that cannot verify them is then replaced instead of refused.
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
        """Return the builder of a batch's tries, for a drafter with this name."""
        name = "" if self.added else name
        sizes = self.options.on(target.device)
        if self.lossless and on_device(self.caches, sizes, target.device):
            return DeviceTrieBuilder(self.caches, sizes, batch_size, target.device, name)
        policy = None
        if self.pauses and is_host(target.device):
            policy = self._pacing(sizes, batch_size, target)
            if sizes.riders.branches and policy.hopeless:  # branches cannot pay here
                sizes = dataclasses.replace(sizes, riders=RiderOptions(branches=0))
                policy = self._pacing(sizes, batch_size, target)
        kind = "drawn-branches" if sizes.riders.drawn else "branches"
        riders = RIDERS.get(kind)(sizes.riders, target, batch_size) if sizes.riders.branches else Riders()
        source = GramSource(self.caches, riders, self.options.caches.gram, batch_size)
        make = TrieBuilder if self.lossless else LOSSY_TRIES.get("flat-blocks")
        return make(source, sizes, self.options, target.device, name, policy)

    def _pacing(self, sizes: Sizes, batch_size: int, target: LanguageModel) -> RowPolicy:
        """Return the policy that decides how many candidates pay. Branches ride along in every pass, so they are overhead."""
        most, riders = 1 + sizes.nodes, sizes.riders.most
        costs = self.costs or measured_costs(target, None, most)
        overhead = costs.overhead + costs.tree_pass(1 + riders) - costs.tree_pass(1)
        return RowPolicy(dataclasses.replace(costs, overhead=overhead), batch_size, most, belief=self.belief)


def gram_tree(names: Sequence[str], options: GramTreeOptions, *, pauses: bool = False) -> GramTree:
    """Make the drafter that uses the caches of all these drafters."""
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
