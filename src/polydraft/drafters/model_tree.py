"""A small model grows a tree of static shape, level by level (MCSD §3)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.errors import UsageError
from polydraft.models import LanguageModel, Memory
from polydraft.sampling import NO_TOKEN, SamplingParams, Warper
from polydraft.schemes import SCHEMES
from polydraft.trees import Block, DraftTree, Topology
from polydraft.walks import Verdict


class ModelTree(Drafter):
    """Draw the children of every node of a static tree from a draft model's law.

    Parameters
    ----------
    model : LanguageModel
        The draft; same tokens as the target.
    topology : Topology
    scheme : str
        A registered scheme, or ``"auto"``: `rrs-wor`, and `top` where the draft temperature is 0.
    draft_temperature : float, optional
        Temperature of the draft's law, the target's otherwise. It changes speed, never the text's law.
    """

    name = "model"

    def __init__(
        self, model: LanguageModel, topology: Topology, scheme: str = "auto", draft_temperature: float | None = None
    ) -> None:
        self.model, self.topology = model, topology
        self.scheme, self.draft_temperature = scheme, draft_temperature
        if scheme != "auto":
            limit = SCHEMES.get(scheme).max_children
            if limit is not None and topology.max_children > limit:
                raise UsageError(
                    f"scheme {scheme!r} takes at most {limit} candidate a node but tree {topology} has up to "
                    f"{topology.max_children}; use a chain such as 1x1x1 or scheme rrs-wor"
                )
        if topology.max_children > model.vocab_size:
            raise UsageError(
                f"tree {topology} wants {topology.max_children} candidates a node but the vocabulary has only "
                f"{model.vocab_size} tokens; use smaller widths"
            )

    def start(self, batch_size: int, params: SamplingParams, target: LanguageModel) -> "ModelTreeSession":
        """Go to work on a batch."""
        temperature = params.temperature if self.draft_temperature is None else self.draft_temperature
        scheme = self.scheme if self.scheme != "auto" else "rrs-wor"
        if temperature == 0:
            scheme = "top"
        params = dataclasses.replace(params, temperature=temperature)
        return ModelTreeSession(self, batch_size, params, scheme, target.vocab_size)


class ModelTreeSession(DraftSession):
    """A draft model's memory of one batch.

    The memory stays two tokens behind the text: the deepest accepted token never went through the draft, so each round
    starts with the last two. One token more in one pass, and no special case after full acceptance. In a text of one token
    the place before the root stays empty: nobody sees it, and it is not kept.
    """

    def __init__(self, drafter: ModelTree, batch_size: int, params: SamplingParams, scheme: str, vocab_size: int) -> None:
        self.topology = drafter.topology
        self.scheme = SCHEMES.get(scheme)()
        self.num_nodes, self.depth = self.topology.num_nodes, self.topology.depth
        self.num_uniforms = self.num_nodes - 1
        self._model, self._params, self._vocab_size = drafter.model, params, vocab_size
        self._plan = _plan(self.topology, drafter.model.device)
        self._memory = Memory(drafter.model, batch_size, behind=2, places=self.num_nodes + 1)
        self._warper: Warper | None = None
        self._lone_B1: Tensor | None = None
        """Rows whose text is the root alone; only in a first round."""

    def begin(self, texts: Sequence[Sequence[int]], longest: int) -> None:
        """Read the texts."""
        self._memory.align(texts, longest)
        lone = [len(text) == 1 for text in texts]
        self._lone_B1 = torch.tensor(lone, device=self._model.device)[:, None] if any(lone) else None
        self._warper = Warper(self._params, self._vocab_size, texts, self._model.device)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass each level through the draft and draw the next one."""
        assert self._warper is not None, "begin() comes first"
        batch_size = len(tail_B2)
        tokens_BN = torch.full((batch_size, self.num_nodes), NO_TOKEN, device=tail_B2.device)
        tokens_BN[:, 0] = tail_B2[:, 1]
        laws = []
        for level in self._plan.levels:
            level_tokens_BT = tail_B2 if level.block.start == 0 else tokens_BN[:, level.first : level.stop]
            features_BTF = self._memory.context.extend(level_tokens_BT, self._block(level.block, batch_size))
            logits_BGV = self._logits(features_BTF[:, level.drawing])
            # At temperature 0 the law is one token; the children are the next ones in order as well.
            weigh = self._warper.probs if self._params.temperature > 0 else self._warper.ranking
            probs_BGV = weigh(logits_BGV, tokens_BN[:, level.paths_GP])
            for group in level.groups:
                law_RV = probs_BGV[:, group.rows].flatten(0, 1)
                uniforms_RK = uniforms_BU[:, group.children_GK - 1].flatten(0, 1)
                children_RK = self.scheme.draw(law_RV, uniforms_RK)
                tokens_BN[:, group.children_GK] = children_RK.view(batch_size, *group.children_GK.shape)
            laws.append(probs_BGV)
        return DraftTree.from_topology(self.topology, tokens_BN, tuple(laws), self._plan.law_rows_N)

    def _block(self, static: "_StaticBlock", batch_size: int) -> Block:
        block = static.expand(batch_size)
        if self._lone_B1 is None:
            return block
        depths_BT = (block.depths_BT - self._lone_B1.long()).clamp(min=0)
        visible_BTU = block.visible_BTU.clone()
        visible_BTU[:, 1 if block.start == 0 else 0 :, 0] &= ~self._lone_B1
        return Block(block.start, depths_BT, visible_BTU)

    def _logits(self, features_BGF: Tensor) -> Tensor:
        """Logits over the target's vocabulary; padding rows of either model's table never get mass."""
        logits_BGV = self._model.head(features_BGF)
        missing = self._vocab_size - logits_BGV.shape[-1]
        return torch.nn.functional.pad(logits_BGV, (0, missing), value=-torch.inf) if missing else logits_BGV

    def commit(self, verdict: Verdict, keep_B: Tensor) -> None:
        """Keep the token before the root, the root, and the accepted path but its last token."""
        places_BD = torch.nn.functional.pad(verdict.path_BD + 1, (1, 0))
        if self._lone_B1 is not None:
            without_first_BD = places_BD.roll(-1, dims=1)
            places_BD = torch.where(self._lone_B1, without_first_BD, places_BD)
            keep_B = (keep_B - self._lone_B1[:, 0].long()).clamp(min=0)
            self._lone_B1 = None
        self._memory.context.commit(places_BD, keep_B)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note of the new texts."""
        assert self._warper is not None, "begin() comes first"
        self._memory.settle(texts)
        self._warper.advance(emitted)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts."""
        self._memory.rewind(texts)


