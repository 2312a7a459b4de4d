"""How a text without token ids, as an endpoint returns it, compares with the target's own greedy text."""

from dataclasses import dataclass
from typing import Any

from polydraft.certify.greedy import GreedyReference, Judgement
from polydraft.identity import IdentityCheck, Likeness

_WATCHED = 16
"""Likeliest tokens among which the one that an endpoint must have emitted is looked for; a near-tie is among the first two."""
_UNFINISHED = "\ufffd"
"""What a decoder writes for the beginning of a character."""
_SHOWN = 40


@dataclass(frozen=True)
class TextJudge:
    """Follow a text along the target's tokens, and find by the target's logits what was emitted where it parts."""

    reference: GreedyReference
    tokenizer: Any

    def judge(self, prompt: list[int], got: str, limit: int) -> Judgement:
        """Say how `got` compares with the target's greedy text of at most `limit` tokens."""
        ties, new = 0, list[int]()
        got = _finished(got)
        while True:
            expected = self.reference.continued(prompt + new, limit - len(new)) if len(new) < limit else []
            if self._text(prompt, new + expected) == got:
                break
            kept = self._agreeing(prompt, new, expected, got)
            tie = self._tie(prompt, new, expected[: kept + 1], got)
            if tie is None:
                details = self._parting(prompt, new + expected[:kept], expected[kept : kept + 1], got)
                return Judgement(likeness=Likeness.DIFFERENT, near_ties=ties, details=details)
            ties, new = ties + 1, tie
            if tie[-1] in self.reference.eos_token_ids:
                break
        return Judgement(likeness=Likeness.NEAR_TIE if ties else Likeness.IDENTICAL, near_ties=ties)

    def _tie(self, prompt: list[int], new: list[int], expected: list[int], got: str) -> list[int] | None:
        """Return the new tokens up to a near-tie by which `got` parts from the expected ones; None if there is none.

        It parts at the last of these, or before: a token that only begins a character agrees with any text.
        """
        for place in range(len(expected) - 1, -1, -1):
            context = new + expected[:place]
            token = self._emitted(prompt, context, got, expected[place])
            if token is not None:
                check = IdentityCheck(self.reference.target)
                if check.compare(prompt + context, [expected[place]], [token]) is not Likeness.DIFFERENT:
                    return [*context, token]
            if place == 0 or self._text(prompt, context) != self._text(prompt, context[:-1]):
                return None
        return None

    def _text(self, prompt: list[int], new: list[int]) -> str:
        """Return the text of new tokens, as it reads behind the prompt."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = self.tokenizer.decode(prompt + new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return _finished(whole[len(before) :])

    def _agreeing(self, prompt: list[int], new: list[int], expected: list[int], got: str) -> int:
        """Count the expected tokens that `got` begins with; an end of text where `got` goes on is none of them."""
        for count in range(1, len(expected) + 1):
            ends = expected[count - 1] in self.reference.eos_token_ids
            if ends or not got.startswith(self._text(prompt, new + expected[:count])):
                return count - 1
        return len(expected)

    def _emitted(self, prompt: list[int], context: list[int], got: str, instead_of: int) -> int | None:
        """Return the likeliest token, other than the expected one, with which the text goes on as `got` does."""
        done = self._text(prompt, context)
        logits_V = self.reference.logits(prompt + context)
        for token in logits_V.topk(min(_WATCHED, len(logits_V))).indices.tolist():
            if token == instead_of:
                continue
            if token in self.reference.eos_token_ids:
                fits = done == got
            else:
                fits = done != got and got.startswith(self._text(prompt, [*context, token]))
            if fits:
                return int(token)
        return None

    def _parting(self, prompt: list[int], context: list[int], expected: list[int], got: str) -> dict[str, Any]:
        """Describe the first difference."""
        done = self._text(prompt, context)
        details: dict[str, Any] = {
            "new token number": len(context),
            "text before": done[-_SHOWN:],
            "expected next": self._text(prompt, context + expected)[len(done) :] or "(end of text)",
            "came": got[len(done) :][:_SHOWN] or "(end of text)",
        }
        token = self._emitted(prompt, context, got, expected[0]) if expected else None
        if token is not None:
            logits_V = self.reference.logits(prompt + context)
            details["gap of their logits"] = float(logits_V[expected[0]] - logits_V[token])
        return details


def _finished(text: str) -> str:
    """Leave out the beginning of a character that the next token would finish."""
    return text.rstrip(_UNFINISHED)
