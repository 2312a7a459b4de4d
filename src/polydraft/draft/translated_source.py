"""A draft model with another tokenizer as a source of distributions: it reads the text in its own tokens."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.devices import assign
from polydraft.draft.model_source import ModelSource
from polydraft.models.prefixes import Prefixes
from polydraft.models.translation import Translated, TranslatedModel
from polydraft.trees import Block


class TranslatedSource(ModelSource):
    """The cache of a draft with tokens of its own.

    Every node of a tree is a token that both models have, so it is one token of the draft's. After a round the text is
    translated again; the cache keeps the common prefix, and the rest is read.
    """

    ROW_STATE = (*ModelSource.ROW_STATE, "_translated", "_tail_B2")
    learns = True

    def __init__(self, model: TranslatedModel, batch_size: int) -> None:
        super().__init__(model, batch_size)
        self._own_X, self._shared, self._translation = model.own_X, model.shared, model.translation
        self._translated = [Translated()] * batch_size
        self._tail_B2 = torch.zeros(batch_size, 2, dtype=torch.long, device=self.device)
        """The last two of the draft's tokens in each text."""

    def new_row(self, name: str) -> Any:
        """Start without text."""
        if name == "_tail_B2":
            return 0
        return Translated() if name == "_translated" else super().new_row(name)

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Paste the cached prefix of a text, in the draft's tokens, into a row, in place of all else."""
        self._translated[row] = self._translation.translate(text, Translated())
        super().recall(row, self._translated[row].ids, space, prefixes)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Read the texts."""
        own = self._translate(texts, longest)
        super().begin(own, self._longest, rows)

    def _translate(self, texts: Sequence[Sequence[int]], longest: int = 0) -> list[Sequence[int]]:
        """Return the texts in the draft's tokens, and make room for them."""
        translate = self._translation.translate
        self._translated = [translate(*pair) for pair in zip(texts, self._translated, strict=True)]
        own = [one.ids for one in self._translated]
        assign(self._tail_B2, [ids[-2:] for ids in own])
        needed = max(map(len, own))
        if longest:  # assume that the rest of the text has as many tokens as for the target
            self._longest = max(needed, longest + max(len(ids) - len(text) for ids, text in zip(own, texts, strict=True)))
        elif needed > self._longest:
            self._longest = needed + needed // 4  # with a margin, because caches move when they grow
        return own

    def root(self, tail_B2: Tensor) -> Tensor:
        """Pass the draft's last two tokens."""
        return super().root(self._tail_B2)

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Pass a level, in the draft's tokens."""
        return super().expand(self._own_X[tokens_BW], parents, block)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Keep what the cache shares with the new texts, and read the rest."""
        if not self._skipped:
            # The last token went through no pass, so any token may stand for it here.
            left = zip(self._translated, emitted, strict=True)
            self._memory.settle([[*one.ids, *(self._shared.get(token, 0) for token in tokens)] for one, tokens in left])
        self._behind = self._behind or self._skipped
        self.catch_up(texts)

    def catch_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Read what the cache does not hold; after a round without drafts, only when drafts are wanted again."""
        super().catch_up(self._translate(texts))

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Translate and read the texts again: once cut, they may end in other tokens."""
        self.catch_up(texts)
