"""Sources, which candidates come from: their interface."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from polydraft.models import Context
from polydraft.models.language_model import Observer
from polydraft.models.prefixes import Prefixes
from polydraft.rows import ByRow
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block
from polydraft.verify import Verdict


class Source(ByRow):
    """What a drafter keeps of one batch of texts: a draft's cache, or n-gram memories.

    `commit` runs on the device without looking at values; all other methods run on the host. The defaults keep nothing.
    """

    contexts: Sequence[Context] = ()
    """Caches that rounds write to."""
    follows_any_path: bool = False
    """Whether `commit` takes paths through nodes of other sources; if not, `catch_up` reads such text."""
    learns: bool = False
    """Whether what the host learns from a round may change what the source returns in the next one."""
    movable: bool = False
    """Whether rows can be swapped, see `swap_rows`."""
    borrowed_places: int = 0
    """Uncommitted places in the target's cache that a round uses, see `borrow`."""

    @property
    def obstacle(self) -> str | None:
        """Why the next round, unlike others, cannot be replayed from a capture."""
        return None

    @property
    def can_wait(self) -> bool:
        """Whether the next round may skip this source."""
        return self.obstacle is None

    @property
    def observer(self) -> Observer | None:
        """Callback that gets the target's features while it reads new texts."""
        return None

    def borrow(self, context: Context) -> None:
        """Take the target's own cache: a copy of the target works in it."""

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Get ready for rounds with up to `places` uncommitted tokens and accepted paths of up to `depth`.

        If rounds are `captured`, tensors must keep their addresses from round to round.
        """

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Return how many of each text's cached tokens the target may reuse; None for all.

        Only `rows` begin new texts; other rows go on with what they have.
        """
        return None

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Paste a text's cached prefix into a row, in place of all else; `prepare` and `begin` follow."""

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Copy a row's cache into the prefix cache: whole blocks only, or all of it."""

    def forget(self, rows: Sequence[int]) -> None:
        """Forget earlier texts of these rows: the next texts belong to other requests."""

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Get ready to continue `texts`, whose last token is pending, up to `longest` tokens; only `rows` are new."""

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Keep what the verdict accepted: the root and accepted nodes, `keep_B` in all; 0 for idle rows.

        Parameters
        ----------
        verdict : Verdict
        places_BD : Tensor
            The path's places in the source's own passes.
        keep_B : Tensor
        features_BNF : Tensor
            The target's, at all nodes.

        Returns
        -------
        Tensor, optional
            Whole numbers `[B, X]` that reach the host with the round's outcome and go to `receive`.
        """
        return None

    def skip(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Do what `commit` does, after a round that skipped this source."""

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take what `commit` returned, on the host and before `settle`."""
        raise NotImplementedError

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Store on the host the texts after the round, and the tokens that it added."""

    def catch_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Read the end of the texts, which the last round accepted from another source."""
        raise NotImplementedError

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`, after some were cut at their end."""


class DistributionSource(Source):
    """A source that returns a distribution over the next token for every node of a growing tree.

    Builders call `root` once per round, then `expand` for each further level; the places of both are uncommitted.
    """

    lead: int = 0
    """Places before the root in the source's passes."""
    keeps_text: bool = True
    """Whether the source keeps a cache of the text, so that it may have to read the root even if that is the whole tree."""

    def __init__(self, device: torch.device, vocabulary: PartialVocabulary | None = None) -> None:
        self.device, self.vocabulary = device, vocabulary
        """What the columns of `logits` stand for, if they are not all tokens."""

    def root(self, tail_B2: Tensor) -> Tensor:
        """Return features `[B, 1, F]` of the pending token, the second of each row's last two tokens.

        The first of them is 0 where a text has only one token.
        """
        raise NotImplementedError

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Return features `[B, W, F]` of a level's nodes.

        Parameters
        ----------
        tokens_BW : Tensor
        parents : Tensor
            Each node's parent, as an index into the last pass: `[B, W]`, or `[W]` for all rows.
        block : Block
            Positions of the nodes and what they see, including the `lead` places before the root.
        """
        raise NotImplementedError

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Return the logits of the token after each node."""
        raise NotImplementedError
