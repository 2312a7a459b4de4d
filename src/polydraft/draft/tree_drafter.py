"""Drafters by name: trees drawn from a model or a feature head, static or dynamic, alone or beside n-grams."""

import dataclasses

import torch

from polydraft.devices import is_host
from polydraft.draft.builder import Builder
from polydraft.draft.copy_source import CopySource
from polydraft.draft.costs import measured_costs
from polydraft.draft.drafter import DRAFTERS, Drafter, Parts
from polydraft.draft.dynamic_builder import DynamicBuilder
from polydraft.draft.grams import GRAM_DRAFTERS, GramTree, gram_tree
from polydraft.draft.head_source import HeadSource, ParallelSource
from polydraft.draft.ladder import Timings
from polydraft.draft.load_builder import LoadBuilder
from polydraft.draft.model_source import ModelSource
from polydraft.draft.policy import CLOSE, FAIR, Belief, RowPolicy
from polydraft.draft.session import DraftSession
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.draft.source import DistributionSource
from polydraft.draft.speedup import Costs
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import check_tree
from polydraft.draft.stopping_builder import Decision, StoppingBuilder
from polydraft.draft.translated_source import TranslatedSource
from polydraft.draft.tree_choice import TreeChoice, trees_by_load
from polydraft.draft.trie import check_node_walk
from polydraft.errors import UsageError, unknown_name
from polydraft.models import Head, LanguageModel
from polydraft.models.heads.parallel_head import ParallelHead
from polydraft.models.int8_copy import Int8Copy
from polydraft.models.translation import TranslatedModel
from polydraft.sampling import RowParams
from polydraft.trees import DynamicShape, Topology
from polydraft.verify import Scheme

_NOMINAL = Costs(draft_level=0.1, tree_pass=lambda nodes: 1 + 0.005 * (nodes - 1))
"""Rough costs on a machine with matrix units, for trees that need no measurement."""


