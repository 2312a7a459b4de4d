"""Continuations of all beams with their scores: the distribution that beams are drawn from."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polydraft.beam._node import Beam, Node
from polydraft.devices import can_sync
from polydraft.errors import FailureError
from polydraft.sampling import NO_TOKEN, PartialVocabulary, SamplingParams, Warper
from polydraft.verify.weights import largest

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_TIES = 16
"""How many tokens after the k-th to check for ties with it; if there are more ties, full logits are used."""


@dataclass(frozen=True, eq=False)
class Continuations:
    """The next tokens of R texts, X in all, row by row, without those of probability zero."""

    rows_X: Indices
    tokens_X: Indices
    scores_X: Floats
    """What each token adds to the score of its text."""
    log_probs_X: Floats
    """The model's own log-probabilities, before temperature, truncation and penalties."""
    num_rows: int
    vocab_size: int

    def totals(self, beams: Sequence[Beam]) -> Floats:
        """Return the scores of the continued texts, given the R beams."""
        return np.array([beam.score for beam in beams], dtype=np.float64)[self.rows_X] + self.scores_X

    def restricted(self, rows: Sequence[int]) -> tuple["Continuations", Indices]:
        """Return the continuations of some rows, with rows renumbered, and which entries they were."""
        table_R = np.full(self.num_rows, -1, dtype=np.int64)
        table_R[list(rows)] = np.arange(len(rows))
        renumbered_X = table_R[self.rows_X]
        kept_X = np.flatnonzero(renumbered_X >= 0)
        part = Continuations(
            renumbered_X[kept_X],
            self.tokens_X[kept_X],
            self.scores_X[kept_X],
            self.log_probs_X[kept_X],
            len(rows),
            self.vocab_size,
        )
        return part, kept_X

    @cached_property
    def bounds(self) -> list[int]:
        """Where the entries of each row start, and at the end where those of the last row stop."""
        bounds: list[int] = np.searchsorted(self.rows_X, np.arange(self.num_rows + 1)).tolist()
        return bounds

    def keys(self) -> Indices:
        """Return a number for each pair of a row and a token, the same in every distribution."""
        return self.rows_X * self.vocab_size + self.tokens_X


def joined(pieces: Sequence[tuple[Continuations, int]]) -> Continuations:
    """Join rows of several distributions, in the given order; a row may occur twice."""
    first = pieces[0][0]
    if len(pieces) == first.num_rows and all(
        distribution is first and row == place for place, (distribution, row) in enumerate(pieces)
    ):
        return first
    slices = [(distribution, distribution.bounds[row], distribution.bounds[row + 1]) for distribution, row in pieces]
    return Continuations(
        np.repeat(np.arange(len(slices)), [stop - start for _, start, stop in slices]),
        np.concatenate([distribution.tokens_X[start:stop] for distribution, start, stop in slices]),
        np.concatenate([distribution.scores_X[start:stop] for distribution, start, stop in slices]),
        np.concatenate([distribution.log_probs_X[start:stop] for distribution, start, stop in slices]),
        len(slices),
        first.vocab_size,
    )


def no_continuations(num_rows: int, vocab_size: int) -> Continuations:
    """Return rows without any continuations, for texts without a guess."""
    none_X = np.zeros(0, dtype=np.int64)
    return Continuations(none_X, none_X, none_X.astype(np.float64), none_X.astype(np.float64), num_rows, vocab_size)


