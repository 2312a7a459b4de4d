"""An inflated target in the engine: features of the small model, every product of the large one."""

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED
from polydraft.models.hf import HFContext, HFModel
from polydraft.models.inflate import SHAPES, inflate
from polydraft.trees import Block

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

    def start(self, batch_size: int, capacity: int) -> "InflatedContext":
        """Open an empty memory, as large as the large model's."""
        return InflatedContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the large output head."""
        hidden_RF = features_RF[..., : self.hidden_size]
        logits: Tensor = self.hf_model.lm_head(functional.pad(hidden_RF, (0, self.width - self.hidden_size)))
        return logits


class InflatedContext(HFContext):
    """Keys and values of the large model."""

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Run the large model and return the features of the small one."""
        features_BTF = super().extend(tokens_BT, block)
        size = self._model.hidden_size
        parts = features_BTF.chunk(1 + len(self._model.taps), dim=-1)
        return torch.cat([part[..., :size] for part in parts], dim=-1)
