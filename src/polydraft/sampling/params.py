"""Sampling parameters of one text, and of the rows of a batch."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError, shown
from polydraft.sampling.grammar import Grammar

LARGEST = 3.4028234663852886e38
"""Largest float32; penalties are computed in this format."""
_USUAL_LOGIT = 1e6
"""Far above any model's logits, and above the length of any text."""
_MOST_TOKENS = 10**9
_COLDEST = _USUAL_LOGIT / LARGEST
_WARM = f"0 (greedy), or at least {_COLDEST:.0e}"


class Usual(float):
    """A default number, which the model's own settings may replace."""


class UsualCount(int):
    """A default whole number, which the model's own settings may replace."""


def was_asked(value: float) -> bool:
    """Whether the caller set a parameter; if not, the model's own settings may replace it."""
    return not isinstance(value, Usual | UsualCount)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's logits become its sampling distribution.

    The order of operations is that of Hugging Face `generate`: logit bias, repetition penalty, presence and
    frequency penalty, `processors`, temperature, top-k, top-p, min-p. It is the same with and without speculation.

    Parameters that you do not set may come from the model's generation_config.json, see `polydraft.load`.

    Equal parameters have equal hashes. Hashes leave out `logit_bias` and `processors`, which may not be hashable.
    """

    temperature: float = Usual(1.0)
    """Sampling temperature; 0 decodes greedily."""
    top_k: int = UsualCount(0)
    """Sample from the k likeliest tokens; 0 keeps all."""
    top_p: float = Usual(1.0)
    """Sample from the likeliest tokens that together reach this probability; 1 keeps all."""
    min_p: float = Usual(0.0)
    """Drop tokens less likely than this fraction of the likeliest one's probability; 0 keeps all."""
    repetition_penalty: float = Usual(1.0)
    """Values above 1 discourage repetition; 1 is off.

    Positive logits of tokens seen in prompt or output are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtract from logits of tokens that occur in the output, once per occurrence."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Numbers to add to logits, by token id."""
    min_tokens: int = 0
    """Fewest new tokens: no end-of-text token is drawn before. A stop string still ends the text."""
    ignore_eos: bool = False
    """Do not stop at the model's own end-of-text tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end the text."""
    processors: tuple[Any, ...] = field(default=(), hash=False)
    """Hugging Face `LogitsProcessor` objects, called as `processor(input_ids, scores)` with the text and each node's ancestors,
    but not beyond the end of a text."""
    grammar: Grammar | None = field(default=None, hash=False)
    """Grammar that the text must follow: a JSON schema, a regular expression, or rules in Lark's notation. It is applied after
    the `processors`."""
    prediction: str | Sequence[int] | None = field(default=None, compare=False)
    """The text that you expect, as text or token ids. It affects only speed, so parameters that differ in nothing else are
    equal."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                usual = type(self).__dataclass_fields__[name].default
                raise UsageError(f"{name}={shown(value)} is not a number; use a number such as {usual}")
        _check("temperature", self.temperature, self.temperature >= 0, f"0 (greedy) to {LARGEST:.1e}")
        top_k: Any = self.top_k
        if isinstance(top_k, bool) or not isinstance(top_k, Integral):
            raise UsageError(f"top_k={shown(top_k)} is not a whole number; use 0 to keep all tokens")
        if was_asked(self.top_k):  # turn numpy's numbers into Python's
            object.__setattr__(self, "top_k", int(top_k))
        _check("top_k", self.top_k, self.top_k >= 0, "0 (keep all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        penalty, allowed = self.repetition_penalty, f"above 0 (1 is off) to {LARGEST:.1e}"
        _check("repetition_penalty", penalty, penalty > 0, allowed)
        _check("presence_penalty", self.presence_penalty, True, f"numbers up to {LARGEST:.1e}")
        _check("frequency_penalty", self.frequency_penalty, True, f"numbers up to {LARGEST:.1e}")
        self._check_bias()
        self._check_ends()
        processors: Any = self.processors
        if not isinstance(processors, Sequence) or not all(callable(processor) for processor in processors):
            raise UsageError(
                f"processors={shown(processors)}; allowed: a tuple of Hugging Face LogitsProcessor objects, or of functions "
                "(input_ids, scores) -> scores"
            )
        object.__setattr__(self, "processors", tuple(processors))
        grammar: Any = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            allowed = "Grammar.json_schema({...}), Grammar.json_object(), Grammar.regex(...), Grammar.lark(...)"
            raise UsageError(f"grammar={shown(grammar)}; allowed: {allowed}")
        if grammar is not None:
            self._check_follows()
        self._check_reach()
        self._check_prediction()

    def _check_prediction(self) -> None:
        value: Any = self.prediction
        if value is None or isinstance(value, str):
            return
        tokens = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(tokens, Sequence) or not all(isinstance(one, Integral) and int(one) >= 0 for one in tokens):
            raise UsageError(f"prediction={shown(value)}; allowed: text, or token ids")
        object.__setattr__(self, "prediction", tuple(map(int, tokens)))

    def _check_bias(self) -> None:
        allowed = f"token ids with numbers up to {LARGEST:.1e}, or -inf to ban a token"
        bias: Any = self.logit_bias
        if not isinstance(bias, Mapping):
            raise UsageError(f"logit_bias={shown(bias)} is not a dict; allowed: {allowed}, such as {{5: -1.0}}")
        for token, value in bias.items():
            is_number = isinstance(value, Real)
            if not (isinstance(token, Integral) and is_number and (abs(value) <= LARGEST or value == -math.inf)):
                raise UsageError(f"logit_bias={{{token!r}: {shown(value)}}} is out of range; allowed: {allowed}")

    def _check_ends(self) -> None:
        fewest: Any = self.min_tokens
        whole = isinstance(fewest, Integral) and not isinstance(fewest, bool)
        if not whole or not 0 <= fewest <= _MOST_TOKENS:
            raise UsageError(f"min_tokens={shown(fewest)} is out of range; allowed: whole numbers from 0 to {_MOST_TOKENS}")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={shown(self.ignore_eos)}; allowed: True, False")
        tokens: Any = self.stop_token_ids
        listed = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes)
        if not listed or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
            raise UsageError(f"stop_token_ids={shown(tokens)}; allowed: token ids")
        object.__setattr__(self, "min_tokens", int(fewest))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, tokens)))

    def _check_follows(self) -> None:
        """Refuse parameters that contradict a grammar, by which a complete text must end."""
        if self.min_tokens or self.ignore_eos:
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise UsageError(f"{name}={getattr(self, name)} cannot be combined with a grammar, which says where texts end")

    def _check_reach(self) -> None:
        """Refuse numbers that may take logits beyond float32, which would leave no distribution."""
        biased = max((float(value) for value in self.logit_bias.values()), default=0.0)
        reach = {
            "logit_bias": max(biased, 0.0),
            "repetition_penalty": (_USUAL_LOGIT + max(biased, 0.0)) * (1 / min(self.repetition_penalty, 1.0) - 1),
            "presence_penalty": max(-self.presence_penalty, 0.0),
            "frequency_penalty": max(-self.frequency_penalty, 0.0) * _USUAL_LOGIT,
        }
        # Multiplied rather than divided: dividing by a tiny temperature would overflow.
        if _USUAL_LOGIT + sum(reach.values()) <= LARGEST * (min(self.temperature, 1.0) or 1.0):
            return
        name = max(reach, key=lambda one: reach[one])
        if reach[name] <= _USUAL_LOGIT:
            raise UsageError(f"temperature={self.temperature!r} is too small to divide logits by; allowed: {_WARM}")
        value = f"a value of {biased!r}" if name == "logit_bias" else repr(getattr(self, name))
        raise UsageError(
            f"{name}={value} at temperature={self.temperature!r} makes logits larger than {LARGEST:.1e}; use a milder value"
        )

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the earlier tokens, in addition to the model's own logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens != 0
            or bool(self.processors)
            or self.grammar is not None
        )

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a text, given the model's own end-of-text tokens."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)

    def ending(self, ends: Iterable[int]) -> "SamplingParams":
        """Return the parameters with all ends of text as `stop_token_ids`, if `min_tokens` has to rule them out at first."""
        return dataclasses.replace(self, stop_token_ids=tuple(sorted(ends))) if self.min_tokens else self

    @property
    def predicted(self) -> tuple[int, ...]:
        """Tokens of the prediction; empty until it has been tokenized."""
        return self.prediction if isinstance(self.prediction, tuple) else ()

    def following(self, grammar: Any) -> "SamplingParams":
        """Return the parameters with the grammar replaced by its processor."""
        self._check_follows()
        return dataclasses.replace(self, processors=(*self.processors, grammar), grammar=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledParams(SamplingParams):
    """Sampling parameters of a text above temperature 0 whose tokens are decided by noise that its seed makes known beforehand.

    See docs/decisions/066-a-seed-decides-the-text.md.
    """

    key: int = field(default=0, compare=False)
    """Key of the text's noise, see `polydraft.sampling.gumbel`."""

    @classmethod
    def of(cls, params: SamplingParams, key: int) -> "CoupledParams":
        """Return the same parameters with a key."""
        assert params.temperature > 0
        return cls(**{one.name: getattr(params, one.name) for one in dataclasses.fields(params) if one.name != "key"}, key=key)


