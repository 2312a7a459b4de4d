"""A small model grows a tree of static shape, level by level (MCSD §3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.decision import Decision
from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.growth import Growth, check_tree
from polydraft.drafters.plan import StaticBlock
from polydraft.errors import UsageError
from polydraft.models import Context, LanguageModel, Memory
from polydraft.sampling import RowParams
from polydraft.schemes import Scheme
from polydraft.trees import Block, DraftTree, Topology
from polydraft.walks import Verdict


class ModelTree(Drafter):
    """Draw the children of every node of a static tree from a draft model's law.

    Parameters
    ----------
    model : LanguageModel
        The draft; same tokens as the target.
    topology : Topology
    scheme : str or Scheme
        A registered scheme, ``"auto"``, or a scheme of your own; `top` where the draft temperature is 0.
    draft_temperature : float, optional
        Temperature of the draft's law, the target's otherwise. It changes speed, never the text's law.
    decision : Decision, optional
        Lets rows stop before the last level.
    """

    name = "model"

    def __init__(
        self,
        model: LanguageModel,
        topology: Topology,
        scheme: str | Scheme = "auto",
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.model, self.topology = model, topology
        self.scheme, self.draft_temperature, self.decision = scheme, draft_temperature, decision
        check_tree(topology, scheme, model.num_columns)

    def start(self, params: RowParams, target: LanguageModel) -> "ModelTreeSession":
        """Go to work on a batch."""
        return ModelTreeSession(self, params, target.vocab_size)


class ModelTreeSession(DraftSession):
    """A draft model's memory of one batch.

    The memory stays two tokens behind the text: the deepest accepted token never went through the draft, so each round
    starts with the last two. One token more in one pass, and no special case after full acceptance. In a text of one token
    the place before the root stays empty: nobody sees it, and it is not kept.
    """

    recordable = True
    needs_outcome = False

    def __init__(self, drafter: ModelTree, params: RowParams, vocab_size: int) -> None:
        batch_size = len(params)
        model, topology = drafter.model, drafter.topology
        self._growth = Growth(
            topology,
            drafter.scheme,
            params,
            drafter.draft_temperature,
            vocab_size,
            model.vocabulary,
            model.device,
            1,
            drafter.decision,
        )
        self.recordable = self._growth.decision is None  # type: ignore[misc]  # a decision model is looked at between levels
        self.num_nodes, self.depth = topology.num_nodes, topology.depth
        self._model = model
        self._memory = Memory(model, batch_size, behind=2, places=self.num_nodes + 1)
        self._lone_B1: Tensor | None = None
        """Rows whose text is the root alone; only in a first round."""
        self._longest = 0

    def contexts(self) -> Sequence[Context]:
        """Return the draft's memory."""
        return (self._memory.context,)

    def obstacle(self) -> str | None:
        """Name the decision model, if there is one; else only a first round on a text of one token is unlike the others."""
        if self._growth.decision is not None:
            return "the decision model is looked at between levels"
        return None if self._lone_B1 is None else "a text has only one token"

    def compile(self) -> None:
        """Compile the drawing of children."""
        self._growth.compile()

    @property
    def scheme(self) -> Scheme:
        """How children are drawn."""
        return self._growth.scheme

    @property
    def num_uniforms(self) -> int:
        """One per candidate."""
        return self.num_nodes - 1

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Read the texts."""
        self._longest = longest
        self._memory.align(texts, longest)
        lone = [row in rows and len(text) == 1 for row, text in enumerate(texts)]
        self._lone_B1 = torch.tensor(lone, device=self._model.device)[:, None] if any(lone) else None
        self._growth.begin(texts, rows, params)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass each level through the draft and draw the next one."""
        tokens_BN = self._growth.plant(tail_B2[:, 1])
        for level in self._growth.levels:
            level_tokens_BT = tail_B2 if level.block.start == 0 else tokens_BN[:, level.first : level.stop]
            features_BTF = self._memory.context.extend(level_tokens_BT, self._block(level.block, len(tail_B2)))
            drawing_BGF = features_BTF[:, level.drawing]
            logits_BGV = self._model.head(drawing_BGF)
            self._growth.draw(level, logits_BGV, tokens_BN, uniforms_BU)
            if self._growth.stops(drawing_BGF, logits_BGV):
                break
        return self._growth.tree(tokens_BN)

    def _block(self, static: StaticBlock, batch_size: int) -> Block:
        block = static.expand(batch_size)
        if self._lone_B1 is None:
            return block
        depths_BT = (block.depths_BT - self._lone_B1.long()).clamp(min=0)
        visible_BTU = block.visible_BTU.clone()
        visible_BTU[:, 1 if block.start == 0 else 0 :, 0] &= ~self._lone_B1
        return Block(block.start, depths_BT, visible_BTU)

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
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
        self._memory.settle(texts)
        self._growth.advance(emitted)

    def catch_up(self, texts: Sequence[Sequence[int]], added: Sequence[Sequence[int]]) -> None:
        """Read what others proposed."""
        self._memory.align(texts, self._longest)
        self._growth.advance(added)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts."""
        self._memory.rewind(texts)


@DRAFTERS.register("model")
def _build(parts: Parts) -> ModelTree:
    if not isinstance(parts.draft, LanguageModel):
        raise UsageError("drafter 'model' needs a draft model; pass draft=NAME, a folder, or early-exit:k")
    return ModelTree(parts.draft, parts.topology, parts.scheme, parts.draft_temperature, parts.decision)
