"""The target's own greedy text, by its Hugging Face forward pass alone, and how another text compares with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.identity import IdentityCheck, Likeness
from polydraft.models.hf import HFModel


@dataclass(frozen=True)
class GreedyReference:
    """Continue texts by the likeliest token, one at a time, without any of the machinery under test."""

    target: HFModel
    eos_token_ids: Sequence[int] = ()

    @torch.inference_mode()
    def continued(self, text: list[int], count: int) -> list[int]:
        """Return up to `count` more tokens, an end-of-text token included."""
        new: list[int] = []
        unread, cache = text, None
        while len(new) < count:
            tokens_1T = torch.tensor([unread], device=self.target.device)
            output = self.target.hf_model(input_ids=tokens_1T, past_key_values=cache, use_cache=True)
            cache, token = output.past_key_values, int(output.logits[0, -1].float().argmax())
            new.append(token)
            unread = [token]
            if token in self.eos_token_ids:
                break
        return new

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        """Return the next token's logits."""
        logits_V: Tensor = self.target.hf_model(torch.tensor([text], device=self.target.device)).logits[0, -1].float()
        return logits_V


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How one text compares with the target's own."""

    likeness: Likeness
    near_ties: int = 0
    """Places where the text went the other way of two logits that are as good as equal; it is right after each of them."""
    details: dict[str, Any] | None = None
    """Where and how it differs."""


@dataclass(frozen=True)
class GreedyJudge:
    """Compare token by token, and after a near-tie go on along the text that is judged."""

    reference: GreedyReference

    def judge(self, prompt: list[int], got: list[int], limit: int) -> Judgement:
        """Say how `got` compares with the target's greedy text of at most `limit` tokens."""
        check, ties, start = IdentityCheck(self.reference.target), 0, 0
        while start < limit:
            text = prompt + got[:start]
            expected, rest = self.reference.continued(text, limit - start), got[start:]
            if expected == rest:
                break
            index = next((place for place, pair in enumerate(zip(expected, rest, strict=False)) if pair[0] != pair[1]), None)
            if index is None or check.compare(text, expected, rest) is Likeness.DIFFERENT:
                return Judgement(
                    likeness=Likeness.DIFFERENT, near_ties=ties, details=self._parting(text, expected, rest, start)
                )
            ties, start = ties + 1, start + index + 1
            if rest[index] in self.reference.eos_token_ids:
                break
        return Judgement(likeness=Likeness.NEAR_TIE if ties else Likeness.IDENTICAL, near_ties=ties)

    def _parting(self, text: list[int], expected: list[int], rest: list[int], start: int) -> dict[str, Any]:
        """Describe the first difference."""
        pairs = zip(expected, rest, strict=False)
        index = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(rest)))
        wanted, found = (tokens[index] if index < len(tokens) else None for tokens in (expected, rest))
        details: dict[str, Any] = {"new token number": start + index, "expected token": wanted, "token": found}
        if wanted is not None and found is not None:
            logits_V = self.reference.logits(text + expected[:index])
            details["gap of their logits"] = float(logits_V[wanted] - logits_V[found])
        return details


def check_room(prompts: Sequence[Sequence[int]], new_tokens: int, positions: int | None) -> None:
    """Refuse texts that the context would cut, and that would seem to differ there."""
    if new_tokens < 1:
        raise UsageError(f"--max-new-tokens {new_tokens} is out of range; allowed: whole numbers from 1")
    longest = max(map(len, prompts))
    if positions is not None and longest + new_tokens > positions:
        raise UsageError(
            f"--max-new-tokens {new_tokens} does not fit behind the longest prompt of {longest} tokens in the model's context "
            f"of {positions}; use {max(positions - longest, 0)} at most, or shorter prompts"
        )
