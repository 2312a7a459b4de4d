"""A feature head grows a tree of static shape from the target's hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.decision import Decision
from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.growth import Growth, check_tree
from polydraft.errors import UsageError
from polydraft.models import Context, FeatureHead, LanguageModel
from polydraft.models.language_model import assign
from polydraft.models.memory import common_prefix
from polydraft.sampling import RowParams
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree, Topology, causal_block
from polydraft.walks import Verdict


class HeadTree(Drafter):
    """Draw the children of every node of a static tree from a feature head's law.

    Parameters
    ----------
    model : FeatureHead
        Trained for the target.
    topology, scheme, draft_temperature, decision
        As for `ModelTree`.
    """

    name = "head"

    def __init__(
        self,
        model: FeatureHead,
        topology: Topology,
        scheme: str = "auto",
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.model, self.topology = model, topology
        self.scheme, self.draft_temperature, self.decision = scheme, draft_temperature, decision
        check_tree(topology, scheme, model.num_columns)

    def start(self, params: RowParams, target: LanguageModel) -> "HeadTreeSession":
        """Go to work on a batch."""
        return HeadTreeSession(self, params, target.vocab_size)


class HeadTreeSession(DraftSession):
    """A feature head's memory of one batch.

    Slot i holds the entry of the target's features at position i and the token at i + 1. Each round begins with the
    entries that the last one made certain (`fresh`): the accepted tokens and the pending one, the root, now with the
    target's true features instead of the head's guesses. In a text of one token nothing precedes the root: its entry
    has no features, and is not kept.
    """

    reads_features = True
    recordable = True
    needs_outcome = False
    follows_any_path = True

    def __init__(self, drafter: HeadTree, params: RowParams, vocab_size: int) -> None:
        batch_size = len(params)
        head, topology = drafter.model, drafter.topology
        self._growth = Growth(
            topology,
            drafter.scheme,
            params,
            drafter.draft_temperature,
            vocab_size,
            head.vocabulary,
            head.device,
            0,
            drafter.decision,
        )
        self.recordable = self._growth.decision is None  # type: ignore[misc]  # a decision model is looked at between levels
        self.num_nodes, self.depth = topology.num_nodes, topology.depth
        self._head = head
        self._places = self.num_nodes + self.depth + 1
        self._context = head.start(batch_size, self._places)
        self._context.places = self._places
        self._texts: list[Sequence[int]] = [()] * batch_size
        self._tokens_BW = torch.zeros(batch_size, self.depth + 1, dtype=torch.long, device=head.device)
        self._features_BWF: Tensor | None = None
        """The target's; known once it has shown some."""
        self._fresh_block = causal_block(batch_size, self.depth + 1, head.device)
        self._fresh_B = torch.zeros_like(self._tokens_BW[:, 0])
        """How many of the W entries above are real."""
        self._lone_B: Tensor | None = None
        """Rows whose text is the root alone; only in a first round."""
        self._begun: Sequence[int] = range(batch_size)
        """Rows whose texts are being read."""
        self._seen = False

    @property
    def scheme(self) -> Scheme:
        """How children are drawn."""
        return self._growth.scheme

    @property
    def num_uniforms(self) -> int:
        """One per candidate."""
        return self.num_nodes - 1

    def contexts(self) -> Sequence[Context]:
        """Return the head's memory."""
        return (self._context,)

    def obstacle(self) -> str | None:
        """Name the decision model, if there is one; else only a first round on a text of one token is unlike the others."""
        if self._growth.decision is not None:
            return "the decision model is looked at between levels"
        return "a text has only one token" if self._lone_B is not None or self._features_BWF is None else None

    def compile(self) -> None:
        """Compile the drawing of children."""
        self._growth.compile()

    def expect(self, depth: int) -> None:
        """Make room for as many fresh entries."""
        width = max(depth, self.depth) + 1
        self._places = self._context.places = self.num_nodes + width
        self._tokens_BW = self._tokens_BW.new_zeros(len(self._tokens_BW), width)
        self._fresh_block = causal_block(len(self._tokens_BW), width, self._head.device)

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Keep entries whose features and token are the new text's too; the root's features must be seen again."""
        self._context.reserve(longest + self._places)
        kept, limits = list(self._context.lengths), [len(text) for text in texts]
        for row in rows:
            shared = common_prefix(self._texts[row], texts[row])
            kept[row] = limits[row] = max(min(kept[row], shared - 1, len(texts[row]) - 2), 0)
            if self._features_BWF is not None:
                self._features_BWF[row].zero_()
        self._texts, self._seen, self._begun = list(texts), False, rows
        self._context.rewind(kept)
        return limits

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """Read entries along with the target; the root's waits for the first round."""
        if not self._seen:
            held = self._context.lengths
            self._context.rewind([start if row in self._begun else held[row] for row, start in enumerate(starts)])
            self._seen = True
        last = [start + count == len(text) - 1 for start, count, text in zip(starts, counts, self._texts, strict=True)]
        if self._features_BWF is None:
            self._features_BWF = features_BTF.new_zeros(*self._tokens_BW.shape, features_BTF.shape[-1])
        for row, (count, ends) in enumerate(zip(counts, last, strict=True)):
            if count and ends:
                self._features_BWF[row, 0] = features_BTF[row, count - 1]
        kept = [count - (ends and count > 0) for count, ends in zip(counts, last, strict=True)]
        size = max(kept)
        if size:
            following = [
                list(text[start + 1 : start + 1 + count]) for text, start, count in zip(self._texts, starts, kept, strict=True)
            ]
            tokens_BT = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in following], device=self._head.device)
            self._context.reserve(max(self._context.lengths) + size)
            fused_BTH = self._head.fused(features_BTF[:, :size])
            self._context.read(tokens_BT, fused_BTH, causal_block(len(counts), size, self._head.device))
        self._context.rewind([length + count for length, count in zip(self._context.lengths, kept, strict=True)])

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Take the roots as they are."""
        index_X = torch.tensor(list(rows), device=self._head.device)
        self._tokens_BW[index_X, 0] = torch.tensor([texts[row][-1] for row in rows], device=self._head.device)
        self._fresh_B[index_X] = 1
        lone = [row in rows and len(text) == 1 for row, text in enumerate(texts)]
        self._lone_B = torch.tensor(lone, device=self._head.device) if any(lone) else None
        self._growth.begin(texts, rows, params)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Make the fresh entries certain, then pass each level through the head and draw the next one."""
        batch_size, rows_B = len(tail_B2), torch.arange(len(tail_B2), device=tail_B2.device)
        outputs_BWH = self._context.read(self._tokens_BW, self._fused_fresh(), self._fresh_block)
        before_root_B = (self._fresh_B - 1).clamp(min=0)
        self._context.advance(before_root_B)
        self._context.settle([max(len(text) - 2, 0) for text in self._texts])
        tokens_BN = self._growth.plant(tail_B2[:, 1])
        outputs_BNH = outputs_BWH.new_zeros(batch_size, self.num_nodes, outputs_BWH.shape[-1])
        outputs_BNH[:, 0] = outputs_BWH[rows_B, before_root_B]
        for level in self._growth.levels:
            if level.first > 0:
                fused_BTH = outputs_BNH[:, level.parents_T]
                level_tokens_BT = tokens_BN[:, level.first : level.stop]
                outputs_BTH = self._context.read(level_tokens_BT, fused_BTH, level.block.expand(batch_size))
                outputs_BNH[:, level.first : level.stop] = outputs_BTH
            drawing_BGH = outputs_BNH[:, level.first : level.stop][:, level.drawing]
            logits_BGV = self._head.head(drawing_BGH)
            self._growth.draw(level, logits_BGV, tokens_BN, uniforms_BU)
            if self._growth.stops(drawing_BGH, logits_BGV):
                break
        return self._growth.tree(tokens_BN)

    def _fused_fresh(self) -> Tensor:
        if self._features_BWF is None:  # nothing but texts of one token
            return torch.zeros(
                *self._tokens_BW.shape, self._head.shape.hidden_size, dtype=self._head.dtype, device=self._head.device
            )
        return self._head.fused(self._features_BWF)

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Keep the root's entry; what follows it is read again with the target's features."""
        root_B = (keep_B > 0).long()
        if self._lone_B is not None:
            root_B = root_B * ~self._lone_B
            self._lone_B = None
        self._context.advance(root_B)
        index_BDF = verdict.path_BD[:, :, None].expand(-1, -1, features_BNF.shape[-1])
        features_BWF = features_BNF.gather(1, index_BDF)
        if self._features_BWF is None:
            self._features_BWF = features_BWF
        self._features_BWF.copy_(features_BWF)
        self._tokens_BW.copy_(verdict.tokens_BD)
        self._fresh_B.copy_(keep_B)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note of the new texts."""
        self._context.settle(
            [
                # A row that got nothing has idled through a round, which has read all its fresh entries.
                len(text) - len(tokens) - 1 if tokens else max(len(text) - 2, 0)
                for text, tokens in zip(texts, emitted, strict=True)
            ]
        )
        self._texts = list(texts)
        self._growth.advance(emitted)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts; of a text cut off inside the last round, so many fresh entries are left."""
        held = [min(length, max(len(text) - 2, 0)) for length, text in zip(self._context.lengths, texts, strict=True)]
        fresh = [max(len(text) - 1 - length, 0) for text, length in zip(texts, held, strict=True)]
        self._context.rewind(held)
        assign(self._fresh_B, fresh)
        self._texts = list(texts)


@DRAFTERS.register("head")
def _build(parts: Parts) -> HeadTree:
    if not isinstance(parts.draft, FeatureHead):
        raise UsageError("drafter 'head' needs a feature head; make one with: polydraft train head")
    return HeadTree(parts.draft, parts.topology, parts.scheme, parts.draft_temperature, parts.decision)
