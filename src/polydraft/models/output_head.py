"""The output head of a Hugging Face model, which turns its last hidden states into logits."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models.bodies import is_altered, is_llama_shaped, is_product
from polydraft.models.products import Product, by_rows, fast_product
from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.hf import HFModel


def stands_alone(model: Any, device: torch.device) -> bool:
    """Whether logits are the output head's product with the last hidden states and nothing more (no scaling, no soft cap)."""
    if model.base_model is model:
        return False
    own = type(model).__module__.startswith("transformers.models.") and "forward" not in vars(model)
    if own and is_llama_shaped(model) and not is_altered([model, model.base_model]):
        return True  # known without the passes below, which read all weights twice
    tokens_BT = torch.tensor([[0, 1]], device=device)
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    hidden_BTF = model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    head_BTV = model.get_output_embeddings()(hidden_BTF).to(logits_BTV.device)
    return logits_BTV.shape == head_BTV.shape and torch.equal(logits_BTV, head_BTV.to(logits_BTV.dtype))


class OutputHead:
    """The output head of a model, or its rows for the tokens that a draft knows.

    Parameters
    ----------
    vocabulary : PartialVocabulary, optional
        Compute the logits of these tokens only.
    """

    def __init__(self, model: "HFModel", vocabulary: PartialVocabulary | None) -> None:
        self._model = model
        self._part: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias for the tokens of `vocabulary`."""
        self._product: Product | None = None
        """A faster product than torch's."""
        if vocabulary is not None:
            table, tokens_D = self._table, vocabulary.tokens_D
            self._part = table.weight.detach()[tokens_D], None if table.bias is None else table.bias.detach()[tokens_D]
            if model.fast is not None or model.linears is not None:
                self._product = fast_product(self._part, model.int8)
        elif model.fast is not None:
            self._product = fast_product(self._table)

    @property
    def _table(self) -> Any:
        return self._model.hf_model.get_output_embeddings()

    @property
    def plain(self) -> bool:
        """Whether it is a plain matrix product."""
        return is_product(self._table)

    def __call__(self, hidden_RF: Tensor) -> Tensor:
        """Return logits `[R, V]`, in float32 if compiled code computes them."""
        if self._product is not None and not torch.is_grad_enabled():
            return self._product(hidden_RF)
        if self._part is not None:
            table_VF, bias_V = self._part
            return by_rows(lambda rows_RF: functional.linear(rows_RF, table_VF, bias_V), hidden_RF)
        return self.whole(hidden_RF)

    def whole(self, hidden_RF: Tensor) -> Tensor:
        """Return the logits of all tokens, computed by the model's own head."""
        model, table = self._model, self._table
        if model.fast is not None and model.invariant and not torch.is_grad_enabled():
            return model.fast.product(hidden_RF, table.weight, table.bias).to(model.device)
        with model.linears or nullcontext():
            return by_rows(table, hidden_RF).to(model.device)
