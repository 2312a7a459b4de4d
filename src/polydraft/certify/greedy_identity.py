"""Certificates of greedy identity: compare a whole decoder, or an endpoint, with the target's own greedy text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from polydraft.certify._certificate import Certificate, Check, CounterExample
from polydraft.certify._kit import Observer
from polydraft.certify.endpoint import Endpoint
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import check_prompts
from polydraft.models.hf import HFModel
from polydraft.prompts import Prompt
from polydraft.sampling import SamplingParams
from polydraft.trees import causal_block

_LEAST_GAP = 1e-3
"""Logits closer than this are a near-tie in any precision."""
_NOISE_FACTOR = 4.0
"""Logits closer than this many times the rounding measured at their position are a near-tie too."""
_WATCHED = 16
"""How many of the likeliest tokens to check for rounding, and for the token an endpoint emitted; a near-tie needs only two."""
_GREEDY = SamplingParams(temperature=0)
_SURE = 0.99
_UNFINISHED = "\ufffd"
"""Tokenizers write this for an incomplete character."""
_SHOWN = 40


class Likeness(StrEnum):
    """How a greedy text compares with the expected one."""

    IDENTICAL = "identical"
    NEAR_TIE = "near-tie"
    """They diverge where two logits are nearly equal, because a matrix product of another shape rounds differently."""
    DIFFERENT = "different"


@torch.inference_mode()
def next_logits(target: HFModel, text: list[int]) -> Tensor:
    """Return the logits after a text, from one ordinary pass."""
    logits_V: Tensor = target.hf_model(torch.tensor([text], device=target.device)).logits[0, -1].float()
    return logits_V


def parting(one: list[int], other: list[int]) -> int:
    """Return the first position at which two texts differ: the end of the shorter one if the other begins with it."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (first, second) in pairs if first != second), min(len(one), len(other)))


@torch.inference_mode()
def likeness_of(target: HFModel, prompt: list[int], expected: list[int], got: list[int]) -> Likeness:
    """Compare two texts; where they first differ, the target's logits decide whether it is a near-tie."""
    if expected == got:
        return Likeness.IDENTICAL
    index = parting(expected, got)
    if index == min(len(expected), len(got)):
        return Likeness.DIFFERENT  # one ends early
    text = prompt + expected[:index]
    logits_V = next_logits(target, text)
    gap = float((logits_V[expected[index]] - logits_V[got[index]]).abs())
    return Likeness.NEAR_TIE if gap <= _tolerance(target, text, logits_V) else Likeness.DIFFERENT


def _tolerance(target: HFModel, text: list[int], logits_V: Tensor) -> float:
    """Return the largest gap of a near-tie here: measure rounding by reading the last token in a pass of its own."""
    context = target.start(1, len(text))
    context.prefill([text[:-1]])
    last_11 = torch.tensor([text[-1:]], device=target.device)
    features_11F = context.extend(last_11, causal_block(1, 1, target.device))
    other_V = target.head(features_11F[0, -1:])[0].float()
    likeliest = logits_V.topk(min(_WATCHED, len(logits_V))).indices
    noise = (logits_V - other_V)[likeliest].abs().max()
    return max(_LEAST_GAP, _NOISE_FACTOR * float(noise))


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How one text compares with the target's own."""

    likeness: Likeness
    near_ties: int = 0
    """Number of positions where the text took the other of two nearly equal logits, and was right again afterwards."""
    details: dict[str, Any] | None = None
    """Where and how the text differs."""


@dataclass(frozen=True)
class GreedyReference:
    """The target's greedy texts, computed one token at a time, without any of the code under test."""

    target: HFModel
    eos_token_ids: Sequence[int] = ()

    @torch.inference_mode()
    def continued(self, text: list[int], count: int) -> list[int]:
        """Return up to `count` more tokens, including an end-of-text token."""
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

    def gap(self, text: list[int], wanted: int, found: int) -> float:
        """Return how much larger one token's logit is than another's."""
        logits_V = next_logits(self.target, text)
        return float(logits_V[wanted] - logits_V[found])

    def judge(self, prompt: list[int], got: list[int], limit: int) -> Judgement:
        """Compare a text with the target's greedy one of at most `limit` tokens; after a near-tie, continue from `got`."""
        ties, start = 0, 0
        while start < limit:
            text = prompt + got[:start]
            expected, rest = self.continued(text, limit - start), got[start:]
            if expected == rest:
                break
            index = parting(expected, rest)
            if likeness_of(self.target, text, expected, rest) is Likeness.DIFFERENT:
                wanted, found = (tokens[index] if index < len(tokens) else None for tokens in (expected, rest))
                details: dict[str, Any] = {"new token number": start + index, "expected token": wanted, "token": found}
                if wanted is not None and found is not None:
                    details["gap of their logits"] = self.gap(text + expected[:index], wanted, found)
                return Judgement(likeness=Likeness.DIFFERENT, near_ties=ties, details=details)
            ties, start = ties + 1, start + index + 1
            if rest[index] in self.eos_token_ids:
                break
        return Judgement(likeness=Likeness.NEAR_TIE if ties else Likeness.IDENTICAL, near_ties=ties)


