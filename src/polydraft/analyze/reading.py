"""Passing models along known texts, keeping what they say at some places only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.models import FeatureHead, LanguageModel
from polydraft.trees import causal_block

Texts = Sequence[Sequence[int]]
Places = Sequence[Sequence[int]]
"""Ascending indices of tokens, for each text."""


@torch.no_grad()
def read(model: LanguageModel, texts: Texts, places: Places, head: FeatureHead | None = None) -> tuple[Tensor, Tensor | None]:
    """Return a model's features, and those of a feature head above it, that predict some tokens of each text.

    Parameters
    ----------
    model : LanguageModel
    texts : sequence of token-id lists
        Read side by side.
    places : sequence of int lists
        Tokens to be predicted, from 1 on; with a head from 2 on, as its first entry is a pair of tokens.
    head : FeatureHead, optional
        Reads the model's own features along the text, as it does at the root of a tree.

    Returns
    -------
    features_RF, outputs_RH : Tensor
        Row by row, place by place.
    """
    known = [list(text[: rows[-1]]) if rows else [] for text, rows in zip(texts, places, strict=True)]
    longest = max(map(len, known))
    features = _Picker([[place - 1 for place in rows] for rows in places])
    outputs = _Picker([[place - 2 for place in rows] for rows in places])
    entries = head.start(len(known), longest) if head is not None else None

    def observe(starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        features.take(starts, counts, features_BTF)
        if head is None or entries is None:
            return
        size = features_BTF.shape[1]
        # Entry i is the pair of the features at i and the token at i + 1.
        following = [
            list(text[start + 1 : start + 1 + count]) for text, start, count in zip(texts, starts, counts, strict=True)
        ]
        tokens_BT = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in following], device=head.device)
        entries.reserve(max(entries.lengths) + size)
        outputs_BTH = entries.read(tokens_BT, head.fused(features_BTF), causal_block(len(known), size, head.device))
        outputs.take(starts, counts, outputs_BTH)
        entries.rewind([start + count for start, count in zip(starts, counts, strict=True)])

    model.start(len(known), longest).prefill(known, observe)
    return features.picked(), outputs.picked() if head is not None else None


class _Picker:
    """Keep the rows of some places of each text while chunks go by."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._kept: list[list[Tensor]] = [[] for _ in places]

    def take(self, starts: Sequence[int], counts: Sequence[int], values_BTX: Tensor) -> None:
        """Look at the next chunk of each text."""
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            inside = [place - start for place in self._places[row] if start <= place < start + count]
            if inside:
                self._kept[row].append(values_BTX[row, inside])

    def picked(self) -> Tensor:
        """Return all rows, text after text."""
        return torch.cat([part for kept in self._kept for part in kept])
