"""The one interface of everything that proposes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from polydraft.decision import Decision
from polydraft.drafters.gram_options import GramTreeOptions
from polydraft.models import Context, FeatureHead, LanguageModel
from polydraft.registry import Registry
from polydraft.sampling import RowParams
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree, DynamicShape, Topology
from polydraft.walks import Verdict, Walk, resolve_walk


class DraftSession(ABC):
    """A drafter at work on one batch.

    `propose` and `commit` run on the device without looking at values; the others talk to the host. Before a batch's first
    round come `prepare`, then `observe` for each part of the texts that the target reads, then `begin`.
    """

    num_nodes: int
    """Most nodes a proposal has, the root included."""
    depth: int
    """Levels below the root of every proposal."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """How the next proposals are drawn, and so how they must be verified: it may change with the rows' parameters."""

    @property
    @abstractmethod
    def num_uniforms(self) -> int:
        """Random numbers per row that the next `propose` uses."""

    def contexts(self) -> Sequence[Context]:
        """Return the memories that rounds write to."""
        return ()

    recordable: ClassVar[bool] = False
    """Whether `propose` and `commit` work on tensors alone, which stay where they are from round to round and from one text
    to the next, so that a round can be recorded as a CUDA graph; and whether nothing else is carried over to other texts."""

    drafts_on_host: ClassVar[bool] = False
    """Whether `host_tree` and `with_host_tree` together do what `propose` does, and the latter and `commit` work on tensors
    alone. Then all of a round but `host_tree` can be recorded, and is replayed for other texts too: `forget` must leave nothing
    of the earlier ones."""

    needs_outcome: ClassVar[bool] = True
    """Whether what the host learns of a round, through `receive` and `settle`, may change what the next one does."""

    def obstacle(self) -> str | None:
        """Say why the next round, unlike others, cannot be replayed from a recording; None if it can."""
        return None

    def compile(self) -> None:
        """Compile what is worth it on a GPU; nothing unless overridden."""
        return None

    own_walk: Walk | None = None
    """How the proposals must be verified, where no registered walk will do; only lossy drafters have one."""

    reads_features: ClassVar[bool] = False
    """Whether the session wants to see the target's features of the texts, through `observe`."""
    follows_any_path: ClassVar[bool] = False
    """Whether `commit` takes paths over nodes that were not proposed here; if not, `catch_up` reads such text."""

    def catch_up(self, texts: Sequence[Sequence[int]], added: Sequence[Sequence[int]]) -> None:
        """Read the end of each text, `added`, which the last round accepted from others; what was learnt so far stays."""
        raise NotImplementedError

    def expect(self, depth: int) -> None:  # noqa: B027 (most need not know)
        """Be ready for verdicts on paths of up to `depth` tokens, some proposed by others."""

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Say how many tokens of each text, read before, need no second look; None for all of them.

        Only `rows` begin new texts; the others go on with what they have.
        """
        return None

    def observe(self, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """See the target's features of `counts` tokens of each text from position `starts` on."""
        raise NotImplementedError

    def forget(self, rows: Sequence[int]) -> None:  # noqa: B027 (most keep nothing that `prepare` does not govern)
        """Drop what is known of earlier texts of these rows: those to come are somebody else's."""

    @abstractmethod
    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Get ready to continue `texts`, whose last token is pending, up to `longest` tokens.

        Only `rows` are new; the others go on, and what was learnt of them stays. `params` are those of all rows from now on.
        """

    @abstractmethod
    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Grow a tree below the pending token, the second of each row's last two tokens.

        The first of them is 0 where a text has only one token.
        """

    def host_tree(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Return what the host proposes; all of `propose` unless overridden."""
        return self.propose(tail_B2, uniforms_BU)

    def with_host_tree(self, tree: DraftTree, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Complete the host's proposal; it is complete unless this is overridden."""
        return tree

    @abstractmethod
    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Follow the verdict: the root and accepted nodes, `keep_B` in all, are certain; 0 for idle rows.

        `features_BNF` are the target's, of all nodes. Whole numbers `[B, X]` that are returned reach the host with the
        round's outcome, without a copy of their own, and go to `receive`.
        """

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take on the host what `commit` returned, before `settle`."""
        raise NotImplementedError

    def sources(self, row: int, tokens: Sequence[int]) -> Sequence[str] | None:
        """Say who proposed each of a row's accepted tokens; None if the drafter itself is the only answer."""
        return None

    @abstractmethod
    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note on the host of the texts after the round and of what the round added."""

    @abstractmethod
    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`, after some were cut off at their end."""


class Drafter(ABC):
    """A source of candidates, free of any one text."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    """Whether texts follow the target's law; False needs the user's word for it."""

    @abstractmethod
    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Go to work on a batch whose rows are sampled with `params`."""

    def resolve_walk(self, wish: str, scheme: Scheme) -> Walk:
        """Return the walk that verifies its trees, drawn by `scheme`, where the user wishes for ``"auto"`` or a certain one."""
        # Only a scheme that was asked for by name is held against a walk that was: at temperature 0 it is another one.
        return resolve_walk(wish, scheme, insist=getattr(self, "scheme", None) == scheme.name)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a drafter can be made of."""

    target: LanguageModel
    draft: LanguageModel | FeatureHead | None = None
    topology: Topology
    scheme: str = "auto"
    draft_temperature: float | None = None
    grams: GramTreeOptions = field(default_factory=GramTreeOptions)
    dynamic: DynamicShape | None = None
    """Limits of a dynamic tree, which then takes the place of `topology`."""
    decision: Decision | None = None
    """Looks between levels whether to go on."""


DRAFTERS: Registry[Callable[[Parts], Drafter]] = Registry("drafter")
"""Ways to make a drafter from parts, by name; all of them are proven lossless by the test suite."""

LOSSY_DRAFTERS: Registry[Callable[[Parts], Drafter]] = Registry("lossy drafter")
"""Drafters that change the law of the text; nothing chooses them but their name behind `--lossy`."""
