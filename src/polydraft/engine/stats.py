"""What happened, in numbers."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TARGET = "target"
"""Source of tokens that no draft proposed."""

PHASES = ("prefill", "draft", "target", "verify", "commit", "graph")
"""What time is spent on; `graph` is a whole round that is replayed from a capture."""

_ENDLESS, _LEAST_READ = 2**62, 16
"""Prompt tokens to read: without a limit, and at least."""


def rest_line(resting: int, passes: int, why: str | None) -> str | None:
    """Say that drafting rested in some passes, and why; None where it did not."""
    return f"drafting rested in {resting} of {passes} passes: {why}" if resting else None


@dataclass
class Speculation:
    """What drafting did for one text."""

    rounds: int = 0
    resting_rounds: int = 0
    """Those of them in which nothing was drafted for it."""
    rested_because: str | None = None
    """Why, in the last of these; None for plain decoding."""
    drafted_tokens: int = 0
    """Candidates of all its trees."""
    outcomes: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    """How many rounds had these arguments of `Stats.count`."""

    def count(self, outcome: tuple[int, int, int, int], drafted: int, why_none: str | None = None) -> None:
        """Add a round, and why nothing was drafted, if nothing was."""
        self.rounds += 1
        if drafted == 0:
            self.resting_rounds += 1
            self.rested_because = why_none
        self.drafted_tokens += drafted
        self.outcomes[outcome] += 1

    @property
    def accepted(self) -> Counter[int]:
        """How many rounds accepted so many candidates."""
        found = Counter[int]()
        for (accepted, *_), rounds in self.outcomes.items():
            found[accepted] += rounds
        return found

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the target's own included."""
        tokens = sum((accepted + 1) * rounds for (accepted, *_), rounds in self.outcomes.items())
        return tokens / self.rounds if self.rounds else 0.0

    def stats(self) -> "Stats":
        """Return what can be counted of one text of a batch, without times."""
        found = Stats(rounds=self.rounds, candidates=self.drafted_tokens)
        for outcome, rounds in self.outcomes.items():
            for _ in range(rounds):
                found.count(*outcome)
        return found


@dataclass
class Stats:
    """Counts and times of one run, over all its rows.

    A *pass* is one row's share of a target forward: a batch of three rows makes three passes a round.
    """

    new_tokens: int = 0
    """Tokens in the results, as the user sees them."""
    drafted_tokens: int = 0
    """Those of them that came from a draft."""
    tokens_by_source: Counter[str] = field(default_factory=Counter)
    """The same by who proposed them: a draft, or one of the n-gram caches."""
    rounds: int = 0
    replayed_rounds: int = 0
    """Rounds that ran as one captured CUDA graph; of beams, whose target pass did."""
    rounds_ahead: int = 0
    """Those of them that were launched before the outcome of the round before was known."""
    passes: int = 0
    block_tokens: int = 0
    """Tokens that the rounds yielded before anything was cut off at an end."""
    offers_by_depth: list[int] = field(default_factory=list)
    """How often a node at each depth was reached that had candidates."""
    accepts_by_depth: list[int] = field(default_factory=list)
    candidates: int = 0
    """Candidates of all trees."""
    resting_passes: int = 0
    """Passes without candidates, although there is a drafter."""
    rested_because: str | None = None
    """Why, in the last of these."""
    path_tokens: int = 0
    """Length of the longest drafted path, over all passes."""
    wins_by_branch: list[int] = field(default_factory=list)
    """How often a path through each child of the root was accepted (Fig. 3 of improved-MCSD)."""
    accepts_by_branch: list[int] = field(default_factory=list)
    """Accepted tokens of those paths."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    total_seconds: float = 0.0
    first_token_seconds: float | None = None
    """From the call to the first new token of any row; on a GPU the first request of a kind also compiles and captures."""

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
        """The α of improved-MCSD: accepted length over the longest drafted path, another number than `acceptance_rate`."""
        return (self.block_tokens - self.passes) / self.path_tokens if self.path_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """α at each depth of the tree."""
        return [
            accepted / offered for accepted, offered in zip(self.accepts_by_depth, self.offers_by_depth, strict=True) if offered
        ]

    @property
    def decode_seconds(self) -> float:
        """Time spent after the prompt was read."""
        return max(self.total_seconds - self.seconds["prefill"], 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, reading the prompt not counted."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def saw_candidates(self, count: int, why_none: str | None) -> None:
        """Add the candidates of one row's round, or why there were none; None for plain decoding."""
        self.candidates += count
        if count == 0 and why_none is not None:
            self.resting_passes += 1
            self.rested_because = why_none

    @property
    def rest_line(self) -> str | None:
        """Say whether drafting rested, and why."""
        return rest_line(self.resting_passes, self.passes, self.rested_because)

    def keep(self, sources: Sequence[str]) -> None:
        """Add new tokens of a text, given where each came from."""
        self.new_tokens += len(sources)
        drafted = [source for source in sources if source != TARGET]
        self.drafted_tokens += len(drafted)
        self.tokens_by_source.update(drafted)

    def drop(self, sources: Sequence[str]) -> None:
        """Take back new tokens that were cut off again."""
        self.new_tokens -= len(sources)
        drafted = [source for source in sources if source != TARGET]
        self.drafted_tokens -= len(drafted)
        self.tokens_by_source.subtract(drafted)

    def count(self, accepted: int, offered: int, longest: int = 0, branch: int = -1) -> None:
        """Add one row's round.

        Parameters
        ----------
        accepted, offered : int
            Nodes that were accepted, and nodes on their way that had candidates.
        longest : int
            Length of the longest drafted path.
        branch : int
            Which child of the root the accepted path goes through; -1 where nothing was accepted.
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
        """Add the time of a phase. On a GPU that is the time to queue its work; the host waits for the rest in `verify`.

        Prompts are an exception: what the host waited for them counts as theirs, see `move_time`.
        """
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def move_time(self, seconds: float, source: str, target: str) -> None:
        """Let one phase have time that was counted for another."""
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
    """How many tokens of prompts to read before the next round, by how long it took to read others.

    Parameters
    ----------
    most : int, optional
        Never more than these.
    stall : float, optional
        Seconds that reading may take while other texts wait, or as long as a round if that is more; any if not given. A pass
        over few tokens may take as long as a round: by less than that, prompts would hardly get on.
    """

    def __init__(self, most: int | None, stall: float | None) -> None:
        self._most, self._stall = most or _ENDLESS, stall
        self._tokens, self._before = 0, 0.0
        self._each: float | None = None
        """Seconds per token."""
        self._round = 0.0
        """Seconds of a round."""

    def room(self, awaited: bool) -> int:
        """Return how many tokens to read; `awaited` if others' texts go on only then."""
        if not awaited or self._stall is None or self._each is None:
            return self._most
        return min(max(int(max(self._stall, self._round) / self._each), _LEAST_READ), self._most)

    def read(self, tokens: int) -> None:
        """Count tokens that are read."""
        self._tokens += tokens

    def timed(self, total: float, step: float) -> None:
        """Learn from the seconds that all prompts took so far, and those of the last step, reading included."""
        seconds, self._before = total - self._before, total
        self._round = (self._round + max(step - seconds, 0.0)) / 2
        if self._tokens and seconds > 0:
            each = seconds / self._tokens
            # What was slow once (it was compiled, the machine was busy) need not stay so; what was fast can be had again.
            self._each = each if self._each is None or each < self._each else (each + self._each) / 2
        self._tokens = 0
