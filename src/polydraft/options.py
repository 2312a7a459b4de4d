"""Options of a decoder, described and checked once: for `load`, `Speculate`, the command line and benchmark methods.

Torch is only imported when values are checked, so that `--help` is immediate.
"""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from polydraft.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from polydraft.draft import GramTreeOptions
    from polydraft.trees import DynamicShape, Topology

AUTO = "auto"
COUPLED = "coupled"
"""The scheme in which a seed decides the text (docs/decisions/066-a-seed-decides-the-text.md)."""
_OF_ANY_TREE = (AUTO, COUPLED)
"""Schemes that are none of `SCHEMES`, and leave all choices of a tree open."""
FLAT_BLOCKS, SELF_DRAFT = "flat-blocks", "self-draft"
BY_LOAD = "load:"
"""Prefix of a tree: use that tree, or smaller ones when many rows share a round."""
_FIRST = {"heading": "Options"}
_NGRAMS = {"heading": "Drafting from n-grams"}
_IN_PYTHON = {"has_text": False}


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options."""

    takes_models: ClassVar[bool] = False
    """Whether target and draft may be loaded models."""

    target: Any = field(default="smollm2", kw_only=False)
    """Target model: smollm2 (bundled), a folder, a GGUF file, a hub name, or inflated:7b (bundled, at a large model's cost).

    `load` also takes a loaded model of transformers or peft."""
    draft: Any = field(default=AUTO, kw_only=False)
    """Draft: a folder or hub name, mtp (the target's own MTP layers), int8 (its weights in int8), early-exit:k (its first k
    layers), none, or auto.

    A small model with another tokenizer proposes tokens that both have. ``"auto"`` is a head that ships for the target, lies
    beside it or was trained for it, or the MTP layers of its checkpoint; else an int8 copy of its weights if memory allows, or
    n-grams of the text. `load` also takes a loaded model."""

    def __post_init__(self) -> None:
        for name in ("target", "draft"):
            value: Any = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif not isinstance(value, str) and not self.takes_models:
                raise UsageError(
                    f"{name} is an object of type {type(value).__name__}, not a name; allowed: a folder, a hub name and the "
                    "like; polydraft.load takes loaded models, too"
                )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Target."""

    adapter: str | None = None
    """LoRA or other PEFT adapter for the target, a folder or hub name; it is merged into the weights.

    Needs the package peft. The draft stays unchanged. With quantised weights, the adapter is not merged."""
    tokenizer: Any = field(default=None, metadata=_IN_PYTHON)
    """Tokenizer of a loaded target; without one, prompts are token ids."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Drafting and verification."""

    tree: str = field(default=AUTO, metadata=_FIRST)
    """Draft tree: children per level (4x2x2x1x1), chain:5, fork:16x5 (16 chains of 5), best:64x6 (64 nodes, 6 deep), paths
    ([[0],[1],[0,0]]), dynamic:64 (at most 64 nodes, chosen each round), load:4x2x2x1x1 (or smaller, in batches), none, or auto.

    See `polydraft.trees.parse_tree` and `polydraft.trees.parse_dynamic`. ``"best:64x6/4x2x1"`` is the first tree for a single
    text, and the second for batches, or if you name a scheme. ``"auto"`` is such a pair on a GPU. On a CPU, it is a dynamic
    tree, and drafting pauses while it does not pay; or a small static one if you name a scheme, a walk or a lossy rule."""
    scheme: str = AUTO
    """How candidates are drawn and verified; 'polydraft info' lists the schemes.

    Every scheme is exact; they differ in speed. With ``"coupled"``, the default, a seed gives the same text with any draft and
    tree, and without."""
    walk: str = AUTO
    """Order in which a tree is verified: node, block or auto.

    Every walk is exact; they differ in speed."""
    draft_temperature: float | None = None
    """Temperature of the draft  [default: the target's].

    It affects speed, never the distribution of the text."""
    grams: "GramTreeOptions | None" = field(default=None, metadata=_IN_PYTHON)
    """Sizes and caches of n-gram drafters."""

    def __post_init__(self) -> None:
        from polydraft.sampling import check_draft_temperature
        from polydraft.trees import DynamicShape
        from polydraft.verify import SCHEMES, check_walk

        if self.scheme not in _OF_ANY_TREE and self.scheme.partition(":")[0] not in SCHEMES:
            raise unknown_name("scheme", self.scheme, [*_OF_ANY_TREE, *SCHEMES])
        shapes = () if self.tree == AUTO else (*self.shape, self.alone)
        if self.tree_scheme != AUTO and any(isinstance(shape, DynamicShape) for shape in shapes):
            raise UsageError(
                f"scheme {self.scheme!r} does not work with tree {self.tree!r}: dynamic trees draw nothing; leave it out"
            )
        if self.walk not in (AUTO, "node") and self.is_dynamic:
            raise UsageError(
                f"walk {self.walk!r} does not work with tree {self.tree!r}: dynamic trees draw nothing; leave it out"
            )
        if self.alone is not None and self.shape[0] is not None:
            raise UsageError(
                f"tree {self.tree!r} has a dynamic tree after the slash; allowed there: a static one, such as 4x2x1"
            )
        if self.scheme == COUPLED and self.walk != AUTO:
            raise UsageError(f"walk {self.walk!r} does not work with scheme 'coupled', which needs none; leave one of them out")
        check_walk(self.walk, self.tree_scheme)
        check_draft_temperature(self.draft_temperature)

    @property
    def tree_scheme(self) -> str:
        """The scheme by which trees are drawn for rows that are not coupled."""
        return AUTO if self.scheme == COUPLED else self.scheme

    @property
    def couples(self) -> bool:
        """Whether texts above temperature 0 are coupled."""
        return self.scheme == COUPLED or (self.scheme == AUTO and (self.walk == AUTO or self.is_dynamic))

    @property
    def is_dynamic(self) -> bool:
        """Whether a dynamic tree is named."""
        return self.tree != AUTO and self.shape[0] is not None

    @property
    def shape(self) -> "tuple[DynamicShape | None, Topology]":
        """Limits of a dynamic tree, or None, and the shape of a static one."""
        from polydraft.trees import Topology, parse_dynamic, parse_tree

        tree = self.tree.rpartition("/")[2]
        dynamic = parse_dynamic(tree)
        return (None, parse_tree(tree.removeprefix(BY_LOAD))) if dynamic is None else (dynamic, Topology())

    @property
    def alone(self) -> "Topology | DynamicShape | None":
        """Tree for a single text, at temperature 0 or coupled, if that has one of its own; else None."""
        from polydraft.trees import parse_dynamic, parse_tree

        first, both, _ = self.tree.rpartition("/")
        return (parse_dynamic(first) or parse_tree(first)) if both else None


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Drafting and verification."""

    drafter: str = field(default=AUTO, metadata=_NGRAMS)
    """Source of candidates: auto (the draft), self-draft, ngram, lookup, suffix, corpus, or several such as lookup+model.

    N-grams need no draft; ``"model"`` is the draft in a combination."""
    decision: str | None = None
    """Decision model that ends drafting early: a folder, none, or one that ships with the draft: auto, hidden, distribution."""
    stop_below: float = 0.4
    """Threshold of the decision model, 0 to 1."""
    lossy: str | None = None
    """Use a rule that changes the distribution: target-init (improved MCSD's trees), flat-blocks (Self-Draft's verification) or
    self-draft (all of Self-Draft as printed)."""
    lossless: bool = field(default=True, metadata=_IN_PYTHON)
    """False allows settings that change the distribution of the text, such as ``GramTreeOptions(flat_blocks=True)``."""


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Machine."""

    device: str = AUTO
    """Device: auto, cpu, cuda, cuda:1, ...

    ``"auto"`` picks a GPU if there is one."""
    dtype: str = AUTO
    """Number format: auto, float32, bfloat16, float16, or int8 (weights only, on a CPU).

    ``"auto"`` is bfloat16 if the hardware computes in it, else float32. Output is exact for the target as loaded; with int8
    weights that is a slightly different model (docs/cpus.md has figures)."""
    device_map: str | None = field(default=None, metadata={"heading": "GPUs"})
    """For targets larger than one device: auto, balanced, sequential, or tp under torchrun."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Machine."""

    profile: str = AUTO
    """Settings from polydraft tune: auto (those for this machine and pair), a file, or none.

    They replace ``"auto"``, unless you give a tree, scheme, walk, drafter, decision, draft temperature or lossy rule. A profile
    of another machine, pair or version is ignored, and the log says so."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Sampling."""

    generation_config: bool = True
    """Follow the target's generation_config.json (penalties, bans, sampling) unless a request says otherwise.

    ``decoder.defaults.followed`` and the log have the fields that are followed."""


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """Machine."""

    native: bool = True
    """On a CPU, run models with C kernels, from the wheel or compiled on first use; if neither works, torch is used."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """GPUs."""

    graphs: bool = True
    """On a GPU, replay whole rounds as CUDA graphs."""
    invariant: bool | None = None
    """On a GPU, compute the same bits for a token whatever else is in the pass, so that greedy text equals plain decoding's
    [default: in bfloat16, if the model supports it].

    Llama-shaped models in bfloat16 and float32 support it."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(
    PairOptions,
    AdapterOptions,
    TreeOptions,
    DrafterOptions,
    CheckpointOptions,
    PlaceOptions,
    ProfileOptions,
    CpuOptions,
    GpuOptions,
):
    """All options of `polydraft.load`, as a value that can be stored, compared and changed.

    Checks that need neither a model nor the machine are made here; `polydraft.loading.load_with` makes the others.
    """

    takes_models: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from polydraft.draft.tree_drafter import check_drafter, check_flat_blocks, needs_draft
        from polydraft.papers.decision import check_threshold

        PairOptions.__post_init__(self)
        self._check_given()
        TreeOptions.__post_init__(self)
        check_threshold(self.stop_below)
        check_drafter(self.drafter, self.walk)
        if self.lossy == FLAT_BLOCKS or (self.grams is not None and self.grams.flat_blocks):
            check_flat_blocks(self.drafter)
        if self.lossy == SELF_DRAFT and self.drafter != SELF_DRAFT:
            raise UsageError(f"--lossy self-draft does not work with drafter {self.drafter!r}; use drafter self-draft")
        if self.lossy is not None and self.lossy not in (FLAT_BLOCKS, SELF_DRAFT):
            self._check_lossy_rule(self.lossy)
        if self.grams is not None and self.grams.flat_blocks and self.lossless and self.lossy not in (FLAT_BLOCKS, SELF_DRAFT):
            raise UsageError(
                "flat_blocks changes the distribution of the text above temperature 0; pass lossless=False to allow that"
            )
        draft = self.draft if isinstance(self.draft, str) else type(self.draft).__name__
        if draft not in (AUTO, "none") and not needs_draft(self.drafter):
            raise UsageError(
                f"drafter {self.drafter!r} uses no draft, but draft={draft!r} is given; use {self.drafter}+model, or "
                "leave the draft out"
            )

    def check_used(self) -> None:
        """Refuse options that would have no effect: those of a draft's tree without a draft, or of a missing decision model.

        Call this before ``"auto"`` is resolved.
        """
        from polydraft.draft.tree_drafter import needs_draft, split_drafter

        if not needs_draft(self.drafter):
            remedy = f"use {self.drafter}+model, or leave it out" if split_drafter(self.drafter)[0] else "leave it out"
            for name in ("tree", "scheme", "draft_temperature", "decision"):
                if (value := getattr(self, name)) not in (*_OF_ANY_TREE, "none", None):
                    raise UsageError(
                        f"{name} {value!r} does not work with drafter {self.drafter!r}, which has no draft; {remedy}"
                    )
        if self.decision in (None, "none"):
            default = LoadOptions.__dataclass_fields__["stop_below"].default
            if self.stop_below != default:
                raise UsageError(f"stop_below={self.stop_below} needs a decision model; pass decision too, such as auto")
        elif self.tree == "none" or BY_LOAD in self.tree:
            why = "which drafts nothing" if self.tree == "none" else "whose size follows the load"
            raise UsageError(f"decision {self.decision!r} does not work with tree {self.tree}, {why}; leave one of them out")

    def _check_given(self) -> None:
        """Refuse options that are only for names if the target is a loaded model, and the other way round."""
        if self.adapter is not None:
            object.__setattr__(self, "adapter", os.fspath(self.adapter))
        if isinstance(self.target, str):
            if self.tokenizer is not None:
                raise UsageError(f"tokenizer is for a loaded target; {self.target!r} has its own; leave it out")
            return
        if self.adapter is not None:
            raise UsageError(
                f"adapter={self.adapter!r} works only with a target given by name; apply it to your model with "
                "PeftModel.from_pretrained(model, ...)"
            )
        if self.device_map is not None:
            raise UsageError(f"the target is loaded already; leave out device_map={self.device_map!r}")

    def _check_lossy_rule(self, rule: str) -> None:
        """Refuse an unknown rule, options that it does not use, and trees that it cannot grow."""
        from polydraft.draft import LOSSY_DRAFTERS
        from polydraft.papers.target_init import check_lossy

        if rule not in LOSSY_DRAFTERS:
            raise unknown_name("lossy rule", rule, [*LOSSY_DRAFTERS, FLAT_BLOCKS, SELF_DRAFT])
        for name in ("scheme", "walk", "drafter", "draft_temperature"):
            if (value := getattr(self, name)) not in (AUTO, None):
                raise UsageError(f"{name} {value!r} does not work with --lossy {rule}, which has its own; leave it out")
        if self.tree == AUTO:
            return
        dynamic, topology = self.shape
        if dynamic is not None or self.alone is not None or BY_LOAD in self.tree:
            raise UsageError(f"--lossy {rule} grows forks only, not tree {self.tree}; use a tree such as fork:16x5")
        check_lossy(rule, topology)


@dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """Drafting from n-grams."""

    ngram_nodes: int | None = field(default=None, metadata={"short": "nodes"})
    """Most candidates per round from n-grams."""
    ngram_depth: int | None = field(default=None, metadata={"short": "depth"})
    """Most tokens to draft ahead from n-grams."""
    gram: int | None = None
    """Tokens per continuation in the context cache."""
    ngram_prefix: int | None = field(default=None, metadata={"short": "prefix"})
    """Most tokens at the text's end to look up in the context cache."""
    branches: int | None = None
    """Branches that self-draft extends in each pass."""
    branch_length: int | None = field(default=None, metadata={"short": "length"})
    """Most tokens per branch."""
    branch_seeds: str | None = field(default=None, metadata={"short": "seeds"})
    """Where branches start: vocabulary or prompt."""
    corpus: str | None = None
    """Corpus cache file, made by: polydraft train corpus-cache."""
    no_corpus: bool = False
    """Run self-draft without its corpus cache."""
    no_context: bool = False
    """Run self-draft without its context cache and branches."""

    def grams_asked_for(self, drafter: str = SELF_DRAFT, lossy: str | None = None) -> "GramTreeOptions":
        """Return the options in the form of the n-gram drafters, which check their values.

        Options that this drafter does not have are refused, and so are those that a lossy rule sets itself.
        """
        from polydraft.draft import GramTreeOptions, RiderOptions
        from polydraft.ngrams import GramOptions

        if self.corpus is not None and self.no_corpus:
            raise UsageError(f"--corpus {self.corpus} and --set corpus=no cannot be combined; leave one out")
        for name, owners in _OWNERS.items():
            if getattr(self, name) not in (None, False) and not {*owners} & {*drafter.split("+")}:
                option = f"{name.removeprefix('no_')}={'no' if name.startswith('no_') else getattr(self, name)}"
                raise UsageError(f"{option} is for drafter {' or '.join(owners)}, not for {drafter!r}; leave it out")
        for name, own in (
            ("ngram_prefix", 1),
            ("ngram_depth", self.gram or GramOptions().gram),
            ("branch_seeds", "vocabulary"),
        ):
            if lossy == SELF_DRAFT and (value := getattr(self, name)) not in (None, own):
                raise UsageError(f"{name}={value} does not work with --lossy self-draft, whose paper has {own}; leave it out")
        riders = _given(branches=self.branches, length=self.branch_length, seeds=self.branch_seeds)
        return GramTreeOptions(
            **_given(nodes=self.ngram_nodes, depth=self.ngram_depth),
            riders=RiderOptions(**riders) if riders else None,
            caches=GramOptions(**_given(gram=self.gram, max_prefix=self.ngram_prefix, corpus=self.corpus)),
            context=not self.no_context,
            corpus=not self.no_corpus,
        )


_OF_CONTEXT, _OF_GRAMS = (SELF_DRAFT, "ngram"), (SELF_DRAFT, "ngram", "lookup", "suffix", "corpus")
_OWNERS = {
    "ngram_nodes": _OF_GRAMS,
    "ngram_depth": _OF_GRAMS,
    "gram": _OF_CONTEXT,
    "ngram_prefix": _OF_CONTEXT,
    "corpus": (SELF_DRAFT, "corpus"),
    **dict.fromkeys(("branches", "branch_length", "branch_seeds", "no_corpus", "no_context"), (SELF_DRAFT,)),
}
"""The drafters that have each option."""


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
