"""Hugging Face causal language models as `LanguageModel`s, without touching their code; their first layers as drafts."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.backends.native import NativeBody, NativeProduct
from polydraft.errors import PolydraftError, UsageError
from polydraft.models._bodies import GPT_NEO, GPTNeoBody, LeanBody, lean_body
from polydraft.models._fused import fused_body, invariant_obstacle, is_plain
from polydraft.models._invariant import invariant_linear
from polydraft.models._native import native_body, native_linear, native_product
from polydraft.models.cache import SlotCache, stored_layers
from polydraft.models.check import check_habits
from polydraft.models.families import (
    CHUNKED,
    FAMILIES,
    FULL,
    SLIDING,
    WHOLE_KINDS,
    attention_kinds,
    chunk_size,
    context_limit,
    first_line,
    quantised_by,
    refuse_unsupported,
    steady_positions,
    text_config,
    window_size,
)
from polydraft.models.hf_context import HFContext
from polydraft.models.language_model import LanguageModel, by_rows
from polydraft.models.native_linear import NativeLinears, native_linears
from polydraft.models.odd.positions import told_positions
from polydraft.models.odd.recurrent import find_recurrence
from polydraft.models.placement import home_device, spread_obstacle
from polydraft.models.quantised import int8_body, is_quantised
from polydraft.models.tree_attention import obstacle
from polydraft.sampling import PartialVocabulary


class HFModel(LanguageModel):
    """Wrap a `transformers` causal language model.

    Tree attention needs nothing from the model but what every current one takes: a 4-D mask, position ids and a cache
    object. The constructor checks that, by computing, for model types that the test suite does not cover.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Used as it is, in its dtype and on its device.
    name : str, optional
        For messages and statistics; the model's own name otherwise.
    lean : bool
        Run Llama-shaped models by a shorter way with the same weights, see `polydraft.models._bodies`.
    vocabulary : PartialVocabulary, optional
        For drafts: compute the logits of these tokens only.
    endless : bool
        Let texts outgrow the context that the configuration names, as `generate` does, where positions allow it.
    native : bool
        On a CPU, run Llama-shaped models by compiled code, see `polydraft.backends.native`, where there is a compiler, and the
        linear layers of all others (`polydraft.models.native_linear`).
    invariant : bool, optional
        On a GPU, give each token the bits that it has alone, see `polydraft.models._invariant`; if not given, in bfloat16
        where the model can.
    """

    _checks_habits = True

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        lean: bool = True,
        vocabulary: PartialVocabulary | None = None,
        endless: bool = False,
        native: bool = True,
        invariant: bool | None = None,
    ) -> None:
        refuse_unsupported(model)
        # In float32 products run outside the matrix units: that must be asked for.
        self._asks_invariant = model.dtype == torch.bfloat16 if invariant is None else invariant
        self._output: tuple[Tensor, Tensor | None] | None = None
        """Rows of the output head for `vocabulary`."""
        self.uses_native = native
        """Whether compiled code may be used."""
        self.native: NativeBody | None = None
        """The compiled body."""
        self._product: NativeProduct | None = None
        """The compiled output head."""
        self._linears: NativeLinears | None = None
        """Compiled products of a body that is not compiled as a whole."""
        self._split_head: bool
        self._goes_on: bool
        try:
            self._wrap(model, name, lean)
            if native and self.steady_positions:
                self.native = native_body(self.lean or int8_body(model), self.dtype)
            if native and self.native is None and self.spread is None:
                self._linears = native_linears(model)
        except (PolydraftError, torch.OutOfMemoryError):
            raise
        # A class of unknown habits may fail in any way when it is tried.
        except Exception as error:
            kind, scheme = text_config(model).model_type, quantised_by(model)
            if scheme is not None:
                raise UsageError(
                    f"model type {kind!r}, quantised by {scheme}, does not run under trees ({first_line(error)}); use weights "
                    "that are not quantised, on a CPU with dtype int8 for as little memory"
                ) from error
            raise UsageError(
                f"model type {kind!r} does not work as a causal language model ({first_line(error)}); "
                "docs/models.md lists what works"
            ) from error
        if invariant and not self.invariant:
            raise UsageError(f"model {self.name!r} cannot be invariant: {self._invariant_obstacle()}; leave out invariant")
        self.vocabulary = vocabulary if self._split_head else None
        if self.vocabulary is not None:
            table, tokens_D = model.get_output_embeddings(), self.vocabulary.tokens_D
            self._output = table.weight.detach()[tokens_D], None if table.bias is None else table.bias.detach()[tokens_D]
        if self.native is not None or (self._linears is not None and self._output is not None):
            self._product = self._native_output()
        if endless and self._goes_on:
            self.max_positions = None

    def _native_output(self) -> NativeProduct | None:
        """Return the output head by compiled code; None where it is more than a product."""
        if self._output is not None:
            return native_product(*self._output, int8=self.int8)
        return native_linear(self.hf_model.get_output_embeddings())

    def _wrap(self, model: Any, name: str | None, lean: bool) -> None:
        self.hf_model = model.eval()
        self.config = text_config(model)
        self.name = name or self.config.name_or_path or self.config.model_type
        self.device = home_device(model)
        self.spread = self.graph_obstacle = spread_obstacle(model)
        """How the model is not all in one place; None if it is."""
        self.recurrence = find_recurrence(model)
        """Its recurrent layers, if it has any."""
        self.resumes = False
        """Whether these read on from a state by several tokens at once, as a twin shows; the scan of Mamba begins from none."""
        if self.recurrence is not None:
            self.shape_obstacle = "its recurrent layers read a tree level by level, and only static trees have known levels"
        lean = lean and self.spread is None
        self.dtype = model.dtype
        self.int8 = is_quantised(model)
        """Whether the weights are in int8; `dtype` is that of all else."""
        self.quantised_by = quantised_by(model)
        """Whose quantisation, not ours, the weights came with; they are multiplied by its own code."""
        table = model.get_output_embeddings()
        # Quantised ones have weights of other shapes.
        self.vocab_size = int(getattr(table, "out_features", None) or table.weight.shape[0])
        self.hidden_size = int(self.config.hidden_size)
        self.taps: tuple[int, ...] = ()
        """Layers, counted from 1, whose outputs stand beside the last hidden states in the features."""
        self.max_positions = context_limit(self.config)
        self.num_layers = int(self.config.num_hidden_layers)
        self.steady_positions = steady_positions(self.config)
        self._goes_on = self.max_positions is None or self.steady_positions
        self.window, self.chunk = window_size(self.config), chunk_size(self.config)
        self.kinds = attention_kinds(self.config)
        """Kinds of attention, each with a mask of its own."""
        self._additive_mask = self.config._attn_implementation == "eager"
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        """Whether `generate` tells the model where tokens stand; RoBERTa counts from another number than it is told."""
        self._positions = told_positions(model)
        self.stored_layers: int | None = self.num_layers
        """Layers that keep keys and values, all of one shape; None where shapes differ."""
        with torch.no_grad():
            if self.recurrence is None and self.config.model_type not in FAMILIES:
                self.stored_layers = stored_layers(model)
            self._split_head = self._head_can_be_split()
            self.lean = lean_body(model) if lean and self._split_head and len(self.kinds) == 1 else None
            self.fused = fused_body(self.lean, self.device, self.dtype, self._asks_invariant)
            self._body: LeanBody | GPTNeoBody | None = self.lean
            if self.config.model_type == GPT_NEO:
                self._body = GPTNeoBody(model, self.spread if self._split_head else "its output head does not stand alone")
            if self._checks_habits and self.config.model_type not in FAMILIES:
                self._goes_on = check_habits(self, _Unchecked)

    @property
    def invariant(self) -> bool:
        """Whether a token's bits are the same in every tree, batch and alone."""
        return self.fused is not None and self.fused.invariant and is_plain(self.hf_model.get_output_embeddings())

    def _invariant_obstacle(self) -> str | None:
        if self.device.type != "cuda":
            return f"the kernels for that run on GPUs, not on {self.device}"
        if self.spread is not None or self.lean is None:
            return self.spread or f"its model type {self.config.model_type!r} runs by code that is not ours"
        kernels = obstacle(self.device, self.dtype) or invariant_obstacle(self.lean, self.dtype)
        return kernels or "its output head is not a plain product"

    def tap(self, layers: Sequence[int]) -> None:
        """Let features carry the outputs of some layers too, for a feature head."""
        if not self._split_head:
            raise UsageError(f"model {self.name!r} does not show its hidden states; use a draft model, not a feature head")
        self.taps = tuple(layers)

    def start(self, batch_size: int, capacity: int) -> HFContext:
        """Open an empty memory; storage is allocated at the first pass."""
        if self.recurrence is not None:
            from polydraft.models.odd.recurrent_context import RecurrentContext  # late: it is built on this module

            return RecurrentContext(self, batch_size, capacity)
        return HFContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the output head, unless the features are logits already."""
        if not self._split_head:
            return features_RF
        hidden_RF = features_RF[..., : self.hidden_size] if self.taps else features_RF
        if self._product is not None and not torch.is_grad_enabled():
            return self._product(hidden_RF)
        if self._output is not None:
            table_VF, bias_V = self._output
            return by_rows(lambda rows_RF: functional.linear(rows_RF, table_VF, bias_V), hidden_RF)
        return self._through_head(hidden_RF).to(self.device)

    def _through_head(self, hidden_RF: Tensor) -> Tensor:
        table = self.hf_model.get_output_embeddings()
        if self.invariant and not torch.is_grad_enabled():
            return invariant_linear(hidden_RF, table.weight, table.bias)
        with self._linears or nullcontext():
            return by_rows(table, hidden_RF)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, cache: SlotCache) -> Tensor:
        """Run the model and return features: the last hidden states, or logits where the head cannot be split off."""
        with self._linears or nullcontext():
            return self._by_torch(tokens_BT, positions_BT, mask, cache)

    def _by_torch(self, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, cache: SlotCache) -> Tensor:
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
        with self._positions.told(positions_BT, mask, cache):
            return self._features(inputs)

    def _features(self, inputs: dict[str, Any]) -> Tensor:
        if self._split_head:
            outputs = self.hf_model.base_model(**inputs, output_hidden_states=bool(self.taps))
            last_BTF = outputs.last_hidden_state.to(self.device)
            tapped = [outputs.hidden_states[layer].to(self.device) for layer in self.taps]
            return torch.cat([last_BTF, *tapped], dim=-1) if tapped else last_BTF
        logits_BTV: Tensor = self.hf_model(**inputs).logits
        return logits_BTV

    @property
    def sees_everything(self) -> bool:
        """Whether every token sees all of its text, so that a token alone needs no mask."""
        return self.window is None and self.chunk is None and self._positions is None

    def mask(self, visible_BTS: Tensor, positions_BT: Tensor, slot_positions_BS: Tensor) -> Any:
        """Return the mask in the form this model takes: a tensor, or one per kind of layer."""
        if self._positions is not None and self._positions.brings_masks:
            return self._positions.biased(visible_BTS, slot_positions_BS, self.dtype)
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            seen_BTS = visible_BTS
            if kind not in WHOLE_KINDS:
                seen_BTS = visible_BTS & self._near(kind, positions_BT[:, :, None], slot_positions_BS[:, None, :])
            masks[kind] = self._formatted(seen_BTS)
        if len(masks) == 1:
            return masks[self.kinds[0]]
        if self.recurrence is None:
            return masks
        # Some ask by the kind of a layer, some by the kind of mask that it wants.
        wanted = {FULL: masks.get("hybrid"), SLIDING: masks.get("hybrid_sliding"), "conv": None, "linear_attention": None}
        return wanted | masks

    def _near(self, kind: str, position_BT1: Tensor, slot_position_B1S: Tensor) -> Tensor:
        if kind == CHUNKED:
            assert self.chunk is not None
            return position_BT1 // self.chunk == slot_position_B1S // self.chunk
        assert self.window is not None
        return position_BT1 - slot_position_B1S < self.window

    def _formatted(self, visible_BTS: Tensor) -> Tensor:
        mask_B1TS = visible_BTS[:, None]
        if not self._additive_mask:
            return mask_B1TS
        return torch.zeros_like(mask_B1TS, dtype=self.dtype).masked_fill_(~mask_B1TS, torch.finfo(self.dtype).min)

    def _head_can_be_split(self) -> bool:
        """Whether logits are the output head of the last hidden states, nothing more (no scaling, no soft cap)."""
        if self.hf_model.base_model is self.hf_model:
            return False
        tokens_BT = torch.tensor([[0, 1]], device=self.device)
        logits_BTV = self.hf_model(input_ids=tokens_BT, use_cache=False).logits
        hidden_BTF = self.hf_model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        head_BTV = self.hf_model.get_output_embeddings()(hidden_BTF).to(logits_BTV.device)
        return logits_BTV.shape == head_BTV.shape and torch.equal(logits_BTV, head_BTV.to(logits_BTV.dtype))

    def plain(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits that the model itself gives for whole texts, with neither mask nor cache."""
        options: dict[str, Tensor] = {}
        if self.takes_positions:
            options["position_ids"] = torch.arange(tokens_BT.shape[1], device=self.device).expand_as(tokens_BT)
        with torch.no_grad():
            logits_BTV: Tensor = self.hf_model(input_ids=tokens_BT, use_cache=False, **options).logits
        return logits_BTV


class _Unchecked(HFModel):
    """A twin (`polydraft.models.twin`), which is what checks run on."""

    _checks_habits = False


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
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and len(kinds) != layers:  # Falcon-H1 derives them from their number
        text.layer_types = list(kinds)[:layers]
    _truncate(model, total, layers, config)
    return HFModel(model, name=f"early-exit:{layers}", native=target.uses_native, invariant=False)


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
