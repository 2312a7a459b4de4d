"""Logits processors: called on the host, node by node, only for texts that are still possible."""

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
    """A logits processor of one text, which is not asked what follows the text's end.

    A tree has nodes behind an end-of-text token, a stop string or the last token that there is room for. Nothing that comes
    out there is emitted, so any distribution serves; but a processor may know of none, as where it looks texts up.

    Parameters
    ----------
    processor : logits processor
    ended : function
        Whether a text, prompt included, has come to its end.
    """

    def __init__(self, processor: Any, ended: Callable[[Sequence[int]], bool]) -> None:
        self.processor, self._ended = processor, ended
        self.__name__ = getattr(processor, "__name__", type(processor).__name__)

    def __call__(self, input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Let the processor change the scores, unless there is nothing more to say."""
        return scores_1V if self._ended(input_ids[0].tolist()) else self.processor(input_ids, scores_1V)


def until_end(params: SamplingParams, ended: Callable[[Sequence[int]], bool]) -> SamplingParams:
    """Return the parameters of one text with processors that are not asked what follows its end."""
    if not params.processors:
        return params
    return dataclasses.replace(params, processors=tuple(UntilEnd(one, ended) for one in params.processors))


def grammars_of(params: SamplingParams) -> Iterator[GrammarProcessor]:
    """Yield those of the processors that follow a grammar."""
    for one in params.processors:
        found = one.processor if isinstance(one, UntilEnd) else one
        if isinstance(found, GrammarProcessor):
            yield found


class Processing:
    """Calls the logits processors of all rows.

    Parameters
    ----------
    of_draft : bool
        Whether scores are a draft's: it may go on where a processor fails.
    vocabulary : PartialVocabulary, optional
        What the columns of the scores mean, where they are not all tokens.
    """

    def __init__(self, of_draft: bool, vocabulary: PartialVocabulary | None) -> None:
        self._of_draft, self._vocabulary = of_draft, vocabulary
        self.emptied_by: str | None = None
        """Which processor has left a text of this round without any token to go on with, if one has."""
        self.errors: dict[int, Exception] | None = None
        """By row, what processors have raised in this round: such nodes have no distribution, which matters if a walk gets
        there. None lets it be raised."""

    def forget(self) -> None:
        """Begin another round."""
        self.emptied_by = None
        if self.errors:
            self.errors.clear()

    def __call__(self, scores_BGV: Tensor, paths_BGP: Tensor, params: RowParams, texts: Sequence[list[int]]) -> Tensor:
        """Return the scores of all nodes as processors leave them; they want host-side shapes, so this synchronises.

        Parameters
        ----------
        scores_BGV : Tensor
        paths_BGP : Tensor
            Tokens between the certain text and each node, the node's own included; `NO_TOKEN` where shorter.
        params : RowParams
        texts : sequence of token-id lists, one per row
            What is certain.
        """
        result_BGV = scores_BGV.clone()
        for row, (paths, own) in enumerate(zip(paths_BGP.tolist(), params, strict=True)):
            # By path, scores over all tokens; None where no walk gets: a processor need not know texts that it has ruled out.
            seen: dict[tuple[int, ...], Tensor | None] = {}
            for node, path in enumerate(map(_tokens, paths) if own.processors else ()):
                if path and path[:-1] in seen:
                    above_V = seen[path[:-1]]
                    if above_V is None or not bool(above_V[path[-1]] > -torch.inf):
                        seen[path] = None
                        continue
                input_ids = torch.tensor([[*texts[row], *path]], dtype=torch.long, device=scores_BGV.device)
                scores_1V = scores_BGV[row, node][None].clone()
                if self._vocabulary is not None:  # processors speak of all tokens
                    scores_1V = self._vocabulary.spread(scores_1V, fill=-torch.inf)
                scores_1V = self._through(row, own.processors, input_ids, scores_1V)
                seen[path] = scores_1V[0]
                if self._vocabulary is not None:
                    scores_1V = scores_1V.index_select(-1, self._vocabulary.tokens_D)
                result_BGV[row, node] = scores_1V[0]
        return result_BGV

    def _through(self, row: int, processors: Sequence[Any], input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Let the processors of a row change its scores."""
        for processor in processors:
            was_distribution = _is_distribution(scores_1V)
            try:
                scores_1V = processor(input_ids, scores_1V)
            except Exception as error:
                if self._of_draft:  # any proposal is as good: where the processor fails the target, that is said there
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
        """Let grammars find out what may follow some nodes, while the device works on these nodes' scores."""
        for own, row_params, text in zip(paths, params, texts, strict=True):
            for grammar in grammars_of(row_params):
                for path in own:
                    grammar.foresee([*text, *_tokens(path)])


def _tokens(path: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token in path if token != NO_TOKEN)


def _is_distribution(scores_1V: Tensor) -> bool:
    """Whether some token has a finite score, and none is larger than that or not a number."""
    return bool(scores_1V.max().isfinite())
