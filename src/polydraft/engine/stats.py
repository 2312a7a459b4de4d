"""Counts and times of a run, and how fast prompts are read."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TARGET = "target"
"""Source of tokens that no draft proposed."""

PHASES = ("prefill", "draft", "target", "verify", "commit", "graph")
"""What time is spent on; `graph` is a whole round replayed from a capture."""

_ENDLESS, _LEAST_READ = 2**62, 16
"""Prompt tokens that a step reads: without a limit, and at least."""


def rest_line(resting: int, passes: int, why: str | None) -> str | None:
    """Say that drafting rested in some passes, and why; None if it did not."""
    return f"drafting rested in {resting} of {passes} passes: {why}" if resting else None


@dataclass
class Stats:
    """Counts and times of one run, over all its rows.

    A *pass* is one row's share of a target forward: a batch of three rows makes three passes a round.
    """

    new_tokens: int = 0
    """Tokens in the results, as the user sees them."""
    drafted_tokens: int = 0
    """New tokens that were drafted."""
    tokens_by_source: Counter[str] = field(default_factory=Counter)
    """Drafted tokens by who proposed them: a draft, or one of the n-gram caches."""
    rounds: int = 0
    replayed_rounds: int = 0
    """Rounds replayed from a CUDA graph; for beams, rounds whose target pass was."""
    rounds_ahead: int = 0
    """Replayed rounds that were launched before the last outcome was known."""
    passes: int = 0
    block_tokens: int = 0
    """Tokens that the rounds yielded, before texts were cut at their ends."""
    offers_by_depth: list[int] = field(default_factory=list)
    """How often a node with candidates was reached, by depth."""
    accepts_by_depth: list[int] = field(default_factory=list)
    candidates: int = 0
    """Candidates of all trees."""
    resting_passes: int = 0
    """Passes without candidates, although there is a drafter."""
    rested_because: str | None = None
    """Why there were none in the last such pass."""
    path_tokens: int = 0
    """Lengths of the longest drafted path of each pass, added up."""
    wins_by_branch: list[int] = field(default_factory=list)
    """How often a path through each child of the root was accepted (Fig. 3 of improved-MCSD)."""
    accepts_by_branch: list[int] = field(default_factory=list)
    """Accepted tokens of these paths."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    total_seconds: float = 0.0
    first_token_seconds: float | None = None
    """From the call to the first new token of any row; on a GPU, the first request of a kind also compiles and captures."""

    @property
    def tokens_per_pass(self) -> float:
        """Block efficiency τ of MCSD §4.1, decoding efficiency DE of Self-Draft."""
        return self.block_tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share α of positions with candidates at which one was accepted (MCSD §4.1)."""
        offers = sum(self.offers_by_depth)
        return sum(self.accepts_by_depth) / offers if offers else 0.0

    @property
    def accepted_share(self) -> float:
        """The α of improved-MCSD: accepted length over the longest drafted path; not the same as `acceptance_rate`."""
        return (self.block_tokens - self.passes) / self.path_tokens if self.path_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """α at each depth of the tree."""
        return [
            accepted / offered for accepted, offered in zip(self.accepts_by_depth, self.offers_by_depth, strict=True) if offered
        ]

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many passes accepted 0, 1, 2, ... candidates, up to the most that any accepted."""
        at_least = [self.passes, *filter(None, self.accepts_by_depth), 0]
        return [more - fewer for more, fewer in pairwise(at_least)] if self.passes else []

    @property
    def decode_seconds(self) -> float:
        """Time after the prompts were read."""
        return max(self.total_seconds - self.seconds["prefill"], 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, not counting the time to read prompts."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def saw_candidates(self, count: int, why_none: str | None) -> None:
        """Add the candidates of one row's round, or the reason why there were none; None for plain decoding."""
        self.candidates += count
        if count == 0 and why_none is not None:
            self.resting_passes += 1
            self.rested_because = why_none

    @property
    def rest_line(self) -> str | None:
        """Says that drafting rested, and why; None if it did not."""
        return rest_line(self.resting_passes, self.passes, self.rested_because)

    def keep(self, sources: Sequence[str]) -> None:
        """Count new tokens of a text, given the source of each."""
        self.new_tokens += len(sources)
        drafted = [source for source in sources if source != TARGET]
        self.drafted_tokens += len(drafted)
        self.tokens_by_source.update(drafted)

    def drop(self, sources: Sequence[str]) -> None:
        """Take back new tokens that were cut off after all."""
        self.new_tokens -= len(sources)
        drafted = [source for source in sources if source != TARGET]
        self.drafted_tokens -= len(drafted)
        self.tokens_by_source.subtract(drafted)

    def count(self, accepted: int, offered: int, longest: int = 0, branch: int = -1) -> None:
        """Count one row's round.

        Parameters
        ----------
        accepted, offered : int
            Accepted nodes, and nodes on the accepted path that had candidates.
        longest : int
            Length of the longest drafted path.
        branch : int
            Which child of the root was accepted; -1 for none.
        """
        self.passes += 1
        self.path_tokens += longest
        if branch >= 0:
            more = branch + 1 - len(self.wins_by_branch)
            self.wins_by_branch.extend([0] * more)
            self.accepts_by_branch.extend([0] * more)
            self.wins_by_branch[branch] += 1
            self.accepts_by_branch[branch] += accepted
        self.block_tokens += accepted + 1
        missing = offered - len(self.offers_by_depth)
        self.offers_by_depth.extend([0] * missing)
        self.accepts_by_depth.extend([0] * missing)
        for depth in range(offered):
            self.offers_by_depth[depth] += 1
            self.accepts_by_depth[depth] += depth < accepted

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Time a phase. On a GPU that is the time to queue its work; the host waits for the results in `verify`.

        Prompts are an exception: `move_time` moves what the host waited for them to `prefill`.
        """
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def move_time(self, seconds: float, source: str, target: str) -> None:
        """Move time from one phase to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for reports."""
        return {
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "replayed_rounds": self.replayed_rounds,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_share": round(self.accepted_share, 4),
            "acceptance_by_depth": [round(rate, 4) for rate in self.acceptance_by_depth],
            "drafted_tokens": self.drafted_tokens,
            "resting_passes": self.resting_passes,
            "rested_because": self.rested_because,
            "tokens_by_source": {source: count for source, count in self.tokens_by_source.most_common() if count},
            "tokens_per_second": round(self.tokens_per_second, 3),
            "seconds": {
                **{phase: round(value, 5) for phase, value in self.seconds.items()},
                "total": round(self.total_seconds, 5),
                "first_token": None if self.first_token_seconds is None else round(self.first_token_seconds, 5),
            },
        }


class ReadingPace:
    """Decides how many prompt tokens to read before the next round, from how long reading took so far.

    Parameters
    ----------
    most : int, optional
        Upper limit.
    stall : float, optional
        Seconds that reading may take while other texts wait, but at least the time of a round: a pass over a few tokens may
        take that long, and with less, prompts would hardly make progress. No limit if not given.
    """

    def __init__(self, most: int | None, stall: float | None) -> None:
        self._most, self._stall = most or _ENDLESS, stall
        self._tokens, self._before = 0, 0.0
        self._each: float | None = None
        """Seconds per token."""
        self._round = 0.0
        """Seconds of a round."""

    def room(self, awaited: bool) -> int:
        """Return how many tokens to read; `awaited` says that other texts wait for it."""
        if not awaited or self._stall is None or self._each is None:
            return self._most
        return min(max(int(max(self._stall, self._round) / self._each), _LEAST_READ), self._most)

    def read(self, tokens: int) -> None:
        """Count tokens read in this step."""
        self._tokens += tokens

    def timed(self, total: float, step: float) -> None:
        """Learn from a step: seconds spent on prompts in total so far, and seconds of this step, prompts included."""
        seconds, self._before = total - self._before, total
        self._round = (self._round + max(step - seconds, 0.0)) / 2
        if self._tokens and seconds > 0:
            each = seconds / self._tokens
            # A slow step (compilation, a busy machine) may be an exception; a fast one shows what is possible.
            self._each = each if self._each is None or each < self._each else (each + self._each) / 2
        self._tokens = 0
