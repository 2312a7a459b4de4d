"""Finding the recurrent layers of Hugging Face models and the states that they keep.

A recurrent layer keeps a state of fixed size instead of keys and values. A state cannot be masked, but it can be copied. So
each node of a tree gets its own state, computed from its parent's (`polydraft.models.odd.recurrent_context`). This requires
that the model keeps its states in the cache of `transformers`, where they can be read and replaced. Watching one pass shows
which modules use it.

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
"""Layer, kind (`conv` or `recurrent`), and number of the state among those of its kind in the layer."""
_STATE_METHODS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
"""Methods of a cache. Before transformers 5.22 it has no `get_` methods, and models access its layers instead."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """Shape and initial value of one state of one text."""

    name: StateName
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0
    """The value that fills it at the start of a text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """The recurrent part of a model."""

    mixers: tuple[nn.Module, ...]
    """The innermost modules that use states of the cache; each reads all tokens of a pass in order."""
    states: tuple[StateShape, ...]
    cache_argument: str
    """Name of the model's argument for its cache."""


def find_recurrence(model: Any) -> Recurrence | None:
    """Return the recurrent part of a model, or None; refuse a model whose states cannot be copied."""
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
                f"model type {kind!r} has recurrent layers, and transformers {transformers.__version__} does not expose "
                "their states; use 5.17 or newer"
            )
        mixers = _users_of_states(model, cache, lambda: model(input_ids=tokens_BT, use_cache=True, **{argument: cache}))
    if not mixers:
        return None
    if (spread := spread_obstacle(model)) is not None:
        raise UsageError(f"model type {kind!r} has recurrent layers, which must be in one place, but {spread}")
    return Recurrence(
        mixers=mixers,
        states=tuple(_shapes(cache, _first_end(text_config(model)))),
        cache_argument=argument,
    )


def _users_of_states(model: nn.Module, cache: Any, read: Callable[[], object]) -> tuple[nn.Module, ...]:
    """Return the innermost modules that use states of the cache while the model reads."""
    running: list[nn.Module] = []
    found: dict[int, nn.Module] = {}

    def begin(module: nn.Module, inputs: Any) -> None:
        running.append(module)

    def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
        running.pop()

    def noted(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found[id(running[-1])] = running[-1]
        return method(*args, **options)

    handles = [module.register_forward_pre_hook(begin) for module in model.modules()]
    handles += [module.register_forward_hook(end, always_call=True) for module in model.modules()]
    try:
        for name in _STATE_METHODS:
            if hasattr(cache, name):
                setattr(cache, name, partial(noted, getattr(cache, name)))
        read()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found.values())


def _has_numbered_states(cache: DynamicCache) -> bool:
    """Whether the cache's layers hold states by number, as they do since transformers 5.17."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return all(isinstance(getattr(layer, "conv_states", None), dict) for layer in layers)


def _first_end(config: Any) -> int:
    """Return the first end-of-text token; 0 if there is none."""
    end = getattr(config, "eos_token_id", None)
    return int((end[0] if end else 0) if isinstance(end, list) else end or 0)


def _shapes(cache: DynamicCache, end: int) -> list[StateShape]:
    shapes = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for index, state in states.items():
                    if state is not None:
                        # States of integers hold token ids: start as if another text had just ended.
                        start = 0 if state.is_floating_point() else end
                        sizes = tuple(state.shape[1:])
                        shapes.append(StateShape(name=(number, kind, index), sizes=sizes, dtype=state.dtype, start=start))
    return shapes