class TreeDrafter(Drafter):
    """Draw trees from a draft's distributions.

    Parameters
    ----------
    model : LanguageModel or Head
        The draft: a model with the target's tokens, or with translated ones, or a head trained for the target.
    shape : Topology or DynamicShape
        A static tree, or the limits of a tree that follows the draft's confidence (OPT-Tree, EAGLE-2). On a CPU a dynamic tree
        is as large as pays. On a GPU it uses up its limits, for one text at temperature 0 or coupled; batches have the best
        static tree with as many nodes and levels.
    scheme : str or Scheme
        For static trees: a registered scheme, ``"auto"``, or a scheme of your own; `top` at draft temperature 0.
    draft_temperature : float, optional
        Temperature of the draft; by default the target's. It changes speed, never the text's distribution.
    decision : Decision, optional
        Lets rows stop before the last level.
    costs : Costs, optional
        What levels and passes cost, for dynamic trees; measured when first needed, and kept for this machine, if not given.
    by_load : bool
        If `shape` is static, let rows that share rounds have smaller trees when these bring more tokens over time.
    alone : Topology or DynamicShape, optional
        Replaces a static `shape` for a single text, at temperature 0 or coupled: its candidates are the likeliest tokens, so
        trees pay that would be slow to draw. On a GPU without kernels to grow it, a dynamic shape becomes the best static tree
        with as many nodes and levels.
    pauses : bool
        The tree is a default, not a request: cut it to the levels that the draft has. On a CPU, unless a scheme is named, let
        rows of static trees rest while drafting does not pay, like those of dynamic trees, and decode plainly if an average
        draft could not pay.
    """

    def __init__(
        self,
        model: LanguageModel | Head,
        shape: Topology | DynamicShape,
        scheme: str | Scheme = "auto",
        *,
        draft_temperature: float | None = None,
        decision: Decision | None = None,
        costs: Costs | None = None,
        by_load: bool = False,
        alone: Topology | DynamicShape | None = None,
        pauses: bool = False,
    ) -> None:
        self.model: LanguageModel | Head = model
        if isinstance(model, ParallelHead):
            levels, deepest = model.shape.depths, max(shape.depth, 0 if alone is None else alone.depth)
            if deepest > levels and not pauses:
                raise UsageError(
                    f"draft {model.name!r} gives {levels} levels per pass, but the tree has {deepest}; use a smaller "
                    f"one, such as chain:{levels}"
                )
            shape, alone = shape.cut(levels), None if alone is None else alone.cut(levels)
        if isinstance(model, Int8Copy) and isinstance(shape, DynamicShape):
            shape = dataclasses.replace(shape, beam=1)  # every further node of a level costs as much as the first
        self.topology: Topology | DynamicShape = shape
        self.scheme, self.draft_temperature, self.decision, self.costs = scheme, draft_temperature, decision, costs
        self.ranked = self.dynamic
        self.name = "dynamic" if self.dynamic else "head" if isinstance(model, Head) else "model"
        self.by_load = by_load and decision is None and not self.dynamic
        self._timings, self.alone, self.pauses = Timings(), alone, pauses
        if isinstance(shape, Topology):
            check_tree(shape, scheme, model.num_columns)
        elif scheme != "auto":
            raise UsageError(f"scheme {scheme!r} does not work here: dynamic trees draw nothing; leave it out")

    @property
    def dynamic(self) -> bool:
        """Whether every round chooses its own shape."""
        return isinstance(self.topology, DynamicShape)

    @property
    def belief(self) -> Belief:
        """What to assume of the draft before the first round."""
        return CLOSE if isinstance(self.model, Int8Copy) else FAIR

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Open a session for a batch; it decodes plainly if the tree is a default and an average draft could not pay."""
        builder = self.builder(params, target)
        if self.pauses and builder.policy is not None and builder.policy.adaptive and builder.policy.hopeless:
            return DraftSession(self.name, rests=builder.policy.rest_reason)
        return DraftSession(self.name, drawn=builder)

    def source(self, batch_size: int) -> DistributionSource:
        """Return the draft as a source for a batch."""
        if isinstance(self.model, ParallelHead):
            return ParallelSource(self.model, batch_size)
        if isinstance(self.model, Head):
            return HeadSource(self.model, batch_size)
        if isinstance(self.model, Int8Copy):
            return CopySource(self.model)
        if isinstance(self.model, TranslatedModel):
            return TranslatedSource(self.model, batch_size)
        return ModelSource(self.model, batch_size)

    def builder(self, params: RowParams, target: LanguageModel) -> Builder:
        """Return the builder of a batch's trees."""
        source, shape = self.source(len(params)), self.topology
        alone = len(params) == 1 and params.decided
        if alone and self.alone is not None:
            shape = self.alone
        if isinstance(shape, Topology):
            return self._static(source, shape, params, target, by_load=self.by_load and shape is not self.alone)
        if is_host(target.device):
            costs = self._costs(shape.nodes, shape.adaptive, target)
            return DynamicBuilder(
                source,
                shape,
                params,
                target.vocab_size,
                policy=RowPolicy(costs, len(params), shape.nodes, shape.adaptive, self.belief),
                draft_temperature=self.draft_temperature,
                decision=self.decision,
            )
        if alone and self.decision is None and target.shape_obstacle is None:
            fixed = FixedBuilder(source, shape, params, target.vocab_size, draft_temperature=self.draft_temperature)
            if fixed.form(getattr(self.model, "dtype", torch.float32)) is not None:
                return fixed
        return self._static(source, Topology.likeliest(shape.nodes, shape.depth), params, target)

    def _static(
        self, source: DistributionSource, tree: Topology, params: RowParams, target: LanguageModel, *, by_load: bool = False
    ) -> StaticBuilder:
        options: DrawOptions = {"scheme": self.scheme, "draft_temperature": self.draft_temperature}
        if by_load:
            assert self.decision is None
            choice = TreeChoice(trees_by_load(tree), self._timings, len(params))
            return LoadBuilder(source, choice, params, target.vocab_size, **options)
        # On a GPU rounds are captured, and trees by load take the place of pauses. Nobody knows what a named scheme costs.
        pauses = self.pauses and self.scheme == "auto" and not self.by_load and is_host(target.device)
        if not pauses and self.decision is None:
            return StaticBuilder(source, tree, params, target.vocab_size, **options)
        policy = None
        if pauses:
            costs = self._costs(tree.num_nodes, True, target)
            policy = RowPolicy(costs, len(params), tree.num_nodes, belief=self.belief)
        return StoppingBuilder(source, tree, params, target.vocab_size, decision=self.decision, policy=policy, **options)

    def _costs(self, nodes: int, adaptive: bool, target: LanguageModel) -> Costs:
        """Return what rounds cost, measured only if decisions depend on it."""
        if self.costs is not None or not adaptive:
            return self.costs or _NOMINAL
        return measured_costs(target, self.model, nodes)


