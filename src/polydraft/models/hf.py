"""Hugging Face causal language models as `LanguageModel`s, with their code unchanged, and their first layers as drafts."""

import copy
import inspect
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polydraft.devices import dtype_name
from polydraft.errors import PolydraftError, UsageError, first_line
from polydraft.models.adapters import Weights
from polydraft.models.bodies import LeanBody, fast_body, kernel_obstacle, lean_body
from polydraft.models.cache import SlotCache, stored_layers
from polydraft.models.check import check_habits
from polydraft.models.families import (
    FAMILIES,
    context_limit,
    quantised_by,
    refuse_unsupported,
    steady_positions,
    text_config,
    window_size,
)
from polydraft.models.hf_context import HFContext
from polydraft.models.language_model import LanguageModel
from polydraft.models.masks import Masks
from polydraft.models.odd.gpt_neo import GPT_NEO, GPTNeoBody
from polydraft.models.odd.positions import patched_positions
from polydraft.models.odd.recurrent import find_recurrence
from polydraft.models.output_head import OutputHead, stands_alone
from polydraft.models.placement import home_device, spread_obstacle
from polydraft.models.products import fast_linears
from polydraft.models.quantised import is_quantised
from polydraft.sampling import PartialVocabulary


class HFModel(LanguageModel):
    """A `transformers` causal language model that can score trees.

    Tree attention only needs the model to take a 4-D mask, position ids and a cache object, as every current one does. The
    constructor tries that out for model types that the test suite does not cover, for weights that another package has
    quantised, and for models with adapters.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Used as it is, in its dtype and on its device.
    name : str, optional
        For messages and statistics; by default the model's own name.
    lean : bool
        Run Llama-shaped models by shorter code with the same weights, see `polydraft.models.bodies`.
    vocabulary : PartialVocabulary, optional
        For drafts: compute the logits of these tokens only.
    endless : bool
        If the model's positions allow it, let texts outgrow the context in the configuration, as `generate` does.
    native : bool
        On a CPU with a C compiler, run Llama-shaped models, and the linear layers of all others, by compiled code, see
        `polydraft.backends.native`.
    invariant : bool, optional
        On a GPU, give each token the same bits in every tree and batch, see `polydraft.backends.triton.invariant`. By default
        only in bfloat16, if the model allows it.
    trusted : bool
        Skip the checks of unknown model types, for instance for the twins that these checks run on.
    """

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        lean: bool = True,
        vocabulary: PartialVocabulary | None = None,
        endless: bool = False,
        native: bool = True,
        invariant: bool | None = None,
        trusted: bool = False,
    ) -> None:
        refuse_unsupported(model)
        self._options = lean, invariant
        self.native = native
        """Whether compiled code may be used."""
        self.linears: AbstractContextManager[None] | None = None
        """Speeds up the linear layers of a body that no backend runs as a whole."""
        try:
            with (fast_linears(model) if native else None) or nullcontext():
                self._describe(model, name)
            self._choose_passes()
            may_outgrow = self.max_positions is None or self.steady_positions
            tested = self.config.model_type in FAMILIES and self.quantised_by is None and not self.adapted
            if not trusted and not tested:
                with torch.no_grad():
                    may_outgrow = check_habits(self)
        except (PolydraftError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # an unknown class may fail in any way
            raise _does_not_work(model, error) from error
        if invariant and not self.invariant:
            raise UsageError(f"model {self.name!r} cannot be invariant: {self._variance()}; leave out invariant")
        self.vocabulary = vocabulary if self._split_head else None
        if self.vocabulary is not None:
            self.output = OutputHead(self, self.vocabulary)
        if endless and may_outgrow:
            self.max_positions = None

    def _describe(self, model: Any, name: str | None) -> None:
        """Determine the model's sizes, limits and peculiarities."""
        self.hf_model = model.eval()
        self.config = config = text_config(model)
        self.name = name or config.name_or_path or config.model_type
        self.device, self.dtype = home_device(model), model.dtype
        self.spread = self.graph_obstacle = spread_obstacle(model)
        """Why the model is not in one place: split, offloaded, or on several devices; None if it is."""
        self.int8 = is_quantised(model)
        """Whether we have quantised the weights to int8; `dtype` is that of everything else."""
        self.quantised_by = quantised_by(model)
        """The package that quantised the weights and multiplies by them, unless that was us."""
        table = model.get_output_embeddings()
        # The weights of quantised tables may have other shapes.
        self.vocab_size = int(getattr(table, "out_features", None) or table.weight.shape[0])
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.taps: tuple[int, ...] = ()
        """Layers, counted from 1, whose outputs are part of the features, after the last hidden states."""
        self.max_positions, self.window = context_limit(config), window_size(config)
        self.steady_positions = steady_positions(config)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        """Whether `generate` passes position ids. RoBERTa takes them, but starts from another number."""
        self.recurrence = find_recurrence(model)
        """Its recurrent layers, if any."""
        self.resumes = False
        """Whether recurrent layers can read several tokens at once from a given state; Mamba's cannot. Tried on a twin."""
        if self.recurrence is not None:
            self.shape_obstacle = "its recurrent layers read a tree level by level, and only static trees have known levels"
        self.stored_layers: int | None = self.num_layers
        """Layers that keep keys and values, all of one shape; None if shapes differ."""
        with torch.no_grad():
            if self.recurrence is None and config.model_type not in FAMILIES:
                self.stored_layers = stored_layers(model)
            self._split_head = stands_alone(model, self.device)

    def _choose_passes(self) -> None:
        """Decide how passes run: as a whole by a backend, by our own shorter code, or by the model's own."""
        model, (lean, invariant) = self.hf_model, self._options
        self._positions = patched_positions(model)
        self.masks = Masks(self.config, self.dtype, self.window, self._positions, self.recurrence is not None)
        self.adapted = Weights(model).adapted
        """Whether its layers have adapters. It then runs by its own modules, because adapters may be switched at any time."""
        lean = lean and not self.adapted and self.spread is None and self._split_head and len(self.masks.kinds) == 1
        with torch.no_grad():
            self.lean = lean_body(model) if lean else None
        self._body: LeanBody | GPTNeoBody | None = self.lean
        if self.config.model_type == GPT_NEO:
            self._body = GPTNeoBody(model, self.spread if self._split_head else "its output head was changed")
        # Not by default in float32, whose invariant products do not run on the matrix units.
        self.fast = fast_body(self, self.dtype == torch.bfloat16 if invariant is None else invariant)
        """Runs whole passes instead of torch, if a backend can."""
        self.linears = fast_linears(model) if self.native and self.fast is None and self.spread is None else None
        self.output = OutputHead(self, self.vocabulary)
        self._weights = Weights(model)  # last, because a lean body moves weights

    def mark(self) -> Hashable:
        """Return a value that changes with the weights and with the state of adapters.

        The model's owner may have added or merged an adapter since the last call; passes are then chosen anew.
        """
        if self.hf_model.training:
            raise in_training("model")
        if not self._weights.is_current:
            if (home_device(self.hf_model), self.hf_model.dtype) != (self.device, self.dtype):
                raise UsageError(
                    f"model {self.name!r} was in {self.dtype} on {self.device} and was moved or converted; make a new decoder"
                )
            if any(part.training for part in self.hf_model.modules()):  # as new adapters are
                raise in_training("model")
            self._choose_passes()
        return self._weights.mark()

    @property
    def invariant(self) -> bool:
        """Whether a token's results have the same bits in every tree and batch."""
        return self.fast is not None and self.fast.invariant and self.output.plain

    def _variance(self) -> str:
        """Return why the model cannot be invariant."""
        if (reason := kernel_obstacle(self.device, self.dtype)) is not None:
            return reason
        if self.spread is not None or self.fast is None:
            return self.spread or f"its model type {self.config.model_type!r} runs by its own code"
        return self.fast.variance or "its output head is not a plain product"

    def tap(self, layers: Sequence[int]) -> None:
        """Include the outputs of some layers in the features, for a feature head."""
        if not self._split_head:
            raise UsageError(f"model {self.name!r} does not show its hidden states; use a draft model, not a feature head")
        self.taps = tuple(layers)

    def start(self, batch_size: int, capacity: int) -> HFContext:
        """Return an empty context; storage is allocated at the first pass."""
        if self.recurrence is not None:
            from polydraft.models.odd.recurrent_context import RecurrentContext  # late: it imports this module

            return RecurrentContext(self, batch_size, capacity)
        return HFContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the output head, unless the features are logits already."""
        if not self._split_head:
            return features_RF
        return self.output(features_RF[..., : self.hidden_size] if self.taps else features_RF)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, cache: SlotCache) -> Tensor:
        """Run the model in torch and return features: the last hidden states, or logits if the head cannot be split off."""
        with self.linears or nullcontext():
            if self._body is not None:
                return self._body(tokens_BT, positions_BT, mask, cache, self.taps)
            inputs = {
                "input_ids": tokens_BT,
                "attention_mask": mask,
                "position_ids": positions_BT,
                "past_key_values" if self.recurrence is None else self.recurrence.cache_argument: cache,
                "use_cache": True,
            }
            if self._positions is None:
                return self._features(inputs)
            inputs["attention_mask"] = None if self._positions.brings_masks else mask
            with self._positions.applied(positions_BT, mask, cache):
                return self._features(inputs)

    def _features(self, inputs: dict[str, Any]) -> Tensor:
        if self._split_head:
            outputs = self.hf_model.base_model(**inputs, output_hidden_states=bool(self.taps))
            last_BTF = outputs.last_hidden_state.to(self.device)
            tapped = [outputs.hidden_states[layer].to(self.device) for layer in self.taps]
            return torch.cat([last_BTF, *tapped], dim=-1) if tapped else last_BTF
        logits_BTV: Tensor = self.hf_model(**inputs).logits
        return logits_BTV

    def plain(self, tokens_BT: Tensor) -> Tensor:
        """Return the model's own logits for whole texts, computed without mask or cache."""
        options: dict[str, Tensor] = {}
        if self.takes_positions:
            options["position_ids"] = torch.arange(tokens_BT.shape[1], device=self.device).expand_as(tokens_BT)
        with torch.no_grad(), self.linears or nullcontext():
            logits_BTV: Tensor = self.hf_model(input_ids=tokens_BT, use_cache=False, **options).logits
        return logits_BTV


def in_training(role: str) -> UsageError:
    """Return the error for a model in training mode."""
    return UsageError(f"the {role} is in training mode, where dropout makes every pass different; call model.eval() first")


def _does_not_work(model: Any, error: Exception) -> UsageError:
    kind, scheme, reason = text_config(model).model_type, quantised_by(model), first_line(error, kind=True)
    if scheme is not None:
        dtype = dtype_name(model.dtype)
        return UsageError(
            f"model type {kind!r}, quantised by {scheme}, does not run with trees in {dtype} ({reason}); try "
            "another dtype, or weights that are not quantised (on a CPU, dtype int8 takes as little memory)"
        )
    return UsageError(
        f"model type {kind!r} does not work as a causal language model ({reason}); docs/models.md lists what works"
    )


def early_exit(target: HFModel, layers: int) -> HFModel:
    """Return a draft that runs the first `layers` layers of `target` and shares its weights."""
    total = target.num_layers
    if not 1 <= layers < total:
        raise UsageError(f"early-exit:{layers} is out of range; allowed: 1 to {total - 1} for a target of {total} layers")
    if target.spread is not None:  # the copy would take along hooks made for the whole model
        raise UsageError(f"early-exit:{layers} needs a target in one place, but {target.spread}; use a draft model")
    model = _shallow_copy(target.hf_model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and len(kinds) != layers:  # Falcon-H1 derives the list, which is shorter already
        text.layer_types = list(kinds)[:layers]
    _truncate(model, total, layers, config)
    return HFModel(model, name=f"early-exit:{layers}", native=target.native, invariant=False)


def _truncate(module: Any, total: int, layers: int, config: Any) -> None:
    """Shorten the stack of layers somewhere below `module`, copying only the modules on the way to it."""
    if hasattr(module, "config"):
        module.config = config
    children = list(module.named_children())
    for name, child in children:
        if _is_stack(child, total):
            module._modules[name] = nn.ModuleList(list(child)[:layers])
            return
    for name, child in children:
        if any(_is_stack(part, total) for part in child.modules()):
            module._modules[name] = _shallow_copy(child)
            _truncate(module._modules[name], total, layers, config)
            return
    raise UsageError("cannot find the stack of layers in this model; use another draft")


def _is_stack(module: Any, total: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == total


def _shallow_copy(module: Any) -> Any:
    """Copy a module so that its children can be replaced without touching the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
