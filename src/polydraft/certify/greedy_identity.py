"""Certificates of greedy identity: a whole decoder, or an endpoint, against the target's own greedy text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polydraft.certify.certificate import Certificate
from polydraft.certify.check import Check, CounterExample
from polydraft.certify.endpoint import Endpoint
from polydraft.certify.greedy import GreedyJudge, GreedyReference, Judgement, check_room
from polydraft.certify.kit import Observer
from polydraft.certify.text_judge import TextJudge
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.identity import Likeness
from polydraft.models import check_prompts
from polydraft.models.hf import HFModel
from polydraft.prompts import Prompt
from polydraft.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_SURE = 0.99


def certify_decoder(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    chat: bool = True,
    observer: Observer = lambda *_: None,
) -> Certificate:
    """Compare a decoder's greedy texts with the target's own.

    Parameters
    ----------
    decoder : Decoder
        Of a Hugging Face target.
    prompts : sequence of Prompt
        See `polydraft.prompts.load_prompts`.
    max_new_tokens : int
        Most tokens of each text.
    chat : bool
        Whether prompts go into the chat template.
    observer : callable
        Told how far it is.

    Returns
    -------
    Certificate
        With one check, `greedy`. A text that goes the other way of a near-tie is judged on from there, with that token kept.
    """
    reference, encoded = _reference(decoder, prompts, chat, max_new_tokens)
    judge = GreedyJudge(reference)

    settings: dict[str, Any] = {}

    def judged(index: int) -> Judgement:
        result = decoder.generate(encoded[index], sampling=_GREEDY, max_new_tokens=max_new_tokens, seed=index)
        settings.update(result.settings)
        return judge.judge(encoded[index], result.token_ids, max_new_tokens)

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
        Of the model that the endpoint is said to serve; gives tokens and logits, drafts nothing.
    prompts, max_new_tokens, observer
        As for `certify_decoder`.
    """
    reference, encoded = _reference(target, prompts, endpoint.chat, max_new_tokens)
    judge = TextJudge(reference, target.tokenizer)

    def judged(index: int) -> Judgement:
        return judge.judge(encoded[index], endpoint.complete(prompts[index].text, max_new_tokens), max_new_tokens)

    return _certificate("endpoint", f"{endpoint.model} at {endpoint.address}", prompts, judged, max_new_tokens, observer)


def _used(decoder: Decoder, settings: dict[str, Any]) -> str:
    """Say what drafted and verified; at temperature 0 that need not be the scheme that was asked for."""
    if not settings.get("scheme"):
        return "no drafts"
    draft = getattr(getattr(decoder.drafter, "model", None), "name", decoder.drafter.name)
    tree = getattr(decoder.drafter, "topology", "of its own")
    return f"draft {draft}, tree {tree}, scheme {settings['scheme']}, walk {settings.get('walk')}"


def _reference(
    decoder: Decoder, prompts: Sequence[Prompt], chat: bool, new_tokens: int
) -> tuple[GreedyReference, list[list[int]]]:
    if not isinstance(decoder.target, HFModel):
        raise UsageError(f"target {decoder.target.name!r} is no Hugging Face model; allowed: decoders that load() returns")
    encoded = [decoder.encode(prompt.text, chat=chat) for prompt in prompts]
    check_prompts(encoded, decoder.target.max_positions, decoder.target.vocab_size)
    check_room(encoded, new_tokens, decoder.target.max_positions)
    return GreedyReference(decoder.target, decoder.eos_token_ids), encoded


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
    for index in range(len(prompts)):
        judgements.append(judged(index))
        observer(phase, index + 1, len(prompts))
    counts = {kind: sum(judgement.likeness is kind for judgement in judgements) for kind in Likeness}
    wrong = [index for index, judgement in enumerate(judgements) if judgement.likeness is Likeness.DIFFERENT]
    # The shortest way to a text that differs is the easiest to look at.
    worst = min(wrong, key=lambda index: (judgements[index].details or {}).get("new token number", 0), default=None)
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
        counter_example=None if worst is None else _example(prompts[worst], judgements[worst]),
        details=[
            {"prompt": prompt.id, "likeness": judgement.likeness.value, "near_ties": judgement.near_ties}
            for prompt, judgement in zip(prompts, judgements, strict=True)
        ],
    )
    claim = "at temperature 0 its texts are the target's own, but for near-ties of two logits"
    return Certificate((subject,), (check,), claim, (phase,))


def _example(prompt: Prompt, judgement: Judgement) -> CounterExample:
    return CounterExample(
        reason="a greedy text is not the target's, and two logits do not tie where they part",
        details={"prompt": prompt.id, **(judgement.details or {})},
    )