def averaged(distribution: Continuations, other: Continuations, rows: Sequence[int]) -> Continuations:
    """Average some rows of a distribution with the rows of another, which has only these.

    If such a row of `distribution` is empty, the other's row still keeps only half its mass, because a hint is not certain. The
    result is for drafts, whose log-probabilities are not used, so they are set to the scores.
    """
    shares_R = np.zeros(distribution.num_rows)
    shares_R[list(rows)] = np.log(0.5)
    other_keys_X = np.asarray(rows, dtype=np.int64)[other.rows_X] * distribution.vocab_size + other.tokens_X
    keys_X = np.concatenate([distribution.keys(), other_keys_X])
    scores_X = np.concatenate([distribution.scores_X + shares_R[distribution.rows_X], other.scores_X + np.log(0.5)])
    order_X = np.argsort(keys_X, kind="stable")
    keys_X, scores_X = keys_X[order_X], scores_X[order_X]
    # Tokens that are in both distributions are adjacent now.
    once_X = np.ones(len(keys_X), dtype=bool)
    once_X[1:] = keys_X[1:] != keys_X[:-1]
    again_X = np.flatnonzero(~once_X)
    scores_X[again_X - 1] = np.logaddexp(scores_X[again_X - 1], scores_X[again_X])
    keys_X, scores_X = keys_X[once_X], scores_X[once_X]
    rows_X = keys_X // distribution.vocab_size
    return Continuations(
        rows_X, keys_X - rows_X * distribution.vocab_size, scores_X, scores_X, distribution.num_rows, distribution.vocab_size
    )


def normalised(totals_X: Floats) -> Floats:
    """Return the beam distribution of eq. 1: probabilities proportional to the likelihoods of whole texts."""
    if not len(totals_X):
        return totals_X
    weights_X = np.exp(totals_X - totals_X.max())
    probs_X: Floats = weights_X / weights_X.sum()
    return probs_X