@dataclass(frozen=True, eq=False)
class _StaticBlock:
    """A `Block` that is the same for all rows."""

    start: int
    depths_T: Tensor
    visible_TU: Tensor

    def expand(self, batch_size: int) -> Block:
        return Block(self.start, self.depths_T.expand(batch_size, -1), self.visible_TU.expand(batch_size, -1, -1))


@dataclass(frozen=True, eq=False)
class _GroupPlan:
    rows: Tensor
    """Which of the level's laws."""
    children_GK: Tensor


@dataclass(frozen=True, eq=False)
class _LevelPlan:
    first: int
    stop: int
    block: _StaticBlock
    drawing: Tensor
    """Which tokens of the block have children."""
    paths_GP: Tensor
    """Nodes from below the root to each drawing node."""
    groups: tuple[_GroupPlan, ...]


@dataclass(frozen=True, eq=False)
class _Plan:
    levels: tuple[_LevelPlan, ...]
    law_rows_N: Tensor


@lru_cache(maxsize=64)
def _plan(topology: Topology, device: torch.device) -> _Plan:
    """Lay out the draft's passes: place 0 is the token before the root, node n has place n + 1."""
    tables = topology.tables(torch.device("cpu"))
    places = topology.num_nodes + 1
    visible_PP = torch.ones(places, places, dtype=torch.bool)
    visible_PP[0, 1:] = False
    visible_PP[1:, 1:] = tables.ancestors_NN
    depths_P = torch.cat([torch.zeros(1, dtype=torch.long), tables.depths_N + 1])
    law_rows_N = torch.zeros(topology.num_nodes, dtype=torch.long)
    levels = []
    for nodes, draws in zip(topology.levels, topology.draws, strict=True):
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        law_rows_N[drawing] = torch.arange(len(drawing))
        first, stop = nodes.start, drawing[-1] + 1  # leaves at the level's end need no pass
        start = 0 if first == 0 else first + 1
        block = _StaticBlock(start, depths_P[start : stop + 1].to(device), visible_PP[start : stop + 1, : stop + 1].to(device))
        ancestors = [tables.ancestors_NN[node].nonzero()[1:, 0].tolist() for node in drawing]
        groups = tuple(
            _GroupPlan(law_rows_N[list(group.nodes)].to(device), torch.tensor(group.children, device=device)) for group in draws
        )
        levels.append(
            _LevelPlan(
                first,
                stop,
                block,
                torch.tensor([node + 1 - start for node in drawing], device=device),
                torch.tensor(ancestors, dtype=torch.long, device=device).reshape(len(drawing), -1),
                groups,
            )
        )
    return _Plan(tuple(levels), law_rows_N.to(device))


@DRAFTERS.register("model")
def _build(parts: Parts) -> ModelTree:
    if parts.draft is None:
        raise UsageError("drafter 'model' needs a draft model; pass draft=NAME, a folder, or early-exit:k")
    return ModelTree(parts.draft, parts.topology, parts.scheme, parts.draft_temperature)
