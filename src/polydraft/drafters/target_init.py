"""Trees that begin with several tokens from the target's law, as improved-MCSD has them. Lossy.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.drafter import LOSSY_DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.head_tree import HeadTree
from polydraft.drafters.model_tree import ModelTree
from polydraft.errors import UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.sampling import RowParams, draw_distinct
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree, Topology
from polydraft.walks import Verdict
from polydraft.walks.longest import LongestVerdict, LongestWalk


def check_lossy(name: str, topology: Topology) -> None:
    """Refuse an unknown lossy drafter, or a tree that it cannot grow."""
    LOSSY_DRAFTERS.get(name)
    chains = max(len(topology.children[0]), 1)
    if topology.depth < 1 or topology != Topology.fork(chains, topology.depth):
        raise UsageError(f"--lossy {name} grows forks only, not tree {topology}; use a tree such as fork:16x5")


class TargetInit(Drafter):
    """Begin with W tokens from the target's law, draft D more behind each, keep the longest accepted path ([1] §3.1).

    The text does not follow the target's law. What does, and keeps the width, is a fork below one token from the target: the
    pending token, which every tree here has as its root, is exactly that. So the lossless counterpart is the tree
    `target-root:WxD`, another name for `fork:WxD`.

    Parameters
    ----------
    model : LanguageModel or FeatureHead
        The draft.
    topology : Topology
        A fork; its depth D counts drafted tokens.
    """

    name = "target-init"
    lossless = False
    scheme = "auto"

    def __init__(self, model: LanguageModel | FeatureHead, topology: Topology) -> None:
        check_lossy(self.name, topology)
        self.model = model
        self.topology = Topology.fork(len(topology.children[0]), topology.depth + 1)

    def start(self, params: RowParams, target: LanguageModel) -> "TargetInitSession":
        """Go to work on a batch."""
        inner: Any
        if isinstance(self.model, FeatureHead):
            inner = HeadTree(self.model, self.topology, "rrs-wor").start(params, target)
        else:
            inner = ModelTree(self.model, self.topology, "rrs-wor").start(params, target)
        if params.mixed:
            raise UsageError("--lossy target-init cannot mix rows of temperature 0 with others; decode them apart")
        return TargetInitSession(inner, len(self.topology.children[0]), params)


class TargetInitSession(DraftSession):
    """A static tree's session whose first level is replaced by tokens from the target's law, once that is known.

    In the first round of a text it is not, because the last token of a prompt has not been through the target: there the
    first level is the draft's.
    """

    def __init__(self, inner: Any, width: int, params: RowParams) -> None:
        self._inner, self._width, self._greedy = inner, width, params.all_greedy
        self.num_nodes, self.depth = inner.num_nodes, inner.depth
        self.reads_features = inner.reads_features  # type: ignore[misc]
        self._walk = LongestWalk(self._greedy)
        self.own_walk = self._walk
        self._next: tuple[Tensor, Tensor] | None = None
        draw = inner._growth.draw

        def draw_below(level: Any, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> None:
            draw(level, logits_BGV, tokens_BN, uniforms_BU)
            if level.first == 0 and self._roots_BW is not None and self._next is not None:
                known_B1 = self._next[1][:, None]
                drafted_BW = tokens_BN[:, 1 : 1 + self._width]
                tokens_BN[:, 1 : 1 + self._width] = torch.where(known_B1, self._roots_BW, drafted_BW)

        inner._growth.draw = draw_below
        self._roots_BW: Tensor | None = None

    @property
    def scheme(self) -> Scheme:
        """How the tree is drawn."""
        scheme: Scheme = self._inner.scheme
        return scheme

    @property
    def num_uniforms(self) -> int:
        """The tree's, and one for each token from the target."""
        return int(self._inner.num_uniforms) + self._width

    def obstacle(self) -> str | None:
        """Say why rounds are not recorded."""
        return "target-initialised trees are lossy and not made for speed"

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Get ready as the static tree does."""
        limits: Sequence[int] | None = self._inner.prepare(texts, longest, rows)
        return limits

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """Let a feature head see the texts."""
        self._inner.observe(starts, counts, features_BTF)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Begin with the draft's tokens."""
        self._inner.begin(texts, longest, rows, params)
        if self._next is not None:
            known_B = self._next[1].clone()
            known_B[list(rows)] = False
            self._next = self._next[0], known_B

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Take W tokens from the target's law, at temperature 0 the likeliest, and draft behind each."""
        self._roots_BW, self._walk.given_B = None, None
        if self._next is not None:
            law_BV, known_B = self._next
            if self._greedy:
                self._roots_BW = law_BV.topk(self._width, dim=-1).indices
            else:
                self._roots_BW = draw_distinct(law_BV, uniforms_BU[:, -self._width :])
            self._walk.given_B = known_B
        tree: DraftTree = self._inner.propose(tail_B2, uniforms_BU[:, : self._inner.num_uniforms])
        return tree

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Follow the verdict, and remember the law that the next tree begins with."""
        assert isinstance(verdict, LongestVerdict)
        self._next = verdict.next_law_BV, verdict.known_B
        report: Tensor | None = self._inner.commit(verdict, keep_B, features_BNF)
        return report

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note of the new texts."""
        self._inner.settle(texts, emitted)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts."""
        self._inner.rewind(texts)


@LOSSY_DRAFTERS.register("target-init")
def _build(parts: Parts) -> TargetInit:
    if parts.draft is None:
        raise UsageError("--lossy target-init needs a draft; pass draft=NAME, a folder, or early-exit:k")
    return TargetInit(parts.draft, parts.topology)
