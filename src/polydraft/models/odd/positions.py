"""Passing positions to models that count tokens themselves.

Most models take position ids. But the decoders of BART and its kin look positions up by the length of the cache, RoFormer
rotates its keys by it, Inkling measures distances between slots, and BLOOM, MPT and some Falcons add a bias to attention (ALiBi
[1]_) that grows with the slot of a key. In a tree, siblings share a position but not a slot, and rows differ in length. So
while one of our passes runs, the modules concerned get our arguments. At other times, and in other threads, the model is
unchanged. A twin (`polydraft.models.twin`) shows whether this works for a class.

References
----------
.. [1] Press et al. 2021, Train short, test long, arXiv:2108.12409. The bias depends on the key's position alone: the query's
   position would add the same to all keys, which the softmax ignores.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.families import FAMILIES, text_config
from polydraft.models.forwards import PassForwards


@dataclass(frozen=True, eq=False)
class _Pass:
    positions_BT: Tensor
    mask: Any
    cache: Any


_FORWARDS: PassForwards[_Pass] = PassForwards("a layer that counts positions")
_Patch = Callable[[Any, _Pass, dict[str, Any]], Any]
"""Computes a module's output: `(module, pass, arguments by name)`."""


class _Forward:
    """Replaces the `forward` of one module."""

    def __init__(self, module: nn.Module, patch: _Patch) -> None:
        self._module, self._patch = module, patch
        self._signature = inspect.signature(type(module).forward)

    def __call__(self, *args: Any, **options: Any) -> Any:
        now = _FORWARDS.current
        if now is None:
            return type(self._module).forward(self._module, *args, **options)
        arguments = self._signature.bind(self._module, *args, **options).arguments
        return self._patch(self._module, now, arguments)

    @staticmethod
    def own(module: Any, arguments: dict[str, Any]) -> Any:
        """Run the module's own code."""
        arguments = dict(arguments)
        arguments.pop("self")
        return type(module).forward(module, **arguments.pop("kwargs", {}), **arguments)