class DistributionMaker:
    """Turns a model's logits into continuations, with the steps and order of Hugging Face's beams.

    Log-softmax comes first, then penalties, temperature, top-k, top-p and min-p, without renormalising. A beam's score is the
    sum of the results; without temperature and truncation that is the log-likelihood.

    Parameters
    ----------
    params : SamplingParams
        For search, only penalties and biases apply, as in Hugging Face.
    vocabulary : PartialVocabulary, optional
        The tokens of a draft's columns, if it does not know all tokens.
    best : int, optional
        For search: how many of a text's best continuations to keep.
    draft : str, optional
        Name of the draft if the logits are a draft's: drafting continues if a processor fails.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
        *,
        vocabulary: PartialVocabulary | None = None,
        best: int | None = None,
        draft: str | None = None,
    ) -> None:
        if best is not None:
            params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        self._params, self._best = params, best
        self._who = "the target" if draft is None else f"the draft {draft!r}"
        self._vocab_size, self._vocabulary, self._device = vocab_size, vocabulary, device
        self._tokens_D = None if vocabulary is None else vocabulary.tokens_D.cpu().numpy()
        self._adjusted = params.needs_history or bool(params.logit_bias)
        self._warper = Warper(params, vocab_size, [prompt], device, of_draft=draft is not None)

    @property
    def has_processors(self) -> bool:
        """Whether there are logits processors, which may fail on texts that they have ruled out."""
        return bool(self._params.processors)

    @property
    def emptied_by(self) -> str | None:
        """Name of the processor that left a text without a next token; None if none did."""
        return self._warper.processing.emptied_by

    @property
    def never_gains(self) -> bool:
        """Whether the weights of a text's continuations sum to at most one, so that no text's score rises."""
        params = self._params
        penalised = min(params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty) >= 0
        return penalised and params.temperature <= 1 and not params.processors and not params.logit_bias

    @property
    def is_short(self) -> bool:
        """Whether each text has only a few continuations, so that distributions are cheap to copy to the host."""
        return not self._adjusted and (self._best is not None or bool(self._params.top_k))

    @property
    def kind(self) -> Hashable:
        """What `packed` depends on."""
        params = self._params
        return self._best, params.temperature, params.top_k, params.top_p, params.min_p

    @property
    def is_packed(self) -> bool:
        """Whether `packed` can be used: distributions are short, and there are more columns than it looks at."""
        columns = self._vocab_size if self._vocabulary is None else len(self._vocabulary.tokens_D)
        return self.is_short and (self._best is not None or self._params.top_k + _TIES < columns)

    def packed(self, logits_RV: Tensor) -> Tensor:
        """Return the distributions of some texts as one tensor on their device, for one copy to the host."""
        short = self._shortened(self._own(logits_RV))
        assert short is not None, "call it only if is_packed"
        return short

    def unpacked(self, packed_RX: Floats, nodes: Sequence[Node], logits: Callable[[Sequence[Node]], Tensor]) -> Continuations:
        """Return continuations from packed distributions; `logits` returns the full logits of texts that need them."""
        odd_R = np.isnan(packed_RX[:, 0])
        if not odd_R.any():
            return self._listed(packed_RX)
        # Use full logits only for these texts, so that no distribution depends on which other texts are in the pass.
        odd = np.flatnonzero(odd_R).tolist()
        texts = [nodes[row] for row in odd]
        whole, short = self._whole(self._own(logits(texts)), texts), self._listed(packed_RX[~odd_R])
        pieces = {row: (whole, place) for place, row in enumerate(odd)}
        pieces |= {row: (short, place) for place, row in enumerate(np.flatnonzero(~odd_R).tolist())}
        return joined([pieces[row] for row in range(len(packed_RX))])

    def _listed(self, packed_RX: Floats) -> Continuations:
        """Return packed distributions as continuations."""
        rows, width = len(packed_RX), packed_RX.shape[1] // 3
        kept_RK = packed_RX[:, :width] > -np.inf
        if kept_RK.all():
            rows_X = np.repeat(np.arange(rows), width)
            values_3X = packed_RX.reshape(rows, 3, width).transpose(1, 0, 2).reshape(3, -1)
        else:
            rows_X, columns_X = np.nonzero(kept_RK)
            values_3X = packed_RX.reshape(rows, 3, width)[rows_X, :, columns_X].T.copy()
        return Continuations(rows_X, values_3X[2].astype(np.int64), values_3X[0], values_3X[1], rows, self._vocab_size)

    def __call__(self, logits_RV: Tensor, nodes: Sequence[Node]) -> Continuations:
        """Return the continuations of the texts that end in `nodes`."""
        own_RV = self._own(logits_RV)
        short = None if self._adjusted else self._shortened(own_RV)
        if short is None:
            return self._whole(own_RV, nodes)
        rows = {node: row for row, node in enumerate(nodes)}
        return self.unpacked(short.cpu().numpy(), nodes, lambda texts: logits_RV[[rows[node] for node in texts]])

    def _whole(self, logits_RV: Tensor, nodes: Sequence[Node]) -> Continuations:
        """Return the continuations from full logits."""
        if self._adjusted and self._vocabulary is not None:
            logits_RV = self._vocabulary.spread(logits_RV, fill=-torch.inf)
        norm_R1 = logits_RV.logsumexp(-1, keepdim=True)
        if not norm_R1.isfinite().all():
            raise FailureError(
                f"{self._who} returned logits that are not numbers after {nodes[0].depth} new tokens; try dtype float32, or "
                "check the weights"
            )
        log_probs_RV = logits_RV - norm_R1
        missing = 0 if self._vocabulary is not None and not self._adjusted else self._vocab_size - log_probs_RV.shape[-1]
        if missing:  # tokens beyond the columns have no mass
            log_probs_RV = torch.nn.functional.pad(log_probs_RV, (0, missing), value=-torch.inf)
        scores_RV = self._warper.scores(log_probs_RV[None], self._paths(nodes))[0]
        if self._best is not None:
            scores_RV, columns_RV = scores_RV.topk(min(self._best, scores_RV.shape[1]), dim=-1)
            log_probs_RV, tokens_RV = log_probs_RV.gather(1, columns_RV), columns_RV.cpu().numpy()
        else:
            tokens_RV = np.broadcast_to(np.arange(scores_RV.shape[1]), scores_RV.shape)
        if self._tokens_D is not None and not self._adjusted:
            tokens_RV = self._tokens_D[tokens_RV]
        scores, log_probs = torch.stack([scores_RV, log_probs_RV]).double().cpu().numpy()
        kept_RV = scores > -np.inf
        return Continuations(
            np.nonzero(kept_RV)[0], tokens_RV[kept_RV], scores[kept_RV], log_probs[kept_RV], len(scores), self._vocab_size
        )

    def _own(self, logits_RV: Tensor) -> Tensor:
        """Return the logits as float32, without padding columns."""
        logits_RV = logits_RV.float()
        return logits_RV[:, : self._vocab_size] if self._vocabulary is None else logits_RV

    def _shortened(self, logits_RV: Tensor) -> Tensor | None:
        """Return scores, log-probabilities and ids `[R, 3 K]` of the few best tokens; None if distributions are not short.

        A row starts with NaN if more tokens might have mass, or if its logits are not finite.
        """
        columns, norm_R1 = logits_RV.shape[-1], logits_RV.logsumexp(-1, keepdim=True)
        tied_R1 = ~norm_R1.isfinite()
        if self._best is not None:
            best_RK, columns_RK = _top(logits_RV, min(self._best, columns))
            scores_RK = log_probs_RK = best_RK - norm_R1
        else:
            params = self._params
            if not params.top_k or params.top_k + _TIES >= columns:
                return None
            best_RK, columns_RK = _top(logits_RV, params.top_k + _TIES)
            if params.top_p < 1:
                # Of tied tokens the last must come first: the cut may fall among them, and the warper keeps the last ones.
                columns_RK, order_RK = columns_RK.sort(-1, descending=True)
                best_RK, order_RK = best_RK.gather(1, order_RK).sort(dim=-1, descending=True, stable=True)
                columns_RK = columns_RK.gather(1, order_RK)
            kept_RK = best_RK >= best_RK[:, params.top_k - 1 : params.top_k]
            tied_R1 = tied_R1 | kept_RK[:, -1:]
            log_probs_RK = best_RK - norm_R1
            scores_RK = self._truncated((log_probs_RK / params.temperature).masked_fill(~kept_RK, -torch.inf))
        first_R1 = scores_RK[:, :1].masked_fill(tied_R1, torch.nan)
        tokens_RK = columns_RK if self._vocabulary is None else self._vocabulary.tokens_D[columns_RK]
        parts = [first_R1, scores_RK[:, 1:], log_probs_RK, tokens_RK]
        return torch.cat([part.double() for part in parts], dim=-1)

    def _truncated(self, scores_RK: Tensor) -> Tensor:
        """Apply top-p and min-p to scores in descending order."""
        params = self._params
        if params.top_p < 1:
            probs_RK = torch.softmax(scores_RK, -1).double()
            low_RK = probs_RK.cumsum(-1) - probs_RK >= params.top_p
            low_RK[:, 0] = False
            scores_RK = scores_RK.masked_fill(low_RK, -torch.inf)
        if params.min_p > 0:
            probs_RK = torch.softmax(scores_RK, -1)
            scores_RK = scores_RK.masked_fill(probs_RK < params.min_p * probs_RK.amax(-1, keepdim=True), -torch.inf)
        return scores_RK

    def _paths(self, nodes: Sequence[Node]) -> Tensor:
        """Return the new tokens of each text `[1, R, P]`, if penalties need them."""
        texts = [node.tokens() for node in nodes] if self._params.needs_history else [[] for _ in nodes]
        longest = max(map(len, texts))
        padded = [text + [NO_TOKEN] * (longest - len(text)) for text in texts]
        return torch.tensor([padded], dtype=torch.long, device=self._device)


def _top(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row in order, and their columns."""
    if can_sync(logits_RV):
        best_RK, columns_RK = logits_RV.topk(count, dim=-1)
        return best_RK, columns_RK
    # torch's topk would take 70 µs, with one block of threads per row.
    return largest(logits_RV, count)
