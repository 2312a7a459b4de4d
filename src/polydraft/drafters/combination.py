"""A tree drawn from a draft's law and an n-gram trie in one round."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.drafter import Drafter, DraftSession
from polydraft.drafters.gram_tree import GramTree, GramTreeSession, check_node_walk
from polydraft.models import Context, LanguageModel
from polydraft.sampling import RowParams
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree, union
from polydraft.walks import NodeWalk, Verdict, Walk


class Combination(Drafter):
    """Both trees under one pending token: the draft's scheme verifies its own children, n-grams let the walk go on.

    Parameters
    ----------
    tree : Drafter
        Draws its candidates: a model's or a feature head's tree.
    grams : GramTree
    """

    def __init__(self, tree: Drafter, grams: GramTree) -> None:
        self.tree, self.grams = tree, grams
        self.name = f"{grams.name}+{tree.name}"  # type: ignore[misc]

    def __getattr__(self, attribute: str) -> Any:
        """Answer for model, topology and scheme as the tree does."""
        if attribute in ("model", "topology", "scheme", "draft_temperature"):
            return getattr(self.tree, attribute)
        raise AttributeError(attribute)

    def resolve_walk(self, wish: str, scheme: Scheme) -> Walk:
        """Walk node by node."""
        check_node_walk(self.name, wish)
        return NodeWalk()

    def start(self, params: RowParams, target: LanguageModel) -> "CombinationSession":
        """Go to work on a batch."""
        tree = self.tree.start(params, target)
        return CombinationSession(tree, self.grams.start(params, target), self.tree.name)


class CombinationSession(DraftSession):
    """Two sessions on the same texts.

    A path may leave the drawn tree for the trie, and never comes back. A draft that can only follow its own nodes
    (`follows_any_path` is False) is told of the path up to there, and reads the rest before the next round.
    """

    def __init__(self, tree: DraftSession, grams: GramTreeSession, name: str) -> None:
        self._tree, self._grams, self._name = tree, grams, name
        self.reads_features = tree.reads_features  # type: ignore[misc]
        self.drafts_on_host = tree.recordable and grams.drafts_on_host  # type: ignore[misc]
        self.num_nodes = tree.num_nodes + grams.num_nodes - 1
        self._own_nodes = tree.num_nodes
        self._own_kept: list[int] = []
        """How many nodes of its own path, the root included, each row's drawn tree kept in the last round."""
        self._told = 0
        """Numbers that the drawn tree itself reports."""
        tree.expect(self.depth)

    @property
    def scheme(self) -> Scheme:
        """How the drawn tree was drawn."""
        return self._tree.scheme

    @property
    def depth(self) -> int:  # type: ignore[override]
        """Levels of the deeper tree."""
        return max(self._tree.depth, self._grams.depth)

    @property
    def num_uniforms(self) -> int:
        """Random numbers of both."""
        return self._tree.num_uniforms + self._grams.num_uniforms

    def contexts(self) -> Sequence[Context]:
        """Return the drawn tree's memories."""
        return self._tree.contexts()

    def obstacle(self) -> str | None:
        """Ask the drawn tree."""
        return self._tree.obstacle()

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Ask the drawn tree, which alone may want to see texts again."""
        return self._tree.prepare(texts, longest, rows)

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """Show it the features."""
        self._tree.observe(starts, counts, features_BTF)

    def forget(self, rows: Sequence[int]) -> None:
        """Let both forget."""
        self._tree.forget(rows)
        self._grams.forget(rows)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Let both read."""
        self._tree.begin(texts, longest, rows, params)
        self._grams.begin(texts, longest, rows, params)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Unite the trees."""
        return self.with_host_tree(self.host_tree(tail_B2, uniforms_BU), tail_B2, uniforms_BU)

    def host_tree(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Return the trie."""
        return self._grams.propose(tail_B2, uniforms_BU[:, self._tree.num_uniforms :])

    def with_host_tree(self, tree: DraftTree, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Draw the other one, and unite them."""
        drawn = self._tree.propose(tail_B2, uniforms_BU[:, : self._tree.num_uniforms])
        self._own_nodes = drawn.tokens_BN.shape[1]
        return union(drawn, tree)

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor:
        """Tell each what concerns it; report where the path left the drawn tree."""
        own, steps_D = self._own_nodes, torch.arange(verdict.path_BD.shape[1], device=keep_B.device)
        own_keep_B = ((verdict.path_BD < own) & (steps_D < keep_B[:, None])).sum(1)
        if self._tree.follows_any_path:
            told_BX = self._tree.commit(verdict, keep_B, features_BNF)
        else:
            # Entries beyond the path repeat some node of it; which one does not matter.
            stop = self._tree.depth + 1
            path_BD = torch.where(verdict.path_BD < own, verdict.path_BD, 0)[:, :stop]
            accepted_B = (own_keep_B - 1).clamp(min=0)
            cut = replace(verdict, path_BD=path_BD, tokens_BD=verdict.tokens_BD[:, :stop], accepted_B=accepted_B)
            told_BX = self._tree.commit(cut, own_keep_B, features_BNF[:, :own])
        learnt_BX = self._grams.commit(verdict, keep_B, features_BNF)
        reports = [report for report in (told_BX, learnt_BX) if report is not None]
        self._told = 0 if told_BX is None else told_BX.shape[1]
        return torch.cat([own_keep_B[:, None], *reports], dim=1)

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Hand on what each reported."""
        self._own_kept = [report[0] for report in reports]
        stop = 1 + self._told
        if self._told:
            self._tree.receive([report[1:stop] for report in reports])
        if len(reports[0]) > stop:
            self._grams.receive([report[stop:] for report in reports])

    def sources(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the draft for what it drew, and a cache for what follows."""
        drawn = max(self._own_kept[row] - 1, 0)
        own = self._tree.sources(row, tokens[:drawn]) or [self._name] * len(tokens[:drawn])
        return [*own, *self._grams.sources(row, tokens)[drawn:]]

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Let the draft catch up with what came from n-grams."""
        self._grams.settle(texts, emitted)
        if self._tree.follows_any_path:
            self._tree.settle(texts, emitted)
            return
        known = [
            text[: len(text) - len(tokens) + kept] if tokens else text
            for text, tokens, kept in zip(texts, emitted, self._own_kept, strict=True)
        ]
        behind = [len(text) - len(short) for text, short in zip(texts, known, strict=True)]
        self._tree.settle(known, [tokens[: len(tokens) - less] for tokens, less in zip(emitted, behind, strict=True)])
        if any(behind):
            self._tree.catch_up(texts, [tokens[len(tokens) - less :] for tokens, less in zip(emitted, behind, strict=True)])

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Let both drop what lies beyond the texts."""
        self._tree.rewind(texts)
        self._grams.rewind(texts)