class PatchedPositions:
    """The modules of a model that need to be told positions; build one with `patched_positions`.

    Parameters
    ----------
    patches : sequence
        Modules, and the functions that compute their outputs.
    bias : callable, optional
        Returns the ALiBi bias for a number of positions, `[H, P]`.
    """

    def __init__(
        self, patches: Sequence[tuple[nn.Module, _Patch]], bias: Callable[[int, torch.device], Tensor] | None = None
    ) -> None:
        self._forwards = [(module, _Forward(module, patch)) for module, patch in patches]
        self._bias = bias

    @property
    def brings_masks(self) -> bool:
        """Whether masks reach attention this way instead of as an argument of the model."""
        return self._bias is not None

    def biased(self, visible_BTS: Tensor, slot_positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an additive mask `[B, H, T, S]` with the bias of each slot's position."""
        assert self._bias is not None
        bias_HP = self._bias(visible_BTS.shape[2], visible_BTS.device).to(dtype)
        bias_BHS = bias_HP[:, slot_positions_BS].transpose(0, 1)
        return bias_BHS[:, :, None].where(visible_BTS[:, None], torch.finfo(dtype).min)

    @contextmanager
    def applied(self, positions_BT: Tensor, mask: Any, cache: Any) -> Iterator[None]:
        """Give the modules these positions while this thread is inside."""
        with _FORWARDS.running(self._forwards, _Pass(positions_BT, mask, cache)):
            yield


def patched_positions(model: Any) -> PatchedPositions | None:
    """Return what passes positions to a model; None if the model takes position ids, or how it counts is unknown."""
    kind = text_config(model).model_type
    if kind in FAMILIES:
        return None
    if kind in _KNOWN and (kind != "falcon" or model.config.alibi):
        return _KNOWN[kind](model)
    if "position_ids" in inspect.signature(model.forward).parameters:
        return None
    tables = [module for module in model.modules() if _is_table(module)]
    if kind == "roformer" and len(tables) == 1:
        return _turning(model, tables[0])
    return PatchedPositions([(table, _look_up) for table in tables]) if tables else None


def _is_table(module: nn.Module) -> bool:
    """Whether a module is a table of positions that it counts itself."""
    return isinstance(module, nn.Embedding) and "past_key_values_length" in inspect.signature(type(module).forward).parameters


def _look_up(table: Any, now: _Pass, arguments: dict[str, Any]) -> Tensor:
    return functional.embedding(now.positions_BT + getattr(table, "offset", 0), table.weight)


def _turning(model: Any, table: Any) -> PatchedPositions:
    """Pass positions to RoFormer, which looks up one row for all texts: give each layer the positions of all rows."""

    def first_row(table: Any, now: _Pass, arguments: dict[str, Any]) -> Tensor:
        return _look_up(table, now, arguments)[0]

    def turned(layer: Any, now: _Pass, arguments: dict[str, Any]) -> Any:
        return _Forward.own(layer, {**arguments, "sinusoidal_pos": _look_up(table, now, {})[:, None]})

    layers = [module for module in model.modules() if type(module).__name__ == "RoFormerSelfAttention"]
    return PatchedPositions([(table, first_row), *((layer, turned) for layer in layers)])


def _inkling(model: Any) -> PatchedPositions:
    distances = [module for module in model.modules() if type(module).__name__ == "InklingRelativeLogits"]
    return PatchedPositions([(module, _relative) for module in distances])


def _relative(module: Any, now: _Pass, arguments: dict[str, Any]) -> Tensor:
    """Return what Inkling adds to attention for the distance between two tokens, measured in positions instead of slots."""
    logits_BHTX: Tensor = (arguments["relative_states"] @ module.proj).transpose(1, 2)
    distance_B1TS = (now.positions_BT[:, :, None] - now.cache.positions_BS[:, None, :])[:, None]
    index_BHTS = distance_B1TS.clamp(0, module.rel_extent - 1).expand(-1, logits_BHTX.shape[1], -1, -1)
    outside_B1TS = (distance_B1TS < 0) | (distance_B1TS >= module.rel_extent)
    return logits_BHTX.gather(-1, index_BHTS).masked_fill(outside_B1TS, 0.0)


def _bloom(model: Any) -> PatchedPositions:
    body = model.base_model

    def bias(positions: int, device: torch.device) -> Tensor:
        ones_1P = torch.ones(1, positions, dtype=torch.long, device=device)
        table_HP: Tensor = body.build_alibi_tensor(ones_1P, body.num_heads, model.dtype)[:, 0]
        return table_HP

    return PatchedPositions([(block, _biased_block) for block in body.h], bias)


def _falcon(model: Any) -> PatchedPositions:
    body = model.base_model
    build: Callable[..., Tensor] = vars(sys.modules[type(body).__module__])["build_alibi_tensor"]
    # The eager code of transformers 5.22 adds the bias twice: to the scores and to the mask.
    times = 2 if model.config._attn_implementation == "eager" else 1

    def bias(positions: int, device: torch.device) -> Tensor:
        ones_1P = torch.ones(1, positions, dtype=torch.long, device=device)
        table_HP = build(ones_1P, body.num_heads, dtype=model.dtype)[:, 0]
        return times * table_HP / math.sqrt(model.config.hidden_size // body.num_heads)

    return PatchedPositions([(block, _biased_block) for block in body.h], bias)


def _biased_block(block: Any, now: _Pass, arguments: dict[str, Any]) -> Any:
    """Run a block of BLOOM or Falcon with the bias in the mask."""
    nothing = torch.zeros_like(arguments["alibi"])
    return _Forward.own(block, {**arguments, "alibi": nothing, "attention_mask": now.mask})


def _mpt(model: Any) -> PatchedPositions:
    body = model.base_model

    def bias(positions: int, device: torch.device) -> Tensor:
        table_HP: Tensor = body.build_mpt_alibi_tensor(body.num_heads, positions, device=device)[:, 0]
        return table_HP

    return PatchedPositions([(block.attn, _mpt_attention) for block in body.blocks], bias)


def _mpt_attention(attention: Any, now: _Pass, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attend as MPT does, but with a bias per row, which its own code does not support."""
    projected = attention.Wqkv(arguments["hidden_states"])
    if attention.clip_qkv:
        projected = projected.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
    query_BHTC, key_BHTC, value_BHTC = (
        part.unflatten(-1, (attention.n_heads, attention.head_dim)).transpose(1, 2) for part in projected.chunk(3, dim=2)
    )
    key_BHSC, value_BHSC = arguments["past_key_values"].update(key_BHTC, value_BHTC, attention.layer_idx)
    scores_BHTS = query_BHTC @ key_BHSC.transpose(-1, -2) * attention.softmax_scale + now.mask
    weights_BHTS = scores_BHTS.float().softmax(dim=-1).to(value_BHSC.dtype)
    return attention.out_proj((weights_BHTS @ value_BHSC).transpose(1, 2).flatten(2)), weights_BHTS


_KNOWN: dict[str, Callable[[Any], PatchedPositions]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "inkling_text": _inkling,
    "mpt": _mpt,
}
