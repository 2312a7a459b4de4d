"""What a model holds of the texts of a batch, and how it comes to hold others."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from polydraft.models.language_model import LanguageModel, Observer
from polydraft.rows import ByRow

if TYPE_CHECKING:
    from polydraft.models.prefixes import Prefixes

NO_TEXT: Sequence[int] = (0,)
"""Stands for the text of a row that has none."""


class Memory(ByRow):
    """Committed text of a batch in one model.

    Parameters
    ----------
    behind : int
        How many of a text's last tokens stay out, to be passed through the model in the next round.
    places : int
        Uncommitted tokens a round may add.
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
        """Begin with no text."""
        return ()

    def align(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        limits: Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Hold `texts` (less the last few tokens) and make room for them to grow to `longest` tokens.

        Of what is held already at most `limits` tokens per row are kept; the rest is read again, for the observer.
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
        """Hold in a row what is known of a text's beginning, and nothing else; return how many tokens that are."""
        known = prefixes.paste(self.context, row, space, text[: max(len(text) - self.behind, 0)])
        self._texts[row] = text[:known]
        self.context.rewind([known if one == row else length for one, length in enumerate(self.context.lengths)])
        return known

    def keep(self, row: int, space: Hashable, prefixes: "Prefixes", *, whole: bool) -> None:
        """Keep a copy of what is held in a row for texts that begin alike, of whole blocks only or to its end."""
        prefixes.keep(self.context, row, space, self._texts[row][: self.context.lengths[row]], whole=whole)

    def settle(self, texts: Sequence[Sequence[int]]) -> None:
        """Record on the host what a round has committed."""
        self._texts = list(texts)
        self.context.settle(self._lengths(texts))

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`."""
        self._texts = list(texts)
        self.context.rewind(self._lengths(texts))

    def _lengths(self, texts: Sequence[Sequence[int]]) -> list[int]:
        return [max(len(text) - self.behind, 0) for text in texts]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which both texts begin."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:  # nearly always, and compared outside Python
        return shorter
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
