"""Logits to probabilities, in the order of Hugging Face `generate`."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from polydraft.devices import brought, is_host
from polydraft.operations import operation
from polydraft.rows import ByRow
from polydraft.sampling.categorical import NO_TOKEN
from polydraft.sampling.gumbel import largest_perturbed, perturbed
from polydraft.sampling.history import History
from polydraft.sampling.params import CoupledParams, RowParams, SamplingParams, bias_table
from polydraft.sampling.processing import Processing
from polydraft.sampling.row_numbers import RowNumber, RowNumbers
from polydraft.sampling.truncation import largest_kept, truncated
from polydraft.sampling.vocabulary import PartialVocabulary

RANKED_NATS = 60.0
"""How far below the largest logit a token counts as ruled out, in `Warper.ranking`."""


@operation
def softened(logits_BGV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the softmax of logits divided by each row's temperature, in float32; a NaN spreads over its whole node."""
    scores_BGV = logits_BGV.float()
    return torch.softmax(scores_BGV if temperature_B is None else scores_BGV / temperature_B.view(-1, 1, 1), dim=-1)


class Warper(ByRow):
    """Turn logits into the sampling distribution of each row's parameters, for nodes anywhere in a tree.

    It keeps the text of each row (prompt and emitted tokens) as far as the parameters need it. The tokens from there to a node
    are passed in as `paths_BGP`. If some rows are coupled, logits must be `prepared` first, which does all that depends on the
    text and its length; from then on every row is like a greedy one.

    Parameters
    ----------
    params : RowParams, SamplingParams, or one SamplingParams per row
    vocab_size : int
    prompts : sequence of token-id lists, one per row
    device : torch.device
    of_draft : bool
        Whether the logits are a draft's. A draft, unlike a target, may know none of the tokens that are not ruled out; its
        distribution is then zero everywhere.
    vocabulary : PartialVocabulary, optional
        Tokens of the logits' columns, if these are not the whole vocabulary.
    ranking_temperature : float
        Temperature at which logits with noise best predict the token that the target takes.
    """

    ROW_STATE = ("_bias_B1V", "_lengths_B")

    def __init__(
        self,
        params: RowParams | SamplingParams | Sequence[SamplingParams],
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        of_draft: bool = False,
        vocabulary: PartialVocabulary | None = None,
        ranking_temperature: float = 1.0,
    ) -> None:
        # Without prompts, there is one row, whose text is never used.
        params = RowParams.of(params, max(len(prompts), 1))
        self._device, self._vocabulary, self._vocab_size = device, vocabulary, vocab_size
        self._of_draft = of_draft
        self._numbers = RowNumbers(len(params), device)
        self._keys, self._noise_scales, self._ranking = (
            RowNumber(len(params), dtype, device) for dtype in (torch.long, torch.float32, torch.float32)
        )
        """Each row's key and scale of noise, 0 without, and the temperature at which scores with noise rank tokens."""
        self._ranking_temperature = ranking_temperature
        self._lengths_B = torch.zeros(len(params), dtype=torch.long, device=device)
        """Tokens of each text; only coupled rows use it."""
        self._bias_B1V: Tensor | None = None
        self.processing = Processing(of_draft, vocabulary)
        """Calls the logits processors."""
        self._history = History(self._numbers, vocab_size, device, self.processing, vocabulary)
        self.admit(params, range(len(prompts)), prompts)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the parts that keep the rows' numbers and texts."""
        return self._numbers, self._keys, self._noise_scales, self._ranking, self._history

    def admit(self, params: RowParams, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Take the rows' parameters from now on, and begin new texts in some rows."""
        self.use(params)
        self._history.begin(prompts, rows)
        if self._coupled and prompts:
            index_X, lengths_X = brought(torch.tensor([list(rows), [len(prompt) for prompt in prompts]]), self._device)
            self._lengths_B[index_X] = lengths_X

    def use(self, params: RowParams) -> None:
        """Take the rows' parameters from now on, also when there are more or fewer rows, or some were swapped."""
        assert all(row.grammar is None for row in params), "grammars must be processors by now"
        self.params = params
        # The distribution of a greedy row is computed with the others, but not used.
        drawn = params if params.all_greedy else params.map(_as_if_drawn)
        self._numbers.write(drawn)
        self._coupled = any(params.coupled)
        if self._coupled:
            own = [(row, coupled) for row, coupled in zip(drawn, params.coupled, strict=True)]
            self._keys.write([row.key if isinstance(row, CoupledParams) else 0 for row in params])
            self._noise_scales.write([row.temperature if coupled else 0.0 for row, coupled in own])
            self._ranking.write([self._ranking_temperature if coupled else row.temperature for row, coupled in own])
        self._most_kept = max(row.top_k for row in drawn)
        self._cut_rows = [row for row, own in enumerate(drawn) if own.top_p < 1]
        self._may_be_empty = self._of_draft and (params.has_processors or params.bans)
        self._history.use(params)
        self._biased = any(row.logit_bias for row in params)
        if self._biased:
            self._write_bias(params)

    def _write_bias(self, params: RowParams) -> None:
        bias_BV = torch.stack([bias_table(row, self._vocab_size) for row in params]).to(self._device)
        known_BV = bias_BV if self._vocabulary is None else bias_BV.index_select(-1, self._vocabulary.tokens_D)
        if self._bias_B1V is None:
            zeros_B1V = known_BV.new_zeros(self._numbers.all_rows, 1, known_BV.shape[1])
            self._bias_B1V = self.keep_rows("_bias_B1V", zeros_B1V, len(params))
        assert self._bias_B1V is not None
        self._bias_B1V.copy_(known_BV[:, None])

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What a capture of a round depends on, besides the numbers in tensors."""
        params = self.params
        flags = (params.all_greedy, params.mixed, params.needs_history, params.bans, self._biased, self._coupled)
        return (*flags, self._most_kept, *sorted(self._numbers.used))

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the text of each row, on the host."""
        self._history.advance(emitted)

    def move(self, counts_B: Tensor) -> None:
        """Count newly emitted tokens, on the device."""
        if self._coupled:
            self._lengths_B += counts_B

    def prepared(self, logits_BGV: Tensor, paths_BGP: Tensor, depths: int | Tensor) -> Tensor:
        """If some rows are coupled, return logits after penalties, with noise times temperature in these rows.

        The largest of log p + noise is the largest of logits + T · noise, so with these scores a coupled row is like one at
        temperature 0. Without coupled rows, the logits stay as they are.

        Parameters
        ----------
        logits_BGV, paths_BGP : Tensor
            As for `probs`.
        depths : int or Tensor
            Depths of the nodes, `[B, G]`, or one for all: the noise is that of the next token's position.
        """
        if not self._coupled:
            return logits_BGV
        return perturbed(self._before_noise(logits_BGV, paths_BGP), *self._noise(depths))

    def _before_noise(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        return logits_BGV if self.params.keeps_order else self._with_penalties(logits_BGV.float(), paths_BGP)

    def _noise(self, depths: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what the noise of nodes at these depths is made from, as `perturbed` takes it."""
        tokens_D = None if self._vocabulary is None else self._vocabulary.tokens_D
        keys_B, scales_B = self._keys.values_B11.view(-1), self._noise_scales.values_B11.view(-1)
        return keys_B, self._lengths_B[:, None] + depths, scales_B, tokens_D

    def probs(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the distribution at each node as float32 probabilities.

        If only some rows are greedy, they get the distribution of temperature 1; see `likeliest`. If some rows are coupled, it
        says of each token how likely the target is to take it.

        Parameters
        ----------
        logits_BGV : Tensor
            Raw logits of G nodes per row; left unchanged.
        paths_BGP : Tensor
            Tokens from the text to each node, the node's own included; `NO_TOKEN` where shorter.
        """
        if (own_B := self.temperature_B) is not None and not self._may_be_empty:
            return softened(logits_BGV, own_B if self._coupled or "temperature" in self._numbers.used else None)
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        if self.params.all_greedy:
            best_BG1 = _argmax(scores_BGV)
            # NaN counts as the largest. It spreads over the node, as softmax would do, for the walk to report.
            peak_BG1 = torch.where(scores_BGV.gather(-1, best_BG1).isfinite(), 0.0, torch.nan)
            return peak_BG1.expand_as(scores_BGV).scatter(-1, best_BG1, peak_BG1 + 1.0)
        tempered_BGV = scores_BGV / self._ranking.values_B11 if self._coupled else self._tempered(scores_BGV)
        probs_BGV = torch.softmax(tempered_BGV, dim=-1)
        if self._may_be_empty:
            probs_BGV = probs_BGV.masked_fill(scores_BGV.amax(-1, keepdim=True) == -torch.inf, 0.0)
        return probs_BGV

    def scores(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the logits of `probs` at any temperature above 0: processed, divided by it, minus infinity where truncated.

        Beams add up such scores of log-probabilities without renormalising them, as Hugging Face does. Parameters as for
        `probs`.
        """
        return self._tempered(self._penalised(logits_BGV.float(), paths_BGP))

    def _tempered(self, scores_BGV: Tensor) -> Tensor:
        return truncated(self._hotter(scores_BGV), self._numbers, self._most_kept, self._cut_rows)

    def _hotter(self, scores_BGV: Tensor) -> Tensor:
        """Divide scores by the temperature."""
        return scores_BGV / self._numbers["temperature"] if "temperature" in self._numbers.used else scores_BGV

    @property
    def temperature_B(self) -> Tensor | None:
        """Temperature of each row, if `probs` is just the softmax of logits divided by it; else None."""
        if self._coupled:
            return self._ranking.values_B11.view(-1)
        plain = self.params.keeps_order and not self.params.all_greedy and not self._numbers.used & {"top_k", "top_p", "min_p"}
        return self._numbers["temperature"].view(-1) if plain else None

    def likeliest(self, logits_BGV: Tensor, paths_BGP: Tensor, depths: int | Tensor) -> Tensor:
        """Return the token of the largest score at each node, with noise in coupled rows; `NO_TOKEN` if that is not finite.

        Parameters as for `prepared`; logits are as the model returned them.
        """
        if self._coupled and not self._truncates:
            return self.largest(logits_BGV, paths_BGP, depths, 1)[..., 0]
        if self._coupled:
            scores_BGV, kept = self._before_noise(logits_BGV, paths_BGP).float(), (self._most_kept, self._cut_rows)
            return largest_kept(scores_BGV, self._noise(depths), self._hotter(scores_BGV), self._numbers, *kept)
        # The order of logits is the same in half precision; only penalties need float32.
        scores_BGV = self._penalised(logits_BGV if self.in_order else logits_BGV.float(), paths_BGP)
        best_BG1 = _argmax(scores_BGV)
        return best_BG1.where(scores_BGV.gather(-1, best_BG1).abs() < torch.inf, NO_TOKEN)[..., 0]

    def largest(self, logits_BGV: Tensor, paths_BGP: Tensor, depths: int | Tensor, count: int) -> Tensor:
        """Return the columns of the `count` largest scores with noise at each node, in order; only if some rows are coupled.

        Nothing is truncated: that a draft proposes tokens which the target rules out costs less than finding them.
        Parameters as for `prepared`; `NO_TOKEN` for scores that are not finite.
        """
        return largest_perturbed(self._before_noise(logits_BGV, paths_BGP).float(), *self._noise(depths), count)

    def ranking(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return weights in the order of the probabilities, without computing exponentials.

        Tokens that are ruled out, or `RANKED_NATS` or more below the likeliest, have weight 0. Parameters as for `probs`.
        """
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        return (scores_BGV - (scores_BGV.amax(-1, keepdim=True) - RANKED_NATS)).clamp_(min=0)

    @property
    def in_order(self) -> bool:
        """Whether the largest logits, if `prepared`, belong to the tokens that rank first."""
        return not self._truncates if self._coupled else self.params.keeps_order

    @property
    def _truncates(self) -> bool:
        """Whether some rows of the target keep only some tokens."""
        return not self._of_draft and bool(self._numbers.used & {"top_k", "top_p", "min_p"})

    def _penalised(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        return scores_BGV if self._coupled else self._with_penalties(scores_BGV, paths_BGP)

    def _with_penalties(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        if self._biased and self._bias_B1V is not None:
            scores_BGV = scores_BGV + self._bias_B1V
        return self._history.penalised(scores_BGV, paths_BGP)

    def foresee(self, paths: Sequence[Sequence[Sequence[int]]]) -> None:
        """Let grammars compute in advance what may follow some nodes, while the device computes their logits.

        `paths` are those that `probs` will get, on the host.
        """
        self._history.foresee(paths)


def _as_if_drawn(params: SamplingParams) -> SamplingParams:
    """Give a greedy row parameters with which its unused distribution costs nothing extra."""
    if params.temperature > 0:
        return params
    return dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _argmax(scores_BGV: Tensor) -> Tensor:
    """Return the index of the largest score, `[B, G, 1]`: the first of equal ones, and NaN counts as the largest."""
    if not is_host(scores_BGV.device):
        return scores_BGV.argmax(-1, keepdim=True)
    # Torch takes 15 times as long as numpy here.
    return torch.from_numpy(scores_BGV.float().numpy().argmax(-1, keepdims=True))
