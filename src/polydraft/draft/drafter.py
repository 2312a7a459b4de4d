"""Drafters: the one interface of everything that proposes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from polydraft.draft.gram_options import GramTreeOptions
from polydraft.draft.session import DraftSession
from polydraft.draft.stopping_builder import Decision
from polydraft.models import Head, LanguageModel
from polydraft.registry import Registry
from polydraft.sampling import RowParams
from polydraft.trees import DynamicShape, Topology


class Drafter(ABC):
    """Proposes candidates; holds no state of any text."""

    name: str
    lossless: bool = True
    """Whether texts follow the target's distribution; if not, users must ask for it explicitly."""
    model: LanguageModel | Head | None = None
    """The draft, if there is one."""
    topology: Topology | DynamicShape | None = None
    """Shape of the trees."""
    ranked: bool = False
    """Whether its trees hold the likeliest tokens, not drawn ones; above temperature 0, that pays in coupled texts."""

    @abstractmethod
    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Open a session for a batch whose rows are sampled with `params`."""


class Plain(Drafter):
    """Proposes nothing: with empty trees, the engine decodes plainly, token by token."""

    name = "none"

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Open an empty session."""
        return DraftSession(self.name)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that a drafter can be made of."""

    draft: LanguageModel | Head | None = None
    topology: Topology
    scheme: str = "auto"
    draft_temperature: float | None = None
    grams: GramTreeOptions = field(default_factory=GramTreeOptions)
    dynamic: DynamicShape | None = None
    """Limits of a dynamic tree; replaces `topology`."""
    decision: Decision | None = None
    """Decides between levels whether to go on."""
    by_load: bool = False
    """Whether rows that share rounds may have smaller trees than `topology`."""
    alone: Topology | DynamicShape | None = None
    """Replaces `topology` for a single text, at temperature 0 or coupled."""
    pauses: bool = False
    """Whether drafting pauses on a CPU while it does not pay, by measured costs; dynamic trees always do."""


DRAFTERS: Registry[Callable[[Parts], Drafter]] = Registry("drafter")
"""Ways to make a drafter from parts, by name; the test suite checks that every one of them is lossless."""

LOSSY_DRAFTERS: Registry[Callable[[Parts], Drafter]] = Registry("lossy drafter")
"""Drafters that change the distribution of the text; chosen only by name, with `--lossy`."""


@DRAFTERS.register("none")
def _build_plain(parts: Parts) -> Plain:
    return Plain()
