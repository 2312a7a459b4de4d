"""Recurrent layers of Hugging Face models: which modules they are, and what they keep of a text.

A recurrent layer keeps a state of fixed size instead of keys and values. Nothing in it can be masked, but it can be copied. So
each node of a tree gets a state of its own, made from its parent's (`polydraft.models.odd.recurrent_context`). That takes a
model that keeps its states in the cache of `transformers`, where they can be read and replaced. Which modules do is found out
by watching one pass.

See docs/decisions/030-recurrent-layers-read-trees-by-levels.md.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from polydraft.errors import UsageError
from polydraft.models.families import is_recurrent, text_config
from polydraft.models.placement import spread_obstacle

StateName = tuple[int, str, int]
"""Layer, kind (`conv` or `recurrent`), and number of a state among those of its kind in the layer."""
_ASKED = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
"""Of a cache; before transformers 5.22 there are no `get_` methods, and models look into its layers instead."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What one state of one text looks like."""

    name: StateName
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0
    """What it is full of when a text begins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """The recurrent part of a model."""

    mixers: tuple[nn.Module, ...]
    """The modules that ask a cache for states; the innermost ones, which read all tokens of a pass in turn."""
    states: tuple[StateShape, ...]
    cache_argument: str
    """Under which name the model takes its cache."""


class _Watch:
    """Notes which module is running when a cache is asked for a state."""

    def __init__(self, model: nn.Module) -> None:
        self.running: list[nn.Module] = []
        self.mixers: dict[int, nn.Module] = {}
        self._handles = [module.register_forward_pre_hook(self._begin) for module in model.modules()]
        self._handles += [module.register_forward_hook(self._end, always_call=True) for module in model.modules()]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.running.append(module)

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.running.pop()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def spy(self, cache: Any) -> None:
        for method in _ASKED:
            if hasattr(cache, method):
                setattr(cache, method, partial(self._note, getattr(cache, method)))

    def _note(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.mixers[id(self.running[-1])] = self.running[-1]
        return method(*args, **options)


def find_recurrence(model: Any) -> Recurrence | None:
    """Return the recurrent part of a model, None if it has none; refuse one whose states cannot be copied."""
    if not is_recurrent(model):
        return None
    kind = text_config(model).model_type
    parameters = inspect.signature(model.forward).parameters
    argument = "cache_params" if "cache_params" in parameters else "past_key_values"
    tokens_BT = torch.tensor([[0, 1, 0]], device=model.device)
    with torch.no_grad():
        cache = getattr(model(input_ids=tokens_BT, use_cache=True), argument, None)
        if type(cache) is not DynamicCache:
            where = "in modules of its own" if cache is None else f"in a {type(cache).__name__}"
            raise UsageError(
                f"model type {kind!r} has recurrent layers and keeps their state {where}, where it cannot be copied for "
                "every candidate; use a model that keeps it in the DynamicCache of transformers, or an attention-only one"
            )
        if not _has_numbered_states(cache):
            raise UsageError(
                f"model type {kind!r} has recurrent layers, and transformers {transformers.__version__} does not hand out "
                "their states; use 5.17 or newer"
            )
        watch = _Watch(model)
        try:
            watch.spy(cache)
            model(input_ids=tokens_BT, use_cache=True, **{argument: cache})
        finally:
            watch.close()
    if not watch.mixers:
        return None
    if (spread := spread_obstacle(model)) is not None:
        raise UsageError(f"model type {kind!r} has recurrent layers, which must be in one place, but {spread}")
    return Recurrence(
        mixers=tuple(watch.mixers.values()),
        states=tuple(_shapes(cache, _first_end(text_config(model)))),
        cache_argument=argument,
    )


def _has_numbered_states(cache: DynamicCache) -> bool:
    """Whether states are where we look for them: in the cache's layers, by their numbers, as since transformers 5.17."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return all(isinstance(getattr(layer, "conv_states", None), dict) for layer in layers)


def _first_end(config: Any) -> int:
    """Return the end-of-text token, the first if there are several."""
    end = getattr(config, "eos_token_id", None)
    return int((end[0] if end else 0) if isinstance(end, list) else end or 0)


def _shapes(cache: DynamicCache, end: int) -> list[StateShape]:
    shapes = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for index, state in states.items():
                    if state is not None:
                        # A state of whole numbers is one of token ids, as if another text had ended.
                        start = 0 if state.is_floating_point() else end
                        sizes = tuple(state.shape[1:])
                        shapes.append(StateShape(name=(number, kind, index), sizes=sizes, dtype=state.dtype, start=start))
    return shapes