@dataclass(frozen=True)
class TextJudge:
    """Compares a text, whose tokens are unknown, with the target's; where they differ, guesses the token from the logits."""

    reference: GreedyReference
    tokenizer: Any

    def judge(self, prompt: list[int], got: str, limit: int) -> Judgement:
        """Compare a text with the target's greedy one of at most `limit` tokens."""
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
        """Return the new tokens up to and including a near-tie where `got` leaves the expected ones; None if there is none.

        The tie may be before the last expected token, because a token that only begins a character agrees with any text.
        """
        for place in range(len(expected) - 1, -1, -1):
            context = new + expected[:place]
            token = self._emitted(prompt, context, got, expected[place])
            if token is not None:
                kind = likeness_of(self.reference.target, prompt + context, [expected[place]], [token])
                if kind is not Likeness.DIFFERENT:
                    return [*context, token]
            if place == 0 or self._text(prompt, context) != self._text(prompt, context[:-1]):
                return None
        return None

    def _text(self, prompt: list[int], new: list[int]) -> str:
        """Return the text of new tokens as it appears after the prompt."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = self.tokenizer.decode(prompt + new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return _finished(whole[len(before) :])

    def _agreeing(self, prompt: list[int], new: list[int], expected: list[int], got: str) -> int:
        """Count the expected tokens that `got` begins with, up to an end-of-text token."""
        for count in range(1, len(expected) + 1):
            ends = expected[count - 1] in self.reference.eos_token_ids
            if ends or not got.startswith(self._text(prompt, new + expected[:count])):
                return count - 1
        return len(expected)

    def _emitted(self, prompt: list[int], context: list[int], got: str, instead_of: int) -> int | None:
        """Return the likeliest token, other than the expected one, that continues the text as in `got`."""
        done = self._text(prompt, context)
        logits_V = next_logits(self.reference.target, prompt + context)
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
            details["gap of their logits"] = self.reference.gap(prompt + context, expected[0], token)
        return details


def _finished(text: str) -> str:
    """Drop an incomplete character at the end."""
    return text.rstrip(_UNFINISHED)


def certify_decoder(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    chat: bool = True,
    observer: Observer = lambda *_: None,
) -> Certificate:
    """Compare a decoder's greedy texts with its target's own.

    Parameters
    ----------
    decoder : Decoder
        Its target must be a Hugging Face model.
    prompts : sequence of Prompt
        See `polydraft.prompts.load_prompts`.
    max_new_tokens : int
        Most tokens of each text.
    chat : bool
        Whether prompts go into the chat template.
    observer : callable
        Called with progress.

    Returns
    -------
    Certificate
        With one check, `greedy`. After a near-tie, the rest of a text is compared with how the target continues it.
    """
    reference, encoded = _reference(decoder, prompts, chat, max_new_tokens)
    settings: dict[str, Any] = {}

    def judged(index: int) -> Judgement:
        result = decoder.generate(encoded[index], sampling=_GREEDY, max_new_tokens=max_new_tokens, seed=index)
        settings.update(result.settings)
        return reference.judge(encoded[index], result.token_ids, max_new_tokens)

    certificate = _certificate("decoder", f"decoder of {decoder.target.name}", prompts, judged, max_new_tokens, observer)
    (check,) = certificate.checks
    return replace(certificate, checks=(replace(check, note=f"{check.note}; {_used(decoder, settings)}"),))


def certify_endpoint(
    endpoint: Endpoint,
    target: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    observer: Observer = lambda *_: None,
) -> Certificate:
    """Compare the text that an endpoint returns at temperature 0 with the target's own greedy text.

    Parameters
    ----------
    endpoint : Endpoint
    target : Decoder
        A decoder of the model that the endpoint claims to serve; only its tokens and logits are used.
    prompts, max_new_tokens, observer
        As for `certify_decoder`.
    """
    reference, encoded = _reference(target, prompts, endpoint.chat, max_new_tokens)
    judge = TextJudge(reference, target.tokenizer)

    def judged(index: int) -> Judgement:
        return judge.judge(encoded[index], endpoint.complete(prompts[index].content, max_new_tokens), max_new_tokens)

    return _certificate("endpoint", f"{endpoint.model} at {endpoint.address}", prompts, judged, max_new_tokens, observer)


def _used(decoder: Decoder, settings: dict[str, Any]) -> str:
    """Return the draft, tree, scheme and walk that were used; at temperature 0 the scheme may not be the one given."""
    if not settings.get("scheme"):
        return "no drafts"
    draft = getattr(decoder.drafter.model, "name", decoder.drafter.name)
    tree = decoder.drafter.topology or "of its own"
    return f"draft {draft}, tree {tree}, scheme {settings['scheme']}, walk {settings.get('walk')}"


def _reference(
    decoder: Decoder, prompts: Sequence[Prompt], chat: bool, new_tokens: int
) -> tuple[GreedyReference, list[list[int]]]:
    if not isinstance(decoder.target, HFModel):
        raise UsageError(f"target {decoder.target.name!r} is not a Hugging Face model; allowed: decoders that load() returns")
    encoded = [decoder.encode(prompt.content, chat=chat) for prompt in prompts]
    check_prompts(encoded, decoder.target.max_positions, decoder.target.vocab_size)
    if new_tokens < 1:
        raise UsageError(f"--max-new-tokens {new_tokens} is out of range; allowed: whole numbers from 1")
    check_room(max(map(len, encoded)), new_tokens, decoder.target.max_positions)
    return GreedyReference(decoder.target, decoder.eos_token_ids), encoded


def check_room(longest: int, new_tokens: int, positions: int | None) -> None:
    """Refuse texts longer than the context: we stop there, others continue, so the texts would seem to differ."""
    if positions is not None and longest + new_tokens > positions:
        raise UsageError(
            f"--max-new-tokens {new_tokens} does not fit after the longest prompt of {longest} tokens in the model's context "
            f"of {positions}; use {max(positions - longest, 0)} at most, or shorter prompts"
        )


def _certificate(
    phase: str,
    subject: str,
    prompts: Sequence[Prompt],
    judged: Callable[[int], Judgement],
    tokens: int,
    observer: Observer,
) -> Certificate:
    started = time.monotonic()
    judgements: list[Judgement] = []
    observer(phase, 0, len(prompts))
    for index in range(len(prompts)):
        judgements.append(judged(index))
        observer(phase, index + 1, len(prompts))
    counts = {kind: sum(judgement.likeness is kind for judgement in judgements) for kind in Likeness}
    wrong = [index for index, judgement in enumerate(judgements) if judgement.likeness is Likeness.DIFFERENT]
    # Show the earliest difference, which is the easiest to look into.
    worst = min(wrong, key=lambda index: (judgements[index].details or {}).get("new token number", 0), default=None)
    example = worst is not None and CounterExample(
        reason="a greedy text is not the target's, and where the two diverge it is not a near-tie",
        details={"prompt": prompts[worst].id, **(judgements[worst].details or {})},
    )
    check = Check(
        name="greedy",
        subject=subject,
        passed=not wrong,
        size=len(prompts),
        unit="prompts",
        measure="texts that differ",
        worst=float(len(wrong)),
        threshold=0.0,
        detects=1 - (1 - _SURE) ** (1 / len(prompts)),
        seconds=round(time.monotonic() - started, 3),
        note=f"of up to {tokens} tokens, {counts[Likeness.IDENTICAL]} identical, {counts[Likeness.NEAR_TIE]} but for near-ties",
        counter_example=example or None,
        details=[
            {"prompt": prompt.id, "likeness": judgement.likeness.value, "near_ties": judgement.near_ties}
            for prompt, judgement in zip(prompts, judgements, strict=True)
        ],
    )
    claim = "at temperature 0 its texts are the target's own, but for near-ties of two logits"
    return Certificate((subject,), (check,), claim, (phase,))
