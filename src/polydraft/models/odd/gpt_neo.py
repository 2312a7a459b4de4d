"""GPT-Neo's layers in our own code, because its local layers need a mask of their own.

The layers in `transformers` mask the future, and what is outside the window, by a table over slots. In a tree siblings share a
position but not a slot, and if texts differ in length the last slots are not the last tokens, so the table hides visible
tokens. Here the same weights run with masks that follow positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.bodies import is_altered
from polydraft.models.cache import SlotCache
from polydraft.models.families import FULL, SLIDING

GPT_NEO = "gpt_neo"


class GPTNeoBody:
    """Compute the last hidden states of a GPT-Neo model.

    Parameters
    ----------
    obstacle : str, optional
        Why its layers cannot be run one by one, for instance because they are on several devices.
    """

    def __init__(self, model: Any, obstacle: str | None) -> None:
        self._body = model.base_model
        bypassed = [self._body, *self._body.h, *(block.attn for block in self._body.h)]
        bypassed += [block.attn.attention for block in self._body.h]
        if is_altered(bypassed):
            obstacle = obstacle or "its layers were changed: they have hooks, or a forward of their own"
        if obstacle is not None:
            raise UsageError(f"model type {GPT_NEO!r} works only unchanged and on one device, but {obstacle}; load it as it is")

    def __call__(
        self, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, cache: SlotCache, taps: Sequence[int] = ()
    ) -> Tensor:
        """Return the last hidden states, after the final norm, followed by the outputs of the layers `taps`."""
        hidden_BTF: Tensor = self._body.wte(tokens_BT) + self._body.wpe(positions_BT)
        tapped = []
        for index, block in enumerate(self._body.h):
            attention = block.attn.attention
            kind = SLIDING if attention.attention_type == "local" else FULL
            mask_B1TS = mask[kind] if isinstance(mask, dict) else mask
            hidden_BTF = hidden_BTF + _attended(attention, block.ln_1(hidden_BTF), mask_B1TS, cache, index)
            hidden_BTF = hidden_BTF + block.mlp(block.ln_2(hidden_BTF))
            if index + 1 in taps:
                tapped.append(hidden_BTF)
        normed_BTF: Tensor = self._body.ln_f(hidden_BTF)
        return torch.cat([normed_BTF, *tapped], dim=-1) if tapped else normed_BTF


def _attended(attention: Any, normed_BTF: Tensor, mask_B1TS: Tensor | None, cache: SlotCache, index: int) -> Tensor:
    """Return the output of attention; scores are unscaled and in float32, as in this family's training."""
    query_BHTC, key_BHTC, value_BHTC = (
        product(normed_BTF).unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
        for product in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    key_BHSC, value_BHSC = cache.update(key_BHTC, value_BHTC, index)
    scores_BHTS = query_BHTC.float() @ key_BHSC.float().transpose(-1, -2)
    if mask_B1TS is not None:
        hidden_B1TS = ~mask_B1TS if mask_B1TS.dtype == torch.bool else mask_B1TS < 0
        scores_BHTS = scores_BHTS.masked_fill(hidden_B1TS, torch.finfo(scores_BHTS.dtype).min)
    weights_BHTS = scores_BHTS.softmax(dim=-1).to(value_BHSC.dtype)
    output_BTF: Tensor = attention.out_proj((weights_BHTS @ value_BHSC).transpose(1, 2).flatten(2))
    return output_BTF
