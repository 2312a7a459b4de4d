"""The first layers of a target, with its own head, as a draft: no training, no extra weights."""

import copy
from typing import Any

from torch import nn

from polydraft.errors import UsageError
from polydraft.models.hf import HFModel


def early_exit(target: HFModel, layers: int) -> HFModel:
    """Return a draft that runs only the first `layers` layers of `target` and shares its weights."""
    total = target.num_layers
    if not 1 <= layers < total:
        raise UsageError(f"early-exit:{layers} is out of range; allowed: 1 to {total - 1} for a target of {total} layers")
    if target.spread is not None:  # hooks of the whole model would go along
        raise UsageError(f"early-exit:{layers} needs a target in one place, but {target.spread}; use a draft model")
    model = _shallow_copy(target.hf_model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = list(text.layer_types)[:layers]
    _truncate(model, total, layers, config)
    return HFModel(model, name=f"early-exit:{layers}")


def _truncate(module: Any, total: int, layers: int, config: Any) -> bool:
    """Replace the stack of layers below `module` by its beginning, copying only the modules on the way to it."""
    if hasattr(module, "config"):
        module.config = config
    for name, child in list(module.named_children()):
        if isinstance(child, nn.ModuleList) and len(child) == total:
            module._modules[name] = nn.ModuleList(list(child)[:layers])
            return True
    for name, child in list(module.named_children()):
        if len(list(child.children())) and any(
            isinstance(part, nn.ModuleList) and len(part) == total for part in child.modules()
        ):
            module._modules[name] = _shallow_copy(child)
            return _truncate(module._modules[name], total, layers, config)
    raise UsageError("cannot find the stack of layers in this model; use another draft")


def _shallow_copy(module: Any) -> Any:
    """Copy a module so that its children can be replaced without touching the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
