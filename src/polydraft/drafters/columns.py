"""What the columns of a draft's logits mean."""

import torch
from torch import Tensor

from polydraft.sampling import PartialVocabulary, SamplingParams


class Columns:
    """Bring a draft's logits into the target's tokens, or leave them in the draft's own few.

    Parameters
    ----------
    vocabulary : PartialVocabulary, optional
        The tokens that the draft knows, where it does not know all.
    vocab_size : int
        The target's.
    params : SamplingParams
        Penalties and biases speak of all tokens, so logits under them are spread out at once.
    """

    def __init__(self, vocabulary: PartialVocabulary | None, vocab_size: int, params: SamplingParams) -> None:
        short = not (params.needs_history or params.logit_bias)
        self._known, self._vocab_size = vocabulary, vocab_size
        self.vocabulary = vocabulary if short else None
        """What the columns of `aligned` logits mean, where they are not all tokens."""

    def aligned(self, logits_BGV: Tensor) -> Tensor:
        """Return logits whose columns are the target's tokens, or the draft's own few."""
        if self.vocabulary is not None:
            return logits_BGV
        if self._known is not None:
            return self._known.spread(logits_BGV, fill=-torch.inf)
        # Padding rows of either model's table never get mass.
        missing = self._vocab_size - logits_BGV.shape[-1]
        return torch.nn.functional.pad(logits_BGV, (0, missing), value=-torch.inf) if missing else logits_BGV
