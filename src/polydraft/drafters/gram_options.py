"""What can be set about drafting from n-grams."""

from dataclasses import dataclass, field, replace
from typing import Any

from polydraft.drafters.riders import RiderOptions
from polydraft.errors import UsageError
from polydraft.ngrams import GramOptions, tokenizer_fingerprint
from polydraft.trees import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class GramTreeOptions:
    """Settings of all drafters that propose from n-grams."""

    nodes: int = 20
    """Most candidates a round, in nodes of the merged trie."""
    depth: int = 12
    """Most tokens of a continuation."""
    candidates: int = 8
    """Most continuations that each cache is asked for."""
    riders: RiderOptions | None = None
    """Branches of `self-draft`, other drafters have none; None for as many as pay on the device, see `usual_riders`."""
    caches: GramOptions = field(default_factory=GramOptions)
    context: bool = True
    """Whether `self-draft` uses its context cache, and so the branches that feed it."""
    corpus: bool = True
    """Whether `self-draft` uses a corpus cache."""
    flat_blocks: bool = False
    """Verify as the Self-Draft paper words it, which changes the law of the text above temperature 0: an ablation."""

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "candidates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} is out of range; allowed: whole numbers from 1")
        branch_tokens = (self.riders or RiderOptions()).most
        if 1 + self.nodes + branch_tokens > MAX_NODES:
            raise UsageError(
                f"{self.nodes} candidates and {branch_tokens} branch tokens are too many for one pass; "
                f"allowed: below {MAX_NODES} in all"
            )

    def for_tokenizer(self, tokenizer: Any) -> "GramTreeOptions":
        """Tie corpus caches to a tokenizer, so that a foreign one is refused."""
        if tokenizer is None:
            return self
        return replace(self, caches=replace(self.caches, fingerprint=tokenizer_fingerprint(tokenizer)))

    @property
    def most_depth(self) -> int:
        """Levels of the trie: a continuation never has more tokens than there are nodes."""
        return min(self.depth, self.nodes)
