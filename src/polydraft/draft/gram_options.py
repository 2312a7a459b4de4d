"""Options of drafting from n-grams."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from polydraft.devices import captures, is_host
from polydraft.draft.trie import FEW_STEPS, STEPS, Limits, trie_ladder
from polydraft.errors import UsageError, unknown_name
from polydraft.ngrams import GramOptions, tokenizer_fingerprint
from polydraft.trees import MAX_NODES

SEEDS = ("vocabulary", "prompt")
_USUAL_TOKENS, _TOKENS_ON_CPU = 64, 20
_LEAST_TOKENS = 8
"""Default candidates per round; docs/ngrams.md has the calculation."""
_LEAST_CHANCE, _LEAST_CHANCE_ON_CPU = 0.005, 0.04
"""Chance at which a candidate breaks even: an accepted token is worth about 0.4 of a plain pass; another token in the pass
costs 0.002 to 0.003 of one on a GPU, and 0.025 on two cores with matrix units."""


@dataclass(frozen=True, kw_only=True)
class RiderOptions:
    """How many of Self-Draft's branches ride along in a pass, and how they begin.

    References
    ----------
    .. [1] Gao et al. 2025, Multi-Branch Self-Drafting for LLM Inference Acceleration, "Multi-branch drafting", Algorithm 1.
    """

    branches: int = 6
    """N of [1]; 0 for none."""
    length: int = 6
    """Most tokens of a branch, L of [1]."""
    seeds: str = "prompt"
    """Where the first token of a branch is drawn from: the ``"prompt"``, or the ``"vocabulary"`` as in [1]."""
    drawn: bool = False
    """Whether branches are sampled like the text, and only full ones are learnt from, as in [1]. Otherwise they are the
    target's likeliest tokens, and short ones are learnt from as well."""

    def __post_init__(self) -> None:
        for name, value, least in (("branches", self.branches, 0), ("branch_length", self.length, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r} is out of range; allowed: whole numbers from {least}")
        if self.seeds not in SEEDS:
            raise unknown_name("branch_seeds", self.seeds, SEEDS)
        if self.most >= MAX_NODES:
            raise UsageError(
                f"{self.branches} branches of {self.length} tokens are too many for one pass; allowed: below {MAX_NODES} in all"
            )

    @property
    def most(self) -> int:
        """Most riders in a pass."""
        return self.branches * self.length


@dataclass(frozen=True, kw_only=True)
class GramTreeOptions:
    """Settings of all drafters that propose from n-grams."""

    nodes: int | None = None
    """Most candidates per round, in nodes of the merged trie; None for as many as pay on the device."""
    depth: int = 12
    """Most tokens of a continuation."""
    least_chance: float | None = None
    """Smallest chance, as estimated by the caches, that a candidate is reached and accepted; None for what pays on the
    device."""
    candidates: int = 8
    """Most tokens that each cache proposes at a node (by the paper's rule: continuations)."""
    riders: RiderOptions | None = None
    """Branches of `self-draft`, which other drafters do not have; None for as many as pay on the device."""
    caches: GramOptions = field(default_factory=GramOptions)
    context: bool = True
    """Whether `self-draft` uses its context cache, and so the branches that feed it."""
    corpus: bool = True
    """Whether `self-draft` uses a corpus cache."""
    flat_blocks: bool = False
    """Verify as the Self-Draft paper describes, which changes the distribution of the text above temperature 0: an ablation."""

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "candidates"):
            value = getattr(self, name)
            if name == "nodes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} is out of range; allowed: whole numbers from 1")
        if self.least_chance is not None and not 0 <= self.least_chance <= 1:
            raise UsageError(f"least_chance={self.least_chance!r} is out of range; allowed: 0 to 1")
        branch_tokens = (self.riders or RiderOptions()).most
        if 1 + self.most_nodes + branch_tokens > MAX_NODES:
            raise UsageError(
                f"{self.most_nodes} candidates and {branch_tokens} branch tokens are too many for one pass; "
                f"allowed: below {MAX_NODES} in all"
            )

    @property
    def sized(self) -> bool:
        """Whether the user chose sizes, which are then kept whether they pay or not."""
        return any(one is not None for one in (self.nodes, self.least_chance, self.riders))

    @property
    def most_nodes(self) -> int:
        """Most candidates per round on any device."""
        return self.nodes or _USUAL_TOKENS

    def as_printed(self) -> "GramTreeOptions":
        """Return the Self-Draft paper's own method: branches, context cache, retrieval and verification."""
        return replace(
            self,
            flat_blocks=True,
            nodes=self.nodes or _USUAL_TOKENS,
            depth=self.caches.gram,
            riders=replace(self.riders or RiderOptions(), seeds="vocabulary", drawn=True),
            caches=replace(self.caches, max_prefix=1, branches_only=True),
        )

    def beside_a_tree(self) -> "GramTreeOptions":
        """Return the options for n-grams beside a draft's tree: fewer candidates, because more bring next to nothing."""
        return replace(self, nodes=self.nodes or _LEAST_TOKENS)

    def for_tokenizer(self, tokenizer: Any) -> "GramTreeOptions":
        """Tie corpus caches to a tokenizer, so that caches for another one are refused."""
        if tokenizer is None:
            return self
        # Computed only if there is a corpus: for 150,000 tokens it takes most of a second.
        return replace(self, caches=replace(self.caches, fingerprint=partial(tokenizer_fingerprint, tokenizer)))

    def on(self, device: torch.device) -> "Sizes":
        """Return the sizes for a device."""
        cpu = is_host(device)
        riders = self.riders or (RiderOptions(branches=2, length=4) if cpu else RiderOptions())
        # On a CPU a pass costs by its tokens, so each branch token replaces a candidate.
        nodes = self.nodes or (max(_TOKENS_ON_CPU - riders.most, _LEAST_TOKENS) if cpu else _USUAL_TOKENS)
        least = self.least_chance if self.least_chance is not None else _LEAST_CHANCE_ON_CPU if cpu else _LEAST_CHANCE
        ladder = trie_ladder(nodes, FEW_STEPS if captures(device) else STEPS)
        depth, width = min(self.depth, nodes), self.candidates
        return Sizes(nodes=nodes, depth=depth, width=width, least=least, ladder=ladder, riders=riders)


@dataclass(frozen=True, kw_only=True)
class Sizes(Limits):
    """What a round has on one device: a trie within limits, and riders."""

    riders: RiderOptions
