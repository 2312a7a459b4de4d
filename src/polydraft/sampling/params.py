"""What the user asks of sampling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from polydraft.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's logits become its sampling law.

    The order of operations is that of Hugging Face `generate`: logit bias, repetition penalty, presence and
    frequency penalty, `processors`, temperature, top-k, top-p, min-p. It is the same with and without speculation.

    Equal parameters have equal hashes. Hashes leave out `logit_bias` and `processors`, whose own may not exist.
    """

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtract, times its count, from logits of tokens that occur in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id to a number added to its logit."""
    processors: tuple[Any, ...] = field(default=(), hash=False)
    """Hugging Face `LogitsProcessor` objects, called as `processor(input_ids, scores)` with each node's own ancestors."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UsageError(
                    f"{name}={value!r} is not a number; use a number such as {type(self).__dataclass_fields__[name].default}"
                )
        _check("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
            raise UsageError(f"top_k={self.top_k!r} is not a whole number; use 0 to keep all tokens")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (keep all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0 (1 is off)")
        _check("presence_penalty", self.presence_penalty, True, "a number")
        _check("frequency_penalty", self.frequency_penalty, True, "a number")
        bias: Any = self.logit_bias
        for token, value in bias.items():
            if not isinstance(token, Integral) or not isinstance(value, Real) or not value < math.inf:
                entry, allowed = f"{{{token!r}: {value!r}}}", "token ids with finite numbers, or -inf to ban a token"
                raise UsageError(f"logit_bias={entry} is out of range; allowed: {allowed}")

    @property
    def needs_history(self) -> bool:
        """Whether a law depends on which tokens came before, beyond what the model itself sees."""
        return (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0 or bool(self.processors)
        )


def _check(name: str, value: float, fits: bool, allowed: str) -> None:
    if not math.isfinite(value) or not fits:
        raise UsageError(f"{name}={value!r} is out of range; allowed: {allowed}")
