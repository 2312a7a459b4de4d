"""Where a draft's candidates come from, and what is remembered of a batch: the interface of sources."""

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
    """A draft's memory of one batch of texts.

    `commit` runs on the device without looking at values; the other methods talk to the host. All have a default that
    remembers nothing.
    """

    contexts: Sequence[Context] = ()
    """Memories that rounds write to."""
    follows_any_path: bool = False
    """Whether `commit` takes paths over nodes of other sources; if not, `catch_up` reads such text."""
    learns: bool = False
    """Whether what the host learns of a round may change what the source gives in the next one."""
    movable: bool = False
    """Whether rows can be swapped, see `swap_rows`."""
    borrowed_places: int = 0
    """Uncommitted places in the target's memory that a round uses, see `borrow`."""

    @property
    def obstacle(self) -> str | None:
        """Why the next round, unlike others, cannot be replayed from a capture."""
        return None

    @property
    def can_wait(self) -> bool:
        """Whether the next round may leave this source out."""
        return self.obstacle is None

    @property
    def observer(self) -> Observer | None:
        """Callback that sees the target's features while it reads new texts."""
        return None

    def borrow(self, context: Context) -> None:
        """Use the target's own memory: a copy of the target works in it."""

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Get ready for rounds of up to `places` uncommitted tokens and accepted paths of up to `depth`.

        Tensors must stay where they are from round to round if rounds are `captured`.
        """

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Return how many tokens of each text the target need not read again; None for all that it has read.

        Only `rows` begin new texts; the others go on with what they have.
        """
        return None

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Hold in a row what is known of a text's beginning, and nothing else; `prepare` and `begin` follow."""

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Keep a copy of what is held in a row for texts that begin alike, of whole blocks only or to its end."""

    def forget(self, rows: Sequence[int]) -> None:
        """Forget earlier texts of these rows: the next texts belong to other requests."""

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Get ready to continue `texts`, whose last token is pending, up to `longest` tokens; only `rows` are new."""

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Follow the verdict: the root and accepted nodes, `keep_B` in all, are certain; 0 for idle rows.

        Parameters
        ----------
        verdict : Verdict
        places_BD : Tensor
            Where the source's own passes put the nodes of the path.
        keep_B : Tensor
        features_BNF : Tensor
            The target's, of all nodes.

        Returns
        -------
        Tensor, optional
            Whole numbers `[B, X]` that reach the host with the round's outcome and go to `receive`.
        """
        return None

    def skip(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Do the same after a round in which nothing was drafted."""

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take on the host what `commit` returned, before `settle`."""
        raise NotImplementedError

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Record on the host the texts after the round, and the tokens that it added."""

    def catch_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Read the end of the texts, which the last round accepted from another source."""
        raise NotImplementedError

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`, after some were cut off at their end."""


class DistributionSource(Source):
    """A source that gives every node of a growing tree a distribution over the next token.

    Builders call `root` once per round, then `expand` for each further level; places of both count as uncommitted.
    """

    lead: int = 0
    """Places before the root in the source's passes."""

    def __init__(self, device: torch.device, vocabulary: PartialVocabulary | None = None) -> None:
        self.device, self.vocabulary = device, vocabulary
        """What the columns of `logits` mean, where they are not all tokens."""

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
            Which node of the last pass is each one's parent: `[B, W]`, or `[W]` for all rows.
        block : Block
            Positions of the nodes and what they see, `lead` places before the root included.
        """
        raise NotImplementedError

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Return the logits of the token after each node."""
        raise NotImplementedError
