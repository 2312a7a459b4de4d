"""What the columns of a draft's logits mean."""

import torch
from torch import Tensor

from polydraft.sampling import PartialVocabulary


class Columns:
    """Bring a draft's logits to the target's size, or leave them in the draft's own few tokens.

    Parameters
    ----------
    vocabulary : PartialVocabulary, optional
        The tokens that the draft knows, where it does not know all.
    vocab_size : int
        The target's.
    """

    def __init__(self, vocabulary: PartialVocabulary | None, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.vocabulary = vocabulary
        """What the columns of `aligned` logits mean, where they are not all tokens."""

    def aligned(self, logits_BGV: Tensor) -> Tensor:
        """Return logits whose columns are the target's tokens, or the draft's own few."""
        if self.vocabulary is not None:
            return logits_BGV
        # Padding rows of either model's table never get mass.
        missing = self._vocab_size - logits_BGV.shape[-1]
        return torch.nn.functional.pad(logits_BGV, (0, missing), value=-torch.inf) if missing else logits_BGV
