"""PEFT adapters (LoRA and its relatives): merged into a target loaded by name, tracked on a model object.

An adapter that `load` reads is merged into the weights, so that all fast code still applies. Adapters that a model object
already has belong to its owner, who may switch them between two calls: the model then runs by its own modules, and nothing
computed with one adapter is used with another.

See docs/decisions/052-quantised-and-adapted-targets.md.
"""

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import torch

from polydraft.errors import UsageError, first_line
from polydraft.models.bodies import is_altered
from polydraft.models.families import quantised_by

logger = logging.getLogger(__name__)
_CONFIG = "adapter_config.json"
ALLOWED = "a folder that PEFT has saved, or a hub name"


def unwrapped(model: Any) -> Any:
    """Return the `transformers` model inside a `peft.PeftModel`, adapters included, or any other model as it is."""
    peft = sys.modules.get("peft")  # it is imported if the caller has such a model
    if peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        for name, config in model.peft_config.items():
            _check_kind(name, config)
        model = model.get_base_model()
    return model


def places_of(weights: Iterable[Any]) -> tuple[int, ...]:
    """Return the addresses of a model's weights, which change if it is moved or converted or gets new layers."""
    # Weights quantised by other packages may have no storage.
    plain = torch.nn.Parameter
    return tuple(weight.data_ptr() if type(weight) is plain else id(weight) for weight in weights)


class Weights:
    """A model's weights, the layers that have adapters, and those that its owner has altered.

    They are looked up once, because that takes milliseconds. `is_current` notices adapters that PEFT adds later, and hooks and
    forwards that change what a layer does.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._adapters = model, _adapters(model)
        self._weights = list(model.parameters())
        switched = ("active_adapters", "merged_adapters")
        found = model.modules() if self._adapters else ()
        self._layers = [layer for layer in found if all(hasattr(layer, name) for name in switched)]
        self._addresses = places_of(self._weights)
        self._modules = [
            (module, type(module), vars(module), module._forward_hooks, module._forward_pre_hooks) for module in model.modules()
        ]
        self._altered = tuple(is_altered((module,)) for module in model.modules())
        self._at_first = self._changes()

    @property
    def adapted(self) -> bool:
        """Whether there are adapters, active or not."""
        return bool(self._layers)

    @property
    def is_current(self) -> bool:
        """Whether weights and adapters are still the same objects in the same places."""
        now = _adapters(self._model)
        same = now.keys() == self._adapters.keys() and all(now[name] is self._adapters[name] for name in now)
        return same and places_of(self._weights) == self._addresses and self._changes() == self._at_first

    def _changes(self) -> list[int]:
        """Which modules have hooks, forwards of their own, or other classes than at first: `is_altered` in microseconds."""
        return [
            number
            for number, (module, kind, own, hooks, pre_hooks) in enumerate(self._modules)
            if hooks or pre_hooks or "forward" in own or type(module) is not kind
        ]

    def mark(self) -> Hashable:
        """Return a value that changes when weights change, an adapter is switched or a layer is altered."""
        versions = tuple(0 if weight.is_inference() else weight._version for weight in self._weights)
        switches = tuple(
            (
                tuple(layer.active_adapters),
                bool(layer.disable_adapters),
                tuple(layer.merged_adapters),
                tuple(getattr(layer, "scaling", {}).items()),
            )
            for layer in self._layers
        )
        return self._addresses, versions, switches, self._altered


def _adapters(model: Any) -> dict[str, Any]:
    """Return the adapters on a model, by name."""
    return dict(getattr(model, "peft_config", None) or {})


def check_adapter(folder: str) -> None:
    """Refuse an adapter that cannot work, before any model is loaded."""
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"adapter {folder!r} needs the package peft; get it with: pip install 'polydraft[adapters]'")
    if os.path.isdir(folder) and not Path(folder, _CONFIG).exists():
        raise UsageError(f"adapter {folder!r} has no {_CONFIG}; allowed: {ALLOWED}")


def with_adapter(model: Any, folder: str, name: str, **options: Any) -> Any:
    """Add an adapter to a target and merge it into the weights, unless they are quantised.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    folder : str
        A folder that PEFT has saved, or a name on the Hugging Face hub.
    name : str
        The target's name, for messages.
    **options
        Options for the hub, see `polydraft.models.finding.hub_options`.
    """
    peft: Any = importlib.import_module("peft")
    logger.info("loading adapter %s ...", folder)
    try:
        config = peft.PeftConfig.from_pretrained(folder, **options)
    except Exception as error:  # from the hub's client, broken files, or kinds that this release does not know
        raise UsageError(f"cannot load adapter {folder!r} ({first_line(error, kind=True)}); allowed: {ALLOWED}") from None
    _check_kind(folder, config)
    config.inference_mode = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever they are about raises an error below
            adapted = peft.PeftModel(model, config)
            found = adapted.load_adapter(folder, "default", torch_device=str(model.device), **options)
            if strays := [*found.missing_keys, *found.unexpected_keys]:
                raise ValueError(f"{len(strays)} tensors are missing or unexpected, such as {strays[0]}")
            base = adapted.get_base_model().eval()
            merged = base if quantised_by(model) is not None else adapted.merge_and_unload()
    except Exception as error:  # missing modules, tensors of other shapes, kinds that cannot be merged
        reason = "its tensors have other shapes" if "size mismatch" in str(error) else first_line(error, kind=True)
        raise UsageError(
            f"adapter {folder!r} does not fit target {name!r} ({reason}); use the model that it was trained on"
        ) from None
    trained_on = config.base_model_name_or_path
    if trained_on and Path(trained_on).name.lower() != Path(name).name.lower():
        logger.warning("adapter %s was trained on %s; its shapes fit %s, but it may not suit it", folder, trained_on, name)
    return merged


def _check_kind(name: str, config: Any) -> None:
    """Refuse adapters that do more than change layers."""
    if config.is_prompt_learning or config.is_adaption_prompt:
        what = "puts vectors of its own before the text"
    elif getattr(config, "alora_invocation_tokens", None):
        what = "becomes active in the middle of a text"
    else:
        return
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    raise UsageError(f"adapter {name!r}, of kind {kind}, {what}, which trees cannot follow; use one that only changes layers")
