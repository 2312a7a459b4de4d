"""An inflated target in the engine: features of the small model, every product of the large one."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED
from polydraft.models.hf import HFModel
from polydraft.models.inflate import SHAPES, inflate

PREFIX = "inflated"


def is_inflated(name: str) -> bool:
    """Whether a name asks for an inflated target: ``"inflated:SHAPE"`` or ``"inflated:SHAPE:SOURCE"``."""
    return name == PREFIX or name.startswith(f"{PREFIX}:")


def parse_inflated(name: str) -> tuple[str, str]:
    """Return the names of shape and source; the source is the bundled model if none is named."""
    _, _, rest = name.partition(":")
    shape, _, source = rest.partition(":")
    if not shape:
        raise UsageError(f"target {name!r} lacks its shape; write inflated:7b; shapes: {', '.join(SHAPES)}")
    SHAPES.get(shape)
    if is_inflated(source):
        raise UsageError(f"target {name!r} inflates what is inflated already; name the small model, such as {BUNDLED}")
    return shape, source or BUNDLED


def source_name(name: str) -> str:
    """Return the model whose weights, and so whose laws, a target has: itself, unless it is inflated."""
    return parse_inflated(name)[1] if is_inflated(name) else name


class InflatedModel(HFModel):
    """A small model at the cost of a large one, see `polydraft.models.inflate`.

    Features are the small model's: padding is cut off, and put on again for the output head, whose product has the large
    hidden size. So a feature head trained for the small model works on it unchanged. `hidden_size` is the small one.

    Parameters
    ----------
    small : HFModel
    shape : str
        One of `SHAPES`.
    name : str, optional
        ``"inflated:SHAPE:SOURCE"`` if not given.
    lean : bool
        As for `HFModel`.
    """

    def __init__(self, small: HFModel, shape: str, name: str | None = None, lean: bool = True) -> None:
        self._small_size = small.hidden_size
        big = inflate(small.hf_model, SHAPES.get(shape))
        super().__init__(big, name or f"{PREFIX}:{shape}:{small.name}", lean)
        self.width = self.hidden_size
        """Hidden size of the large model."""
        self.hidden_size = small.hidden_size
        self.shape, self.source = shape, small.name

    @property
    def num_parameters(self) -> int:
        """Weights of the large model."""
        return SHAPES.get(self.shape).num_parameters(self.vocab_size)

    @property
    def note(self) -> str:
        """What figures of such a target mean, in one line."""
        return (
            f"inflated: the weights of {self.source} inside a Llama of {self.num_parameters / 1e9:.1f}B parameters; texts and "
            "acceptance are the small model's, times are the large one's"
        )

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Run the large model and return the features of the small one."""
        features_BTF = super().forward(*inputs, **options)
        if not self.taps:
            return features_BTF[..., : self._small_size]
        parts = features_BTF.chunk(1 + len(self.taps), dim=-1)
        return torch.cat([part[..., : self._small_size] for part in parts], dim=-1)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the large output head."""
        room = self.hf_model.config.hidden_size - self._small_size
        logits: Tensor = self.hf_model.lm_head(functional.pad(features_RF[..., : self._small_size], (0, room)))
        return logits
