"""A draft that knows only part of the target's tokens."""

from dataclasses import dataclass

from torch import Tensor

from polydraft.sampling.categorical import NO_TOKEN


@dataclass(frozen=True, eq=False)
class PartialVocabulary:
    """Which tokens a draft's short law speaks of; all others have no mass.

    Frequent tokens carry nearly all of a text, while the time of a small draft goes mostly into its output head. A law
    stays short as long as possible: verification asks for few of them in full.
    """

    tokens_D: Tensor
    """Token id of each column of a short law, ascending."""
    size: int
    """Tokens of the full vocabulary."""

    def spread(self, short_RD: Tensor, fill: float = 0.0) -> Tensor:
        """Return rows over the full vocabulary, `fill` where the draft knows nothing."""
        full_RV = short_RD.new_full((*short_RD.shape[:-1], self.size), fill)
        return full_RV.scatter_(-1, self.tokens_D.expand_as(short_RD), short_RD)

    def tokens(self, columns: Tensor) -> Tensor:
        """Turn columns of a short law into token ids; `NO_TOKEN` stays."""
        known = columns != NO_TOKEN
        return self.tokens_D[columns.clamp(min=0)].where(known, columns)
