"""A draft model as a source of distributions (MCSD §3)."""

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.draft.source import DistributionSource
from polydraft.models import LanguageModel, Memory
from polydraft.models.memory import NO_TEXT
from polydraft.models.prefixes import Prefixes
from polydraft.rows import ByRow
from polydraft.trees import Block, SlicedMask, StaticBlock, Topology
from polydraft.verify import Verdict


class ModelSource(DistributionSource):
    """A draft model's cache for one batch.

    The cache stays two tokens behind the text: the deepest accepted token never went through the draft, so each round starts
    with the last two. That is one token more in one pass, but no special case after full acceptance. In a text of one token the
    place before the root stays empty: it is masked, and not kept. After rounds without drafts, the text is read when drafts are
    wanted again.
    """

    ROW_STATE: ClassVar[tuple[str, ...]] = ("_texts", "_lone_B1")
    lead = 1
    movable = True

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        super().__init__(model.device, model.vocabulary)
        self._model = model
        self._memory = Memory(model, batch_size, behind=2, places=2)
        self.contexts = (self._memory.context,)
        self._lone_B1: Tensor | None = None
        """Rows whose text is one token; only in a first round."""
        self._longest = 0
        self._texts: Sequence[Sequence[int]] = [()] * batch_size
        self._skipped, self._behind = False, False
        """Whether the last round had no drafts, and whether there is text to read before the next round with drafts."""

    @property
    def obstacle(self) -> str | None:
        """Only a first round with a text of one token differs from the others."""
        return None if self._lone_B1 is None else "a text has only one token"

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Make room for a round's passes."""
        self._memory.places = self._memory.context.places = places

    def row_parts(self) -> Iterable[ByRow]:
        """Return the model's cache."""
        return (self._memory,)

    def new_row(self, name: str) -> Sequence[int] | bool:
        """Start without text."""
        return () if name == "_texts" else False

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Paste a text's cached prefix into a row, in place of all else."""
        self._memory.recall(row, text, space, prefixes)

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Copy a row's cache into the prefix cache; text not yet read is left out."""
        self._memory.keep(row, space, prefixes, whole=whole)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Read the texts."""
        self._longest, self._behind = longest, False
        self._memory.align(texts, longest)
        self._note(texts)
        lone = [row in rows and len(text) == 1 and text is not NO_TEXT for row, text in enumerate(texts)]
        self._lone_B1 = torch.tensor(lone, device=self.device)[:, None] if any(lone) else None

    def _note(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def root(self, tail_B2: Tensor) -> Tensor:
        """Pass the last two tokens."""
        if self._behind:
            self._memory.align(self._texts, self._longest)
            self._behind = False
        block = self._seen(_pair(self.device).expand(len(tail_B2)))
        return self._memory.context.extend(tail_B2, block)[:, 1:]

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Pass a level."""
        return self._memory.context.extend(tokens_BW, self._seen(block))

    def _seen(self, block: Block) -> Block:
        """Hide the empty place before the root in texts of one token."""
        if self._lone_B1 is None:
            return block
        depths_BT = (block.depths_BT - self._lone_B1.long()).clamp(min=0)
        visible_BTU = block.visible_BTU.clone()
        visible_BTU[:, 1 if block.start == 0 else 0 :, 0] &= ~self._lone_B1
        return Block(block.start, depths_BT, visible_BTU)

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Apply the output head."""
        return self._model.head(features_BWF)

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Keep the token before the root, the root, and the accepted path except its last token."""
        self._skipped = False
        places_BD = torch.nn.functional.pad(places_BD, (1, 0))
        if self._lone_B1 is not None:
            without_first_BD = places_BD.roll(-1, dims=1)
            places_BD = torch.where(self._lone_B1, without_first_BD, places_BD)
            keep_B = (keep_B - self._lone_B1[:, 0].long()).clamp(min=0)
            self._lone_B1 = None
        self._memory.context.commit(places_BD, keep_B)

    def skip(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Leave what was accepted unread."""
        self._skipped = True

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Store the new texts; what a round without drafts added is read later."""
        if self._skipped:
            self._behind = True
            self._note(texts)
        else:
            self._memory.settle(texts)

    def catch_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Read what other sources proposed; after a round without drafts, only when drafts are wanted again."""
        if self._behind:
            self._note(texts)
        else:
            self._memory.align(texts, self._longest)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what lies beyond the texts; a cache that is behind does so when it catches up."""
        if self._behind:
            self._note(texts)
        else:
            self._memory.rewind(texts)


@lru_cache(maxsize=4)
def _pair(device: torch.device) -> StaticBlock:
    """Return the pass over the last two tokens."""
    return SlicedMask.of(Topology(), device, lead=1).level(0, 1)
