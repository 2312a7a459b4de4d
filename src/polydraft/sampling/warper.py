"""Logits to probabilities, in the order of Hugging Face `generate`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.sampling.categorical import NO_TOKEN
from polydraft.sampling.params import SamplingParams

_TOP_P_CANDIDATES = 2048
_RANKED_NATS = 60.0


class Warper:
    """Turn logits into the sampling law of `params`, for nodes anywhere in a tree.

    It remembers the certain text of each row (prompt and emitted tokens) as far as `params` needs it. What lies
    between the certain text and a node, the tokens of the node's own ancestors, comes as `paths_BGP`.

    Parameters
    ----------
    params : SamplingParams
    vocab_size : int
    prompts : sequence of token-id lists, one a row
    device : torch.device
    of_draft : bool
        A draft may know none of the tokens that are left, where a target cannot: its law is then zero everywhere.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        of_draft: bool = False,
    ) -> None:
        self.params = params
        self._device = device
        self._bias_V = _bias(params, vocab_size, device)
        self._may_be_empty = of_draft and bool(params.processors or -torch.inf in params.logit_bias.values())
        self._history: list[list[int]] = []
        self._seen_BV: Tensor | None = None
        self._counts_BV: Tensor | None = None
        self.emptied_by: str | None = None
        """Which processor has left a text of this round without any token to go on with, if one has."""
        if params.repetition_penalty != 1:
            self._seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        if params.presence_penalty or params.frequency_penalty:
            self._counts_BV = torch.zeros(len(prompts), vocab_size, device=device)
        self.restart(prompts)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin equally many other texts; what is on the device stays where it is."""
        self._history = [list(prompt) for prompt in prompts] if self.params.processors else []
        self.emptied_by = None
        if self._seen_BV is not None:
            self._seen_BV.zero_()
            for row, prompt in enumerate(prompts):
                self._seen_BV[row, torch.as_tensor(list(prompt), device=self._device)] = True
        if self._counts_BV is not None:
            self._counts_BV.zero_()

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain text of each row."""
        if not self.params.needs_history:
            return
        self.emptied_by = None
        for row, tokens in enumerate(emitted):
            if not tokens:
                continue
            ids = torch.as_tensor(list(tokens), dtype=torch.long, device=self._device)
            if self._seen_BV is not None:
                self._seen_BV[row, ids] = True
            if self._counts_BV is not None:
                self._counts_BV[row].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            if self._history:
                self._history[row].extend(tokens)

    def probs(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the law at each node as float32 probabilities.

        Parameters
        ----------
        logits_BGV : Tensor
            Raw logits of G nodes a row; left unchanged.
        paths_BGP : Tensor
            Tokens between the certain text and each node, the node's own included; `NO_TOKEN` where shorter.
        """
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        temperature = self.params.temperature
        if temperature == 0:
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
        temperature = self.params.temperature
        return self._truncated(scores_BGV / temperature if temperature != 1 else scores_BGV)

    def likeliest(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return the token with the largest logit at each node; `NO_TOKEN` where that is not a number.

        Parameters as for `probs`.
        """
        # Half precision keeps the order of its numbers, but penalties are computed in float32.
        precise = self.params.needs_history or self._bias_V is not None
        scores_BGV = self._penalised(logits_BGV.float() if precise else logits_BGV, paths_BGP)
        best_BG1 = _argmax(scores_BGV)
        return best_BG1.where(scores_BGV.gather(-1, best_BG1).abs() < torch.inf, NO_TOKEN)[..., 0]

    def ranking(self, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return weights that only order the tokens, likeliest largest: a law's order without its exponentials.

        Tokens more than `_RANKED_NATS` below the likeliest, or ruled out, weigh nothing. Parameters as for `probs`.
        """
        scores_BGV = self._penalised(logits_BGV.float(), paths_BGP)
        return (scores_BGV - (scores_BGV.amax(-1, keepdim=True) - _RANKED_NATS)).clamp_(min=0)

    def _penalised(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        params = self.params
        if self._bias_V is not None:
            scores_BGV = scores_BGV + self._bias_V
        if not params.needs_history:
            return scores_BGV
        real_BGP = paths_BGP != NO_TOKEN
        tokens_BGP = paths_BGP.clamp(min=0)
        if self._seen_BV is not None:
            on_path_BGV = torch.zeros_like(scores_BGV).scatter_add_(-1, tokens_BGP, real_BGP.float()) > 0
            seen_BGV = self._seen_BV[:, None] | on_path_BGV
            penalty = params.repetition_penalty
            punished_BGV = torch.where(scores_BGV < 0, scores_BGV * penalty, scores_BGV / penalty)
            scores_BGV = torch.where(seen_BGV, punished_BGV, scores_BGV)
        if self._counts_BV is not None:
            counts_BGV = self._counts_BV[:, None].expand(scores_BGV.shape).clone()
            counts_BGV.scatter_add_(-1, tokens_BGP, real_BGP.float())
            scores_BGV = scores_BGV - params.presence_penalty * (counts_BGV > 0)
            scores_BGV = scores_BGV - params.frequency_penalty * counts_BGV
        if params.processors:
            scores_BGV = self._processed(scores_BGV, paths_BGP)
        return scores_BGV

    def _processed(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Call the Hugging Face processors node by node; they want host-side shapes, so this synchronises."""
        result_BGV = scores_BGV.clone()
        for row, paths in enumerate(paths_BGP.tolist()):
            for node, path in enumerate(paths):
                ids = self._history[row] + [token for token in path if token != NO_TOKEN]
                input_ids = torch.tensor([ids], dtype=torch.long, device=scores_BGV.device)
                scores_1V = scores_BGV[row, node][None].clone()
                for processor in self.params.processors:
                    was_law = _is_law(scores_1V)
                    scores_1V = processor(input_ids, scores_1V)
                    if was_law and not _is_law(scores_1V):
                        self.emptied_by = getattr(processor, "__name__", type(processor).__name__)
                result_BGV[row, node] = scores_1V[0]
        return result_BGV

    def _truncated(self, scores_BGV: Tensor) -> Tensor:
        params = self.params
        if params.top_k:
            kept = min(params.top_k, scores_BGV.shape[-1])
            lowest_BG1 = scores_BGV.topk(kept, dim=-1).values[..., -1:]
            scores_BGV = scores_BGV.masked_fill(scores_BGV < lowest_BG1, -torch.inf)
        if params.top_p < 1:
            scores_BGV = scores_BGV.masked_fill(~_nucleus(torch.softmax(scores_BGV, -1), params.top_p), -torch.inf)
        if params.min_p > 0:
            probs_BGV = torch.softmax(scores_BGV, -1)
            scores_BGV = scores_BGV.masked_fill(probs_BGV < params.min_p * probs_BGV.amax(-1, keepdim=True), -torch.inf)
        return scores_BGV


def _is_law(scores_1V: Tensor) -> bool:
    """Whether some token has a finite score, and none is larger than that or not a number."""
    return bool(scores_1V.max().isfinite())


def _argmax(scores_BGV: Tensor) -> Tensor:
    """Return where the largest score is, `[B, G, 1]`; of equal ones the first, and NaN counts as the largest."""
    if scores_BGV.device.type != "cpu":
        return scores_BGV.argmax(-1, keepdim=True)
    # Torch takes 15 times as long as numpy here.
    return torch.from_numpy(scores_BGV.float().numpy().argmax(-1, keepdims=True))


def _nucleus(probs_BGV: Tensor, top_p: float) -> Tensor:
    """Mark the smallest set of likeliest tokens whose mass reaches `top_p`.

    Of equals at its edge the last ones stay, as Hugging Face's do where its sort is stable: a law must not depend on what else
    is computed along with it.
    """
    size = probs_BGV.shape[-1]
    if probs_BGV.device.type == "cpu":  # where looking at the values is free and a full sort is not
        sorted_BGC, order_BGC = probs_BGV.topk(min(_TOP_P_CANDIDATES, size), dim=-1)
        keep_BGC = _reaching(sorted_BGC, top_p)
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
    keep_BGV = _reaching(sorted_BGV, top_p)
    return torch.zeros_like(keep_BGV).scatter_(-1, size - 1 - order_BGV, keep_BGV)


def _reaching(sorted_BGC: Tensor, top_p: float) -> Tensor:
    """Mark the first of falling probabilities, until their mass reaches `top_p`."""
    mass_before_BGC = sorted_BGC.double().cumsum(-1) - sorted_BGC.double()
    keep_BGC = ~(mass_before_BGC >= top_p)  # put so that a row of NaN keeps all, for the walk to report
    keep_BGC[..., 0] = True
    return keep_BGC


def _bias(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    if not params.logit_bias:
        return None
    bias_V = torch.zeros(vocab_size, device=device)
    for token, value in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise UsageError(f"logit_bias names token {token}; allowed: 0 to {vocab_size - 1}, the target's vocabulary")
        bias_V[token] = value
    if not (bias_V > -torch.inf).any():
        raise UsageError(f"logit_bias bans all {vocab_size} tokens of the target; leave at least one")
    return bias_V