class Combination(Drafter):
    """A drawn tree and an n-gram trie in one round: the scheme verifies its own children; n-grams may continue the walk.

    Parameters
    ----------
    tree : TreeDrafter
    grams : GramTree
    """

    def __init__(self, tree: TreeDrafter, grams: GramTree) -> None:
        self.tree, self.grams = tree, grams
        self.name = f"{grams.name}+{tree.name}"
        self.model, self.topology, self.lossless, self.ranked = tree.model, tree.topology, tree.lossless, tree.ranked

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Open a session for a batch."""
        certain = self.grams.builder(len(params), target, self.name)
        return DraftSession(self.tree.name, drawn=self.tree.builder(params, target), certain=certain)


def _register(name: str, needs: type[LanguageModel] | type[Head], *, dynamic: bool) -> None:
    @DRAFTERS.register(name)
    def build(parts: Parts) -> TreeDrafter:
        if not isinstance(parts.draft, needs):
            what = "a draft model; pass draft=NAME, a folder, or early-exit:k"
            if needs is Head:
                what = "a feature head; make one with: polydraft train head"
            raise UsageError(f"drafter {name!r} needs {what}")
        temperature, decision, pauses = parts.draft_temperature, parts.decision, parts.pauses
        if not dynamic:
            return TreeDrafter(
                parts.draft,
                parts.topology,
                parts.scheme,
                draft_temperature=temperature,
                decision=decision,
                by_load=parts.by_load,
                alone=parts.alone,
                pauses=pauses,
            )
        # Costs are measured only if the limits were given; the tiny models of tests have none worth measuring.
        shape, costs = (parts.dynamic, None) if parts.dynamic else (DynamicShape.like(parts.topology), _NOMINAL)
        return TreeDrafter(parts.draft, shape, draft_temperature=temperature, decision=decision, costs=costs, pauses=pauses)


_register("model", LanguageModel, dynamic=False)
_register("head", Head, dynamic=False)
_register("dynamic", LanguageModel, dynamic=True)
_register("dynamic-head", Head, dynamic=True)

AUTO = "auto"
NONE = "none"
_LISTING = {"self-draft", "ngram", "corpus"}
"""Drafters whose caches list whole continuations, as flat blocks need."""


def split_drafter(name: str) -> tuple[list[str], str | None]:
    """Return the n-gram drafters that a name combines, and the drafter that draws a tree beside them, if any.

    Parameters
    ----------
    name : str
        A registered drafter, or several joined by ``+``, of which at most one draws from a draft's distribution.
    """
    names = list(dict.fromkeys(name.split("+")))
    for one in names:
        if one not in DRAFTERS:
            raise unknown_name("drafter", one, [AUTO, *DRAFTERS])
    grams = [one for one in names if one in GRAM_DRAFTERS]
    trees = [one for one in names if one not in GRAM_DRAFTERS]
    if len(names) > 1 and NONE in names:
        raise UsageError(f"drafter {name!r}: 'none' cannot be combined with others; leave it out")
    if len(trees) > 1:
        raise UsageError(
            f"drafter {name!r} has {len(trees)} that draw from a draft ({', '.join(trees)}); allowed: one, with any of "
            f"{', '.join(GRAM_DRAFTERS)}"
        )
    return grams, trees[0] if trees else None


def check_drafter(name: str, walk: str) -> None:
    """Raise a `UsageError` for an unknown drafter, or a walk that cannot verify what it proposes."""
    if name != AUTO and split_drafter(name)[0]:
        check_node_walk(name, walk)


def check_flat_blocks(name: str) -> None:
    """Raise a `UsageError` for drafters with other caches than Self-Draft's."""
    if name == AUTO or not _LISTING.issuperset(name.split("+")):
        raise UsageError(f"flat-blocks cannot verify drafter {name!r}; allowed: self-draft, ngram, corpus, or some joined by +")


def needs_draft(name: str) -> bool:
    """Whether a drafter of that name proposes from a draft's distribution; raises for unknown names."""
    if name == AUTO:
        return True
    return split_drafter(name)[1] not in (None, NONE)


def make_drafter(parts: Parts, name: str = AUTO) -> Drafter:
    """Make a drafter by name; ``"auto"`` follows the kind of draft: a head, a model, or none.

    ``"model"`` stands for the draft's tree, whatever the kind of draft.
    """
    if parts.grams.flat_blocks:
        check_flat_blocks(name)
    if name == AUTO:
        missing = parts.draft is None or (parts.topology.depth == 0 and parts.dynamic is None)
        return DRAFTERS.get(NONE)(parts) if missing else _tree("model", parts)
    grams, tree = split_drafter(name)
    pauses = parts.pauses and not parts.grams.sized
    if tree is None:
        return gram_tree(grams, parts.grams, pauses=pauses)
    drawn = _tree(tree, parts)
    if not grams:
        return drawn
    assert isinstance(drawn, TreeDrafter), drawn
    return Combination(drawn, gram_tree(grams, parts.grams.beside_a_tree(), pauses=pauses))


def _tree(name: str, parts: Parts) -> Drafter:
    if name != "model":
        return DRAFTERS.get(name)(parts)
    kind = "head" if isinstance(parts.draft, Head) else "model"
    dynamic = {"head": "dynamic-head", "model": "dynamic"}
    return DRAFTERS.get(dynamic[kind] if parts.dynamic is not None else kind)(parts)