def _check(name: str, value: float, fits: bool, allowed: str) -> None:
    # Not converted to float before: a whole number may be larger than any float.
    if not (abs(value) <= LARGEST and fits):
        raise UsageError(f"{name}={shown(value)} is out of range; allowed: {allowed}")


def check_draft_temperature(value: Any) -> None:
    """Refuse a draft temperature that is out of range; None stands for the target's."""
    if value is None:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (value == 0 or _COLDEST <= value <= LARGEST):
        raise UsageError(f"draft_temperature={shown(value)} is out of range; allowed: {_WARM}")


@dataclass(frozen=True)
class RowParams:
    """One `SamplingParams` per row, and what a round has to compute for them.

    A round skips what no row asks for. What some rows ask for leaves the others unchanged, bit for bit, so a row's distribution
    does not depend on its neighbours.
    """

    rows: tuple[SamplingParams, ...]

    @classmethod
    def of(cls, params: "RowParams | SamplingParams | Sequence[SamplingParams]", rows: int) -> "RowParams":
        """Return parameters for so many rows: the same for all, or one each."""
        if isinstance(params, RowParams):
            return params
        found = (params,) * rows if isinstance(params, SamplingParams) else tuple(params)
        assert len(found) == rows, (len(found), rows)
        return cls(found)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SamplingParams]:
        return iter(self.rows)

    def map(self, change: Callable[[SamplingParams], SamplingParams]) -> "RowParams":
        """Change the parameters of every row."""
        changed = {id(row): change(row) for row in {id(row): row for row in self.rows}.values()}  # most rows share an object
        return RowParams(tuple(changed[id(row)] for row in self.rows))

    @cached_property
    def greedy(self) -> tuple[bool, ...]:
        """Which rows take the likeliest token."""
        return tuple(row.temperature == 0 for row in self.rows)

    @cached_property
    def coupled(self) -> tuple[bool, ...]:
        """Which rows take the token with the largest sum of log-probability and noise."""
        return tuple(isinstance(row, CoupledParams) and row.temperature > 0 for row in self.rows)

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes the likeliest token."""
        return all(self.greedy)

    @property
    def decided(self) -> bool:
        """Whether scores alone decide every row's token, greedy or coupled, so that rounds use no random numbers."""
        return all(greedy or coupled for greedy, coupled in zip(self.greedy, self.coupled, strict=True))

    @property
    def mixed(self) -> bool:
        """Whether some rows take the likeliest token and others draw."""
        return any(self.greedy) and not self.decided

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling of any row depends on its earlier tokens, in addition to the model's own logits."""
        return any(row.needs_history for row in self.rows)

    @cached_property
    def keeps_order(self) -> bool:
        """Whether in every row the largest logits belong to the tokens that rank first."""
        return not (self.needs_history or any(row.logit_bias for row in self.rows))

    @cached_property
    def has_processors(self) -> bool:
        """Whether any row has logits processors, which run on the host."""
        return any(row.processors for row in self.rows)

    @cached_property
    def bans(self) -> bool:
        """Whether any row bans tokens by `logit_bias`: a draft may then know none of the tokens that remain."""
        return any(-math.inf in row.logit_bias.values() for row in self.rows)

    def replaced(self, changes: Mapping[int, SamplingParams]) -> "RowParams":
        """Return the parameters with those of some rows replaced."""
        return RowParams(tuple(changes.get(row, params) for row, params in enumerate(self.rows)))


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Neutral values of the parameters."""

IDLE = SamplingParams(temperature=0.0)
"""Parameters of rows that have no text."""


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that do not fit a target's vocabulary."""
    if params.top_k > vocab_size:
        allowed = f"0 (keep all) to {vocab_size}"
        raise UsageError(f"top_k={params.top_k} is larger than the vocabulary; allowed: {allowed}")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UsageError(f"stop_token_ids has token {token}; allowed: 0 to {vocab_size - 1}, the target's vocabulary")
    if params.logit_bias:
        bias_table(params, vocab_size)
    if max(params.predicted, default=0) >= vocab_size:
        unknown = max(params.predicted)
        raise UsageError(f"prediction holds token {unknown}; allowed: 0 to {vocab_size - 1}, the target's vocabulary")


def bias_table(params: SamplingParams, vocab_size: int) -> Tensor:
    """Return the logit bias of each token."""
    bias_V = torch.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise UsageError(f"logit_bias names token {token}; allowed: 0 to {vocab_size - 1}, the target's vocabulary")
        bias_V[token] = value
    if not (bias_V > -torch.inf).any():
        raise UsageError(f"logit_bias bans all {vocab_size} tokens of the target; leave at least one")
    return bias_V
