"""Calls logits processors, on the host, node by node, and only for texts that are still possible."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.sampling.categorical import NO_TOKEN
from polydraft.sampling.grammar import GrammarProcessor
from polydraft.sampling.params import RowParams, SamplingParams
from polydraft.sampling.vocabulary import PartialVocabulary


class UntilEnd:
    """A logits processor that is not called for nodes beyond the end of the text.

    A tree may have nodes after an end-of-text token, a stop string, or the last token of the limit. Nothing drawn there is
    emitted, so any distribution does; but a processor might fail there, for example one that looks up whole texts.

    Parameters
    ----------
    processor : logits processor
    ended : function
        Returns whether a text, prompt included, has ended.
    """

    def __init__(self, processor: Any, ended: Callable[[Sequence[int]], bool]) -> None:
        self.processor, self._ended = processor, ended
        self.__name__ = getattr(processor, "__name__", type(processor).__name__)

    def __call__(self, input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Return the processed scores; beyond the end of the text, return them unchanged."""
        return scores_1V if self._ended(input_ids[0].tolist()) else self.processor(input_ids, scores_1V)


def until_end(params: SamplingParams, ended: Callable[[Sequence[int]], bool]) -> SamplingParams:
    """Return the parameters with processors that are not called beyond the end of the text."""
    if not params.processors:
        return params
    return dataclasses.replace(params, processors=tuple(UntilEnd(one, ended) for one in params.processors))


def grammars_of(params: SamplingParams) -> Iterator[GrammarProcessor]:
    """Yield the processors that are grammars."""
    for one in params.processors:
        found = one.processor if isinstance(one, UntilEnd) else one
        if isinstance(found, GrammarProcessor):
            yield found


class Processing:
    """Calls the logits processors of all rows.

    Parameters
    ----------
    of_draft : bool
        Whether the scores are a draft's, for which failing processors are skipped.
    vocabulary : PartialVocabulary, optional
        Tokens of the scores' columns, if these are not the whole vocabulary.
    """

    def __init__(self, of_draft: bool, vocabulary: PartialVocabulary | None) -> None:
        self._of_draft, self._vocabulary = of_draft, vocabulary
        self.emptied_by: str | None = None
        """Name of a processor that ruled out all tokens at a node of this round, or None."""
        self.errors: dict[int, Exception] | None = None
        """Errors of processors in this round, by row. Their nodes have no distribution, which matters only if a walk gets
        there. None: raise errors at once."""

    def forget(self) -> None:
        """Forget the errors of the last round."""
        self.emptied_by = None
        if self.errors:
            self.errors.clear()

    def __call__(self, scores_BGV: Tensor, paths_BGP: Tensor, params: RowParams, texts: Sequence[list[int]]) -> Tensor:
        """Return the processed scores of all nodes. Processors need paths on the host, so this syncs.

        Parameters
        ----------
        scores_BGV : Tensor
        paths_BGP : Tensor
            Tokens from the text to each node, the node's own included; `NO_TOKEN` where shorter.
        params : RowParams
        texts : sequence of token-id lists, one per row
            The texts so far.
        """
        result_BGV = scores_BGV.clone()
        for row, (paths, own) in enumerate(zip(paths_BGP.tolist(), params, strict=True)):
            if not own.processors:
                continue
            # Scores over all tokens, by path. None where no walk gets: processors are not called for texts that they ruled out.
            seen: dict[tuple[int, ...], Tensor | None] = {}
            for node, path in enumerate(map(_tokens, paths)):
                if path and path[:-1] in seen:
                    above_V = seen[path[:-1]]
                    if above_V is None or not bool(above_V[path[-1]] > -torch.inf):
                        seen[path] = None
                        continue
                input_ids = torch.tensor([[*texts[row], *path]], dtype=torch.long, device=scores_BGV.device)
                scores_1V = scores_BGV[row, node][None].clone()
                if self._vocabulary is not None:  # processors need the scores of all tokens
                    scores_1V = self._vocabulary.spread(scores_1V, fill=-torch.inf)
                scores_1V = self._through(row, own.processors, input_ids, scores_1V)
                seen[path] = scores_1V[0]
                if self._vocabulary is not None:
                    scores_1V = scores_1V.index_select(-1, self._vocabulary.tokens_D)
                result_BGV[row, node] = scores_1V[0]
        return result_BGV

    def _through(self, row: int, processors: Sequence[Any], input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Return scores of a row after its processors."""
        for processor in processors:
            was_distribution = _is_distribution(scores_1V)
            try:
                scores_1V = processor(input_ids, scores_1V)
            except Exception as error:
                if self._of_draft:  # a draft may propose anything; if the processor fails for the target, too, that raises
                    return scores_1V
                if self.errors is None:
                    raise
                self.errors[row] = error
                return torch.full_like(scores_1V, torch.nan)
            if was_distribution and not _is_distribution(scores_1V):
                self.emptied_by = getattr(processor, "__name__", type(processor).__name__)
        return scores_1V

    @staticmethod
    def foresee(paths: Sequence[Sequence[Sequence[int]]], params: RowParams, texts: Sequence[list[int]]) -> None:
        """Let grammars compute in advance what may follow some nodes, while the device computes their scores."""
        for own, row_params, text in zip(paths, params, texts, strict=True):
            for grammar in grammars_of(row_params):
                for path in own:
                    grammar.foresee([*text, *_tokens(path)])


def _tokens(path: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token in path if token != NO_TOKEN)


def _is_distribution(scores_1V: Tensor) -> bool:
    """Whether the largest score is finite: some token is possible, and no score is infinite or NaN."""
    return bool(scores_1V.max().isfinite())
