"""The target's own log-probabilities: of emitted tokens, and of a prompt's tokens while it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydraft.models import LanguageModel
from polydraft.models.language_model import Observer

if TYPE_CHECKING:
    from polydraft.engine.sequence import TokenSequence

_MOST_AT_ONCE = 64
"""Prompt tokens whose logits exist at the same time: with a large vocabulary, each takes half a megabyte."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log-probability of a token, before temperature, truncation, penalties and bias."""

    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens and their log-probabilities, likeliest first."""


def token_logprobs(logits_DV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, given the logits before it, and of the `top` likeliest tokens there."""
    logprobs_DV = torch.log_softmax(logits_DV.float(), dim=-1)
    values_DK, tokens_DK = logprobs_DV.topk(min(top, logprobs_DV.shape[1]), dim=-1)
    own_D = logprobs_DV[torch.arange(len(tokens)), torch.tensor(tokens, device=logprobs_DV.device)]
    likeliest = [list(zip(*pair, strict=True)) for pair in zip(tokens_DK.tolist(), values_DK.tolist(), strict=True)]
    return [TokenLogprob(*pair) for pair in zip(own_D.tolist(), likeliest, strict=True)]


@dataclass(frozen=True)
class PromptReader:
    """An `Observer` that records the log-probabilities of prompts while the target reads them.

    Parameters
    ----------
    target : LanguageModel
    with_logprobs : mapping from row to TokenSequence
        Sequences that want log-probabilities of their prompts.
    also : Observer, optional
        Another observer, called first.
    """

    target: LanguageModel
    with_logprobs: "Mapping[int, TokenSequence]"
    also: Observer | None

    def __call__(self, rows: slice, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """Take the features of some tokens of some rows."""
        if self.also is not None:
            self.also(rows, starts, counts, features_BTF)
        for place, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count and (sequence := self.with_logprobs.get(rows.start + place)) is not None:
                self._note(sequence, start, features_BTF[place, :count])

    def _note(self, sequence: "TokenSequence", start: int, features_TF: Tensor) -> None:
        """Record what follows each token, unless it is known: for some drafters, the last token of a chunk is read twice."""
        known, top = sequence.prompt_logprobs, sequence.prompt_top_logprobs
        assert top is not None and start <= len(known), "prompts with log-probabilities are read from the start"
        for features_DF in torch.split(features_TF[len(known) - start :], _MOST_AT_ONCE):
            following = sequence.prompt[len(known) + 1 :][: len(features_DF)]
            known += token_logprobs(self.target.head(features_DF), following, top)
