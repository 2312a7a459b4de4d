"""Logits to probabilities, in the order of Hugging Face `generate`."""

import dataclasses
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run
from polydraft.row_storage import RowStorage
from polydraft.sampling.categorical import NO_TOKEN
from polydraft.sampling.params import DEFAULTS, RowParams, SamplingParams, bias_table
from polydraft.sampling.processing import Processing
from polydraft.sampling.softened import softened
from polydraft.sampling.vocabulary import PartialVocabulary
from polydraft.transfers import assign

_TOP_P_CANDIDATES = 2048
RANKED_NATS = 60.0
"""How far below the likeliest a token weighs nothing where only the order matters."""
_ALL = 2**40
"""More tokens than any vocabulary has."""
_TABLES = ("_bias_B1V", "_seen_BV", "_counts_BV")
"""What is kept by row where it is needed."""


class Warper:
    """Turn logits into the sampling distribution of each row's parameters, for nodes anywhere in a tree.

    It remembers the certain text of each row (prompt and emitted tokens) as far as the parameters need it. What lies
    between the certain text and a node, the tokens of the node's own ancestors, comes as `paths_BGP`.

    Parameters
    ----------
    params : RowParams, SamplingParams, or one SamplingParams per row
    vocab_size : int
    prompts : sequence of token-id lists, one per row
    device : torch.device
    of_draft : bool
        A draft may know none of the tokens that are left, where a target cannot: its distribution is then zero everywhere.
    vocabulary : PartialVocabulary, optional
        What the columns of the logits mean, where they are not all tokens.
    """

    def __init__(
        self,
        params: RowParams | SamplingParams | Sequence[SamplingParams],
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        of_draft: bool = False,
        vocabulary: PartialVocabulary | None = None,
    ) -> None:
        # Without a prompt the rows share one text that nobody asks about.
        params = RowParams.of(params, max(len(prompts), 1))
        self._device, self._vocabulary, self._vocab_size = device, vocabulary, vocab_size
        self._of_draft = of_draft
        # All of it is allocated once and written in place: captured rounds read it where it is.
        self._numbers = {name: torch.zeros(len(params), 1, 1, dtype=_dtype(name), device=device) for name in _NUMBERS}
        self._storage = RowStorage()
        self._written: dict[str, list[float]] = {}
        """What stands in these tensors, as far as the host has written it."""
        self._bias_B1V: Tensor | None = None
        self._seen_BV: Tensor | None = None
        self._counts_BV: Tensor | None = None
        self._history: list[list[int]] = [[] for _ in params]
        self.processing = Processing(of_draft, vocabulary)
        """Who calls logits processors."""
        self._set(params)
        self.restart(prompts)

    def admit(self, params: RowParams, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Take the parameters that the rows have from now on, and begin new texts in some of them."""
        self._set(params)
        self.restart(prompts, rows)

    def resize(self, params: RowParams) -> None:
        """Have as many rows as there are parameters: the first ones stay as they are, further ones begin by `admit`."""
        rows, resized = len(params), self._storage.resized
        self._numbers, self._written = {name: resized(name, value, rows) for name, value in self._numbers.items()}, {}
        for name in _TABLES:
            if getattr(self, name) is not None:
                setattr(self, name, resized(name, getattr(self, name), rows))
        self._history = self._storage.resized_list("history", self._history, rows, list)
        self._set(params)

    def swap_rows(self, first: int, second: int) -> None:
        """Swap two rows; their parameters come by `resize` or `admit`."""
        for name in _TABLES:
            if getattr(self, name) is not None:
                self._storage.swap(name, getattr(self, name), first, second)
        self._history = self._storage.swapped_list("history", self._history, first, second)

    def _set(self, params: RowParams) -> None:
        """Write the parameters of all rows."""
        assert all(row.grammar is None for row in params), "grammars have become processors"
        self.params = params
        # Rows that take the likeliest token have their distribution computed like all others, and not used.
        drawn = params if params.all_greedy else params.map(_as_if_drawn)
        self._used = {name for name in _NUMBERS if any(getattr(row, name) != DEFAULTS[name] for row in drawn)}
        for name, off in _NUMBERS.items():
            values = [getattr(row, name) for row in drawn]
            values = [off if off is not None and value == DEFAULTS[name] else value for value in values]
            if self._written.get(name) != values:  # most requests ask for the same, and every copy is a launch
                assign(self._numbers[name].view(-1), values)
                self._written[name] = values
        self._most_kept = max(row.top_k for row in drawn)
        self._cut_rows = [row for row, own in enumerate(drawn) if own.top_p < 1]
        self._may_be_empty = self._of_draft and (params.has_processors or params.bans)
        if self._seen_BV is None and "repetition_penalty" in self._used:
            self._seen_BV = self._new_table("_seen_BV", (self._vocab_size,), torch.bool)
        if self._counts_BV is None and self._used & {"presence_penalty", "frequency_penalty"}:
            self._counts_BV = self._new_table("_counts_BV", (self._vocab_size,), torch.float32)
        self._set_bias(params)

    def _new_table(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros for the rows at work, of a table that has some for all rows."""
        rows = len(self._storage.whole("temperature", self._numbers["temperature"]))
        return self._storage.keep(name, torch.zeros(rows, *sizes, dtype=dtype, device=self._device), len(self.params))

    def _set_bias(self, params: RowParams) -> None:
        self._biased = any(row.logit_bias for row in params)
        if not self._biased:
            return
        bias_BV = torch.stack([bias_table(row, self._vocab_size) for row in params]).to(self._device)
        bias_B1V = self._known(bias_BV)[:, None]
        if self._bias_B1V is None:
            self._bias_B1V = self._new_table("_bias_B1V", tuple(bias_B1V.shape[1:]), bias_B1V.dtype)
        self._bias_B1V.copy_(bias_B1V)

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What a captured round depends on, beyond the numbers in tensors."""
        params = self.params
        flags = (params.all_greedy, params.mixed, params.needs_history, params.bans, self._biased)
        return (*flags, self._most_kept, *sorted(self._used))

    def restart(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> None:
        """Begin other texts, in all rows or some."""
        self.processing.emptied_by = None
        for row, prompt in zip(range(len(prompts)) if rows is None else rows, prompts, strict=True):
            self._history[row] = list(prompt) if self.params.has_processors else []
            if self._seen_BV is not None:
                self._seen_BV[row].zero_()
                self._seen_BV[row, torch.as_tensor(list(prompt), dtype=torch.long, device=self._device)] = True
            if self._counts_BV is not None:
                self._counts_BV[row].zero_()

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain text of each row."""
        if not self.params.needs_history:
            return
        self.processing.forget()
        for row, tokens in enumerate(emitted):
            if not tokens:
                continue
            ids = torch.as_tensor(list(tokens), dtype=torch.long, device=self._device)
            if self._seen_BV is not None:
                self._seen_BV[row, ids] = True
            if self._counts_BV is not None:
                self._counts_BV[row].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            if self.params.has_processors:
                self._history[row].extend(tokens)

    def probs(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the distribution at each node as float32 probabilities.

        In mixed company a row that takes the likeliest token gets the distribution of temperature 1; see `likeliest`.

        Parameters
        ----------
        logits_BGV : Tensor
            Raw logits of G nodes per row; left unchanged.
        paths_BGP : Tensor
            Tokens between the certain text and each node, the node's own included; `NO_TOKEN` where shorter.
        """
        if (own_B := self.temperature_B) is not None and not self._may_be_empty and kernels_run(logits_BGV):
            return softened(logits_BGV, own_B if "temperature" in self._used else None)
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        if self.params.all_greedy:
            best_BG1 = _argmax(scores_BGV)
            # NaN counts as the largest: found here, it spreads over the row, as softmax would, for the walk to report.
            peak_BG1 = torch.where(scores_BGV.gather(-1, best_BG1).isfinite(), 0.0, torch.nan)
            return peak_BG1.expand_as(scores_BGV).scatter(-1, best_BG1, peak_BG1 + 1.0)
        probs_BGV = torch.softmax(self._tempered(scores_BGV), dim=-1)
        if self._may_be_empty:
            probs_BGV = probs_BGV.masked_fill(scores_BGV.amax(-1, keepdim=True) == -torch.inf, 0.0)
        return probs_BGV

    def scores(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return what `probs` would be the softmax of, at any temperature above 0; minus infinity where truncated.

        Beams add scores of log-probabilities up, as Hugging Face does: without norming them anew. Parameters as for `probs`.
        """
        return self._tempered(self._penalised(logits_BGV.float(), paths_BGP))

    def _tempered(self, scores_BGV: Tensor) -> Tensor:
        return self._truncated(scores_BGV / self._numbers["temperature"] if "temperature" in self._used else scores_BGV)

    @property
    def keeps_order(self) -> bool:
        """Whether `likeliest` and `ranking` have the order of the logits as they come: nothing is added or ruled out."""
        return self.params.keeps_order

    @property
    def temperature_B(self) -> Tensor | None:
        """Temperature of each row, where `probs` are the softmax of the logits over it and nothing else."""
        plain = self.keeps_order and not self.params.all_greedy and not self._used & {"top_k", "top_p", "min_p"}
        return self._numbers["temperature"].view(-1) if plain else None

    def likeliest(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the token of the largest logit at each node; `NO_TOKEN` where that is no number. Parameters as for `probs`."""
        # Half precision keeps the order of its numbers, but penalties are computed in float32.
        scores_BGV = self._penalised(logits_BGV if self.keeps_order else logits_BGV.float(), paths_BGP)
        best_BG1 = _argmax(scores_BGV)
        return best_BG1.where(scores_BGV.gather(-1, best_BG1).abs() < torch.inf, NO_TOKEN)[..., 0]

    def ranking(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return weights that only order the tokens, likeliest largest: a distribution's order without its exponentials.

        Tokens `RANKED_NATS` or more below the likeliest, or ruled out, weigh nothing. Parameters as for `probs`.
        """
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        return (scores_BGV - (scores_BGV.amax(-1, keepdim=True) - RANKED_NATS)).clamp_(min=0)

    def _penalised(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        if self._biased and self._bias_B1V is not None:
            scores_BGV = scores_BGV + self._bias_B1V
        if not self.params.needs_history:
            return scores_BGV
        columns_BGP = paths_BGP if self._vocabulary is None else self._vocabulary.columns(paths_BGP)
        real_BGP, columns_BGP = columns_BGP != NO_TOKEN, columns_BGP.clamp(min=0)
        if self._seen_BV is not None and "repetition_penalty" in self._used:
            on_path_BGV = torch.zeros_like(scores_BGV).scatter_add_(-1, columns_BGP, real_BGP.float()) > 0
            seen_BGV = self._known(self._seen_BV)[:, None] | on_path_BGV
            penalty_B11 = self._numbers["repetition_penalty"]
            punished_BGV = torch.where(scores_BGV < 0, scores_BGV * penalty_B11, scores_BGV / penalty_B11)
            scores_BGV = torch.where(seen_BGV, punished_BGV, scores_BGV)
        if self._counts_BV is not None and self._used & {"presence_penalty", "frequency_penalty"}:
            counts_BGV = self._known(self._counts_BV)[:, None].expand(scores_BGV.shape).clone()
            counts_BGV.scatter_add_(-1, columns_BGP, real_BGP.float())
            scores_BGV = scores_BGV - self._numbers["presence_penalty"] * (counts_BGV > 0)
            scores_BGV = scores_BGV - self._numbers["frequency_penalty"] * counts_BGV
        if not self.params.has_processors:
            return scores_BGV
        return self.processing(scores_BGV, paths_BGP, self.params, self._history)

    def _known(self, table_BV: Tensor) -> Tensor:
        """Return the columns that the logits have."""
        return table_BV if self._vocabulary is None else table_BV.index_select(-1, self._vocabulary.tokens_D)

    def foresee(self, paths: Sequence[Sequence[Sequence[int]]]) -> None:
        """Let grammars find out what may follow some nodes, while the device works on these nodes' logits.

        `paths` are those that `probs` will get, on the host.
        """
        self.processing.foresee(paths, self.params, self._history)

    def _truncated(self, scores_BGV: Tensor) -> Tensor:
        if "top_k" in self._used:
            best_BGK = scores_BGV.topk(min(self._most_kept, scores_BGV.shape[-1]), dim=-1).values
            last_BG1 = (self._numbers["top_k"] - 1).clamp(max=best_BGK.shape[-1] - 1).expand(*scores_BGV.shape[:2], 1)
            lowest_BG1 = best_BGK.gather(-1, last_BG1).masked_fill(self._numbers["top_k"] == _ALL, -torch.inf)
            scores_BGV = scores_BGV.masked_fill(scores_BGV < lowest_BG1, -torch.inf)
        if "top_p" in self._used:
            scores_BGV = self._cut(scores_BGV, self._numbers["top_p"])
        if "min_p" in self._used:
            probs_BGV = torch.softmax(scores_BGV, -1)
            low_BGV = probs_BGV < self._numbers["min_p"] * probs_BGV.amax(-1, keepdim=True)
            scores_BGV = scores_BGV.masked_fill(low_BGV, -torch.inf)
        return scores_BGV

    def _cut(self, scores_BGV: Tensor, top_p_B11: Tensor) -> Tensor:
        """Apply top-p, on a CPU to the rows alone that have it: it sorts."""
        if scores_BGV.device.type != "cpu" or len(self._cut_rows) == len(scores_BGV):
            return scores_BGV.masked_fill(~_nucleus(torch.softmax(scores_BGV, -1), top_p_B11), -torch.inf)
        rows, cut_BGV = self._cut_rows, scores_BGV.clone()
        nucleus_BGV = _nucleus(torch.softmax(scores_BGV[rows], -1), top_p_B11[rows])
        cut_BGV[rows] = scores_BGV[rows].masked_fill(~nucleus_BGV, -torch.inf)
        return cut_BGV


_NUMBERS: dict[str, float | None] = {
    "temperature": None,
    "top_k": _ALL,
    "top_p": torch.inf,
    "min_p": None,
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
}
"""Parameters that are one number per row, and what stands for "off" in their tensors where that is not the default itself."""


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name == "top_p" else torch.long if name == "top_k" else torch.float32


def _as_if_drawn(params: SamplingParams) -> SamplingParams:
    """Let a row that takes the likeliest token have a distribution that costs nothing to compute."""
    if params.temperature > 0:
        return params
    return dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _argmax(scores_BGV: Tensor) -> Tensor:
    """Return where the largest score is, `[B, G, 1]`; of equal ones the first, and NaN counts as the largest."""
    if scores_BGV.device.type != "cpu":
        return scores_BGV.argmax(-1, keepdim=True)
    # Torch takes 15 times as long as numpy here.
    return torch.from_numpy(scores_BGV.float().numpy().argmax(-1, keepdims=True))


def _nucleus(probs_BGV: Tensor, top_p_B11: Tensor) -> Tensor:
    """Mark the smallest set of likeliest tokens whose mass reaches `top_p_B11`.

    Of equals at its edge the last ones stay, as Hugging Face's do where its sort is stable: a distribution must not depend on
    what else is computed along with it.
    """
    size = probs_BGV.shape[-1]
    if probs_BGV.device.type == "cpu":  # where looking at the values is free and a full sort is not
        sorted_BGC, order_BGC = probs_BGV.topk(min(_TOP_P_CANDIDATES, size), dim=-1)
        keep_BGC = _reaching(sorted_BGC, top_p_B11)
        if sorted_BGC.shape[-1] == size or not keep_BGC[..., -1].any():
            edge_BGC = keep_BGC[..., :-1] & ~keep_BGC[..., 1:]
            if not (edge_BGC & (sorted_BGC[..., :-1] == sorted_BGC[..., 1:])).any():
                return torch.zeros_like(probs_BGV, dtype=torch.bool).scatter_(-1, order_BGC, keep_BGC)
            # Of half precision's logits many are equal: so often that a sort would be dear.
            least_BG1 = sorted_BGC.gather(-1, keep_BGC.sum(-1, keepdim=True) - 1)
            equal_BGV = probs_BGV == least_BG1
            left_out_BG1 = equal_BGV.sum(-1, keepdim=True) - (keep_BGC & (sorted_BGC == least_BG1)).sum(-1, keepdim=True)
            place_BGV = equal_BGV.cumsum(-1, dtype=torch.int32)
            return (probs_BGV > least_BG1) | (equal_BGV & (place_BGV > left_out_BG1))
    # Turned round, a stable sort puts the last of equals first.
    sorted_BGV, order_BGV = probs_BGV.flip(-1).sort(dim=-1, descending=True, stable=True)
    keep_BGV = _reaching(sorted_BGV, top_p_B11)
    return torch.zeros_like(keep_BGV).scatter_(-1, size - 1 - order_BGV, keep_BGV)


def _reaching(sorted_BGC: Tensor, top_p_B11: Tensor) -> Tensor:
    """Mark the first of falling probabilities, until their mass reaches `top_p_B11`."""
    mass_before_BGC = sorted_BGC.double().cumsum(-1) - sorted_BGC.double()
    keep_BGC = ~(mass_before_BGC >= top_p_B11)  # put so that a row of NaN keeps all, for the walk to report
    keep_BGC[..., 0] = True
    return keep_BGC
