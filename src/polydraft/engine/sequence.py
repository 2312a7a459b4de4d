"""One text in progress: its prompt, parameters, tokens so far, and where it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import torch

from polydraft.engine.logprobs import TokenLogprob
from polydraft.engine.stats import Stats
from polydraft.engine.text import TextAssembler
from polydraft.sampling import SamplingParams
from polydraft.sampling.processing import until_end


class StopReason(StrEnum):
    """Why a text ended."""

    EOS = "eos"
    STOP = "stop"
    """A stop string, or a Hugging Face stopping criterion."""
    LENGTH = "length"
    CONTEXT = "context"
    """The model's context is full."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The model or a logits processor failed; only in engines that isolate failures."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream."""

    row: int
    token_id: int
    text: str
    """Text released with this token; may be empty while a character or a stop string is incomplete."""
    source: str
    """`"target"`, or the name of the drafter that proposed it."""
    round: int
    """Number of the round, and so of the target pass, that emitted it; from 0."""
    stop_reason: StopReason | None = None
    """Set on the last token of a row."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished text."""

    text: str
    token_ids: list[int]
    """New tokens, the end-of-text token that ended the text included."""
    sources: list[str]
    stop_reason: StopReason
    stats: Stats
    """Of the whole batch."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that reproduce the text, the seed included."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens of one sequence from one round."""

    row: int
    """The sequence's number, as its caller counts them."""
    token_ids: list[int]
    sources: list[str]
    """Who proposed each token."""
    pieces: list[str]
    """Text released with each token."""
    stop_reason: StopReason | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each token, if asked for."""
    accepted: int = 0
    """Drafted tokens that the round accepted, before the text was cut at its end."""
    drafted: int = 0
    """Candidates of the round."""
    tree: list[tuple[int, int]] = field(default_factory=list)
    """The candidates, if asked for: parent and token of each, root first."""


class SequenceOptions(TypedDict, total=False):
    """Fields of a `TokenSequence` that few callers set."""

    row: int
    eos_token_ids: frozenset[int]
    max_positions: int | None
    stops_after: Callable[[Sequence[int]], bool] | None
    traced: bool
    top_logprobs: int | None
    prompt_top_logprobs: int | None
    space: str | None


@dataclass(eq=False, kw_only=True)
class TokenSequence:
    """One text of a request; decides where the text ends. Made by `Decoder.sequence`."""

    row: int = 0
    """Its number, as the caller counts."""
    prompt: Sequence[int]
    params: SamplingParams
    """As requested; rounds use `row_params`."""
    generator: torch.Generator
    """Its own, so that a text depends neither on its slot nor on other texts."""
    max_new_tokens: int
    """With 0, it ends as soon as its prompt is read."""
    eos_token_ids: frozenset[int] = frozenset()
    """Pass the model's; once the sequence is made, all tokens that end it."""
    assembler: TextAssembler = field(default_factory=lambda: TextAssembler(None, ()))
    """Turns tokens into text, and finds stop strings."""
    max_positions: int | None = None
    """Where the model's context ends."""
    stops_after: Callable[[Sequence[int]], bool] | None = None
    """Whether the caller will end the text after these tokens, if it can tell in advance."""
    traced: bool = False
    """Whether to report its trees."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each token's log-probability; None for no log-probabilities."""
    prompt_top_logprobs: int | None = None
    """The same for the prompt's tokens; the whole prompt is then read, cached or not."""
    space: str | None = ""
    """Texts with the same space may share cached prefixes; None shares none."""
    cached: int = field(init=False, default=0)
    """Prompt tokens found in the cache."""
    turn: int | None = field(init=False, default=None)
    """How many sequences the engine had admitted before it."""
    row_state: Any = field(init=False, default=None)
    """State of its row, while it is evicted and waits for memory (docs/decisions/064)."""
    row_params: SamplingParams = field(init=False)
    """`params`, with all end tokens, and with logits processors that are not called beyond the end."""
    tokens: list[int] = field(init=False)
    """Prompt and new tokens."""
    sources: list[str] = field(init=False, default_factory=list)
    """Who proposed each new token."""
    stop_reason: StopReason | None = field(init=False, default=None)
    failure: Exception | None = field(init=False, default=None)
    """Why it failed, if it did."""
    prompt_logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    """Of each prompt token but the first; complete before the first new token."""
    speculation: Stats = field(init=False, default_factory=Stats)
    """What drafting did for this text: its passes and candidates, without times."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.eos_token_ids = self.params.ends(self.eos_token_ids)
        self.row_params = until_end(self.params, self.is_over).ending(self.eos_token_ids)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.stop_reason is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it has no new tokens yet."""
        return len(self.tokens) == len(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """New tokens so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def end(self) -> int:
        """Its largest allowed length, prompt included."""
        end = len(self.prompt) + self.max_new_tokens
        return end if self.max_positions is None else min(end, self.max_positions)

    def is_over(self, text: Sequence[int]) -> bool:
        """Whether this continuation of the text so far has reached an end, so that what follows does not matter."""
        if self.done or len(text) >= self.end:
            return True
        further = text[len(self.tokens) :]
        if any(token in self.eos_token_ids for token in further):
            return True
        if self.stops_after is not None:
            lengths = range(len(self.tokens) + 1, len(text) + 1)
            if any(self.stops_after(text[:length]) for length in lengths):
                return True
        if not self.assembler.stop:
            return False
        assembler = self.assembler.fork()
        for token in further:
            assembler.add(token)
            if assembler.stopped:
                return True
        return False

    def take(self, tokens: Sequence[int], sources: Sequence[str]) -> Emitted:
        """Take the tokens of a round up to the first end: end of text, a stop string, a limit."""
        kept, pieces = list[int](), list[str]()
        for token in tokens:
            kept.append(token)
            piece = "" if token in self.eos_token_ids else self.assembler.add(token)
            if token in self.eos_token_ids:
                self.stop_reason = StopReason.EOS
            elif self.assembler.stopped:
                self.stop_reason = StopReason.STOP
            elif len(self.tokens) + len(kept) >= self.end:
                limited = self.end < len(self.prompt) + self.max_new_tokens
                self.stop_reason = StopReason.CONTEXT if limited else StopReason.LENGTH
            pieces.append(piece + self.assembler.finish() if self.done else piece)
            if self.done:
                break
        self.tokens.extend(kept)
        self.sources.extend(sources[: len(kept)])
        return Emitted(self.row, kept, list(sources[: len(kept)]), pieces, self.stop_reason)

    def fail(self, error: Exception) -> Emitted:
        """End because of a failure, keeping the tokens so far."""
        self.assembler.finish()
        self.stop_reason, self.failure = StopReason.FAILED, error
        return Emitted(self.row, [], [], [], self.stop_reason)

    def cut(self, reason: StopReason, new_tokens: int) -> list[str]:
        """End from outside, keeping the first `new_tokens` new tokens; return the sources of the dropped ones."""
        dropped = self.sources[new_tokens:]
        del self.tokens[len(self.prompt) + new_tokens :]
        del self.sources[new_tokens:]
        self.assembler.finish()
        self.stop_reason = reason
        return dropped
