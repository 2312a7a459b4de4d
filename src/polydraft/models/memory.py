"""The texts that a model's context holds, and how they are replaced by others."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from polydraft.models.language_model import LanguageModel, Observer
from polydraft.rows import ByRow

if TYPE_CHECKING:
    from polydraft.models.prefixes import Prefixes

NO_TEXT: Sequence[int] = (0,)
"""Placeholder for the text of an empty row."""


class Memory(ByRow):
    """The committed texts of a batch in one model's context.

    Parameters
    ----------
    behind : int
        How many of a text's last tokens are left out, because the next round passes them through the model.
    places : int
        Uncommitted tokens that a round may add.
    """

    ROW_STATE = ("_texts",)

    def __init__(self, model: LanguageModel, batch_size: int, behind: int, places: int) -> None:
        self.behind, self.places = behind, places
        self.context = model.start(batch_size, capacity=places)
        self.context.places = places
        self._texts: list[Sequence[int]] = [()] * batch_size

    def row_parts(self) -> Iterable[ByRow]:
        """Return the context."""
        return (self.context,)

    def new_row(self, name: str) -> Sequence[int]:
        """Start without text."""
        return ()

    def align(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        limits: Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Read whatever is missing of `texts` (less their last tokens), with room for them to grow to `longest` tokens.

        At most `limits` tokens per row are kept of what the rows hold already; the observer sees the others being read again.
        """
        self.context.reserve(longest + self.places)
        wanted = [text[: max(len(text) - self.behind, 0)] for text in texts]
        held = [text[:length] for text, length in zip(self._texts, self.context.lengths, strict=True)]
        kept = [common_prefix(*pair) for pair in zip(held, wanted, strict=True)]
        if limits is not None:
            kept = [min(pair) for pair in zip(kept, limits, strict=True)]
        kept = self.context.keepable(kept)
        self.context.rewind(kept)
        self._texts = list(texts)  # before reading: an interrupted prefill then leaves a beginning of these texts
        self.context.prefill([text[length:] for text, length in zip(wanted, kept, strict=True)], observer)

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: "Prefixes") -> int:
        """Replace a row's text by as much of `text` as is stored in `prefixes`; return how many tokens that is."""
        known = prefixes.paste(self.context, row, space, text[: max(len(text) - self.behind, 0)])
        self._texts[row] = text[:known]
        self.context.rewind([known if one == row else length for one, length in enumerate(self.context.lengths)])
        return known

    def keep(self, row: int, space: Hashable, prefixes: "Prefixes", *, whole: bool) -> None:
        """Store a row's text in `prefixes` for texts with the same beginning, up to its end or only its `whole` blocks."""
        prefixes.keep(self.context, row, space, self._texts[row][: self.context.lengths[row]], whole=whole)

    def settle(self, texts: Sequence[Sequence[int]]) -> None:
        """Set the host's copy of the texts after a round has committed tokens."""
        self._texts = list(texts)
        self.context.settle(self._lengths(texts))

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`."""
        self._texts = list(texts)
        self.context.rewind(self._lengths(texts))

    def _lengths(self, texts: Sequence[Sequence[int]]) -> list[int]:
        return [max(len(text) - self.behind, 0) for text in texts]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that both texts start with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # the usual case, and fast: compared in C
        return shorter
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
