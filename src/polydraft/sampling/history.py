"""Sampling that depends on the text so far: penalties, `min_tokens`, and logits processors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.rows import ByRow
from polydraft.sampling.categorical import NO_TOKEN
from polydraft.sampling.params import RowParams
from polydraft.sampling.processing import Processing
from polydraft.sampling.row_numbers import RowNumbers
from polydraft.sampling.vocabulary import PartialVocabulary


class History(ByRow):
    """The text of each row, prompt and emitted tokens, as far as penalties and processors need it.

    Parameters
    ----------
    numbers : RowNumbers
        The rows' parameters, penalties included.
    vocab_size : int
    device : torch.device
    processing : Processing
        Calls logits processors.
    vocabulary : PartialVocabulary, optional
        Tokens of the logits' columns, if these are not the whole vocabulary.
    """

    ROW_STATE = ("_texts", "_seen_BV", "_counts_BV", "_ends_BV", "_new_B11")

    def __init__(
        self,
        numbers: RowNumbers,
        vocab_size: int,
        device: torch.device,
        processing: Processing,
        vocabulary: PartialVocabulary | None,
    ) -> None:
        self._numbers, self._vocab_size, self._device, self._vocabulary = numbers, vocab_size, device, vocabulary
        self._processing = processing
        self._params = RowParams(())
        self._texts: list[list[int]] = [[] for _ in range(numbers.all_rows)]
        self._seen_BV: Tensor | None = None
        """Which tokens occur in each text; None unless a row has a repetition penalty."""
        self._counts_BV: Tensor | None = None
        """How often each token occurs among the new tokens; None unless a row has a presence or frequency penalty."""
        self._ends_BV: Tensor | None = None
        """Which tokens end each text; None unless a row has `min_tokens`."""
        self._new_B11: Tensor | None = None
        """How many new tokens each text has; None unless a row has `min_tokens`."""

    def use(self, params: RowParams) -> None:
        """Take the rows' parameters from now on, and allocate the tables that they need."""
        self._params = params
        if self._seen_BV is None and "repetition_penalty" in self._numbers.used:
            self._seen_BV = self._new_table("_seen_BV", torch.bool)
        if self._counts_BV is None and self._numbers.used & {"presence_penalty", "frequency_penalty"}:
            self._counts_BV = self._new_table("_counts_BV", torch.float32)
        if self._ends_BV is None and "min_tokens" in self._numbers.used:
            self._ends_BV = self._new_table("_ends_BV", torch.bool)
            self._new_B11 = self._new_table("_new_B11", torch.long, (1, 1))

    def _new_table(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
        zeros_BX = torch.zeros(self._numbers.all_rows, *(shape or (self._vocab_size,)), dtype=dtype, device=self._device)
        table_BX: Tensor = self.keep_rows(name, zeros_BX, len(self._params))
        return table_BX

    def new_row(self, name: str) -> list[int] | bool:
        """Return an empty text, or an empty row of a table."""
        return [] if name == "_texts" else False

    def begin(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Begin new texts in some rows."""
        self._processing.emptied_by = None
        for row, prompt in zip(rows, prompts, strict=True):
            self._texts[row] = list(prompt) if self._params.has_processors else []
            if self._seen_BV is not None:
                self._seen_BV[row].zero_()
                self._seen_BV[row, torch.as_tensor(list(prompt), dtype=torch.long, device=self._device)] = True
            if self._counts_BV is not None:
                self._counts_BV[row].zero_()
            if self._ends_BV is not None and self._new_B11 is not None:
                self._new_B11[row].zero_()
                self._ends_BV[row].zero_()
                self._ends_BV[row, list(self._params.rows[row].stop_token_ids)] = True

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the text of each row."""
        if not self._params.needs_history:
            return
        self._processing.forget()
        for row, tokens in enumerate(emitted):
            if not tokens:
                continue
            ids = torch.as_tensor(list(tokens), dtype=torch.long, device=self._device)
            if self._seen_BV is not None:
                self._seen_BV[row, ids] = True
            if self._counts_BV is not None:
                self._counts_BV[row].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            if self._new_B11 is not None:
                self._new_B11[row] += len(tokens)
            if self._params.has_processors:
                self._texts[row].extend(tokens)

    def penalised(self, scores_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
        """Return scores after penalties and processors; parameters as for `Warper.probs`."""
        if not self._params.needs_history:
            return scores_BGV
        columns_BGP = paths_BGP if self._vocabulary is None else self._vocabulary.columns(paths_BGP)
        real_BGP, columns_BGP = columns_BGP != NO_TOKEN, columns_BGP.clamp(min=0)
        numbers = self._numbers
        if self._seen_BV is not None and "repetition_penalty" in numbers.used:
            on_path_BGV = torch.zeros_like(scores_BGV).scatter_add_(-1, columns_BGP, real_BGP.float()) > 0
            seen_BGV = self._known(self._seen_BV)[:, None] | on_path_BGV
            penalty_B11 = numbers["repetition_penalty"]
            punished_BGV = torch.where(scores_BGV < 0, scores_BGV * penalty_B11, scores_BGV / penalty_B11)
            scores_BGV = torch.where(seen_BGV, punished_BGV, scores_BGV)
        if self._counts_BV is not None and numbers.used & {"presence_penalty", "frequency_penalty"}:
            counts_BGV = self._known(self._counts_BV)[:, None].expand(scores_BGV.shape).clone()
            counts_BGV.scatter_add_(-1, columns_BGP, real_BGP.float())
            scores_BGV = scores_BGV - numbers["presence_penalty"] * (counts_BGV > 0)
            scores_BGV = scores_BGV - numbers["frequency_penalty"] * counts_BGV
        if self._ends_BV is not None and self._new_B11 is not None and "min_tokens" in numbers.used:
            # Count all tokens of a node's path, even those that a draft with a partial vocabulary does not know.
            length_BG1 = self._new_B11 + (paths_BGP != NO_TOKEN).sum(-1, keepdim=True)
            early_BG1 = length_BG1 < numbers["min_tokens"]
            scores_BGV = scores_BGV.masked_fill(early_BG1 & self._known(self._ends_BV)[:, None], -torch.inf)
        if not self._params.has_processors:
            return scores_BGV
        return self._processing(scores_BGV, paths_BGP, self._params, self._texts)

    def _known(self, table_BV: Tensor) -> Tensor:
        """Return the columns of a table that the logits have, too."""
        return table_BV if self._vocabulary is None else table_BV.index_select(-1, self._vocabulary.tokens_D)

    def foresee(self, paths: Sequence[Sequence[Sequence[int]]]) -> None:
        """Let grammars compute in advance what may follow some nodes."""
        self._processing.foresee(paths, self._params, self._texts)
