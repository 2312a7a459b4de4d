"""A small Llama inside a large one: the small one's logits at the large one's cost, for benchmarks without large weights.

A hidden state of d numbers in the small model becomes the same d numbers and D - d zeros in the large one:

- RMSNorm divides by the mean over D instead of d numbers, so its weights are scaled by √(d/D) and its epsilon by d/D;
- additional heads, MLP rows and layers compute something, but the projections that would write their results write zeros;
- a head of c channels uses every (C/c)-th pair of a head of C: rotary frequencies θ^(-2i/c) equal θ^(-2j/C) with j = i·C/c,
  and the softmax keeps the scale of c;
- keys and values are repeated for each group of query heads of the large model that needs them.

All other weights meet zeros, or their results do. They hold noise rather than zeros because the power that arithmetic draws,
and so a GPU's clock, depends on the numbers.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.devices import free_bytes, is_host
from polydraft.errors import FailureError, UsageError
from polydraft.models.bundled import BUNDLED
from polydraft.models.families import key_shape
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.registry import Registry
from polydraft.trees import Block

_NOISE = 0.02
_ROPE_TYPES = {"default", "linear", "llama3"}
"""Types of rotary positions whose frequencies depend only on the plain frequency."""
PREFIX = "inflated"


@dataclass(frozen=True, kw_only=True)
class BigShape:
    """Sizes of a large Llama; its vocabulary is the small model's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_size: int

    def num_parameters(self, vocab_size: int) -> int:
        """Return the number of weights, including a separate output head."""
        size = self.hidden_size
        heads = (2 * self.num_heads + 2 * self.num_key_heads) * self.head_size
        layer = size * heads + 3 * size * self.mlp_size + 2 * size
        return self.num_layers * layer + 2 * vocab_size * size + size


SHAPES: Registry[BigShape] = Registry("shape of an inflated target")

# No common model of 1B parameters has as many layers as the bundled one (30), so this shape is made up, with the same grouping
# of heads.
SHAPES.register("1b")(BigShape(hidden_size=1536, num_layers=32, num_heads=24, num_key_heads=8, head_size=64, mlp_size=4608))
# Llama 2 7B and 13B.
SHAPES.register("7b")(BigShape(hidden_size=4096, num_layers=32, num_heads=32, num_key_heads=32, head_size=128, mlp_size=11008))
SHAPES.register("13b")(BigShape(hidden_size=5120, num_layers=40, num_heads=40, num_key_heads=40, head_size=128, mlp_size=13824))


def inflate(small: Any, shape: BigShape) -> Any:
    """Return a Llama of `shape` with the logits of `small`, in its dtype and on its device.

    The large model is built on the small one's device. Layer k of the small model is layer k of the large one; additional
    layers come last. The output head is not shared with the embeddings, as in Llama 2.

    Returns
    -------
    transformers.LlamaForCausalLM
    """
    _check(small, shape)
    config = copy.deepcopy(small.config)
    head_size = _head_size(config)
    config.update(
        {
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_key_heads,
            "head_dim": shape.head_size,
            "intermediate_size": shape.mlp_size,
            "rms_norm_eps": small.config.rms_norm_eps * small.config.hidden_size / shape.hidden_size,
            "tie_word_embeddings": False,
        }
    )
    # Ordinary tensors even if the caller is in inference mode, because the lean body lays them out anew.
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            big = type(small)._from_config(config, dtype=small.dtype)
        _check_memory(shape.num_parameters(config.vocab_size) * small.dtype.itemsize, small.device)
        big.to_empty(device=small.device)
        big.model.rotary_emb = type(big.model.rotary_emb)(config).to(small.device)  # its table was on the meta device
        _fill_with_noise(big)
        big.model.embed_tokens.weight.zero_()
        big.model.embed_tokens.weight[:, : small.config.hidden_size] = small.model.embed_tokens.weight
        big.lm_head.weight[:, : small.config.hidden_size] = small.lm_head.weight
        _scale_norm(big.model.norm, small.model.norm)
        queries, keys = _places(small.config, shape, small.device)
        for number, layer in enumerate(big.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.scaling = head_size**-0.5
            if number < len(small.model.layers):
                _fill_layer(layer, small.model.layers[number], queries, keys, shape.head_size)
    big.generation_config = copy.deepcopy(small.generation_config)
    return big.eval().requires_grad_(False)


@dataclass(frozen=True)
class _Places:
    """Which heads and channels of the large model those of the small one are copied to."""

    heads_H: Tensor
    """Heads in the large model."""
    sources_H: Tensor
    """The same heads in the small model."""
    channels_C: Tensor
    """Channels of a large head for those of a small one."""

    def idle(self, big_size: int) -> Tensor:
        """Return the channels of a large head that a small one does not use."""
        idle_C = torch.ones(big_size, dtype=torch.bool, device=self.channels_C.device)
        idle_C[self.channels_C] = False
        return idle_C.nonzero()[:, 0]

    def rows(self, big_size: int) -> Tensor:
        """Return the rows of the large projection that are copied to."""
        return (self.heads_H[:, None] * big_size + self.channels_C).flatten()

    def source_rows(self) -> Tensor:
        """Return the rows of the small projection that they are copied from."""
        size = len(self.channels_C)
        return (self.sources_H[:, None] * size + torch.arange(size, device=self.sources_H.device)).flatten()


def _places(config: Any, shape: BigShape, device: torch.device) -> tuple[_Places, _Places]:
    """Place every query head in a group with its own key head; a group of the small model may take up several large ones."""
    size = _head_size(config)
    step = shape.head_size // size
    half_C = torch.arange(size // 2, device=device) * step
    channels_C = torch.cat([half_C, half_C + shape.head_size // 2])
    group, big_group = _group(config), shape.num_heads // shape.num_key_heads
    spread = math.ceil(group / big_group)
    query_H = torch.arange(config.num_attention_heads, device=device)
    member_H = query_H % group
    key_H = query_H // group * spread + member_H // big_group
    big_key_H = torch.arange(config.num_key_value_heads * spread, device=device)
    return (
        _Places(key_H * big_group + member_H % big_group, query_H, channels_C),
        _Places(big_key_H, big_key_H // spread, channels_C),
    )


def _fill_layer(big: Any, small: Any, queries: _Places, keys: _Places, head_size: int) -> None:
    _scale_norm(big.input_layernorm, small.input_layernorm)
    _scale_norm(big.post_attention_layernorm, small.post_attention_layernorm)
    attention, source = big.self_attn, small.self_attn
    width = source.q_proj.in_features
    # In channels that a small head does not use, queries are zero, so that noise in the keys does no harm.
    heads = attention.q_proj.weight.view(-1, head_size, attention.q_proj.in_features)
    heads[queries.heads_H[:, None], queries.idle(head_size)] = 0
    for name, places in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        weights = getattr(source, name).weight[places.source_rows()]
        getattr(attention, name).weight[places.rows(head_size), :width] = weights
    columns = torch.zeros_like(attention.o_proj.weight[:width])
    columns[:, queries.rows(head_size)] = source.o_proj.weight[:, queries.source_rows()]
    attention.o_proj.weight[:width] = columns
    mlp_size = small.mlp.down_proj.in_features
    for name in ("gate_proj", "up_proj"):
        getattr(big.mlp, name).weight[:mlp_size, :width] = getattr(small.mlp, name).weight
    big.mlp.down_proj.weight[:width, :mlp_size] = small.mlp.down_proj.weight


def _scale_norm(big: Any, small: Any) -> None:
    size = len(small.weight)
    big.weight[:size] = (small.weight.double() * math.sqrt(size / len(big.weight))).to(big.weight.dtype)


def _fill_with_noise(big: Any) -> None:
    generator = torch.Generator(big.device).manual_seed(0)
    for parameter in big.parameters():
        parameter.normal_(0.0, _NOISE, generator=generator)


def _check(small: Any, shape: BigShape) -> None:
    config = small.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise UsageError(f"only Llama models without biases can be inflated, not {config.model_type!r}; inflate smollm2")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        allowed = ", ".join(sorted(_ROPE_TYPES))
        raise UsageError(f"rotary embeddings of type {rope.get('rope_type')!r} cannot be inflated; allowed: {allowed}")
    big_group = shape.num_heads // shape.num_key_heads
    needed = {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_key_heads": config.num_key_value_heads * math.ceil(_group(config) / big_group),
        "mlp_size": config.intermediate_size,
        "head_size": _head_size(config),
    }
    for name, least in needed.items():
        if getattr(shape, name) < least:
            raise UsageError(
                f"a model that needs {name}={least} does not fit into a shape with {getattr(shape, name)}; use a larger shape"
            )
    if shape.head_size % needed["head_size"]:
        raise UsageError(f"heads of {needed['head_size']} channels do not divide those of {shape.head_size}; use another shape")


def _check_memory(needed: int, device: torch.device) -> None:
    """Refuse a model that would not fit into the host's memory; a GPU raises an error by itself."""
    free = free_bytes(device)
    if is_host(device) and free is not None and needed > 0.9 * free:
        raise FailureError(
            f"the inflated target takes {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free; "
            "use a smaller shape, --dtype bfloat16, or a GPU"
        )


def _group(config: Any) -> int:
    return int(config.num_attention_heads) // int(config.num_key_value_heads)


def _head_size(config: Any) -> int:
    return key_shape(config)[1]


def is_inflated(name: str) -> bool:
    """Whether a name asks for an inflated target: ``"inflated:SHAPE"`` or ``"inflated:SHAPE:SOURCE"``."""
    return name == PREFIX or name.startswith(f"{PREFIX}:")


def parse_inflated(name: str) -> tuple[str, str]:
    """Return the names of the shape and of the source, by default the bundled model."""
    _, _, rest = name.partition(":")
    shape, _, source = rest.partition(":")
    if not shape:
        raise UsageError(f"target {name!r} has no shape; write it as in inflated:7b; shapes: {', '.join(SHAPES)}")
    SHAPES.get(shape)
    if is_inflated(source):
        raise UsageError(f"target {name!r} is already inflated; name the small model, such as {BUNDLED}")
    return shape, source or BUNDLED


def source_name(name: str) -> str:
    """Return the name of the model that a target takes its weights from: itself, unless it is inflated."""
    return parse_inflated(name)[1] if is_inflated(name) else name


class InflatedModel(HFModel):
    """A small model at the cost of a large one.

    Features are the small model's: padding is removed, and added again for the output head, which computes with the large
    hidden size. So a feature head trained for the small model works unchanged. `hidden_size` is the small model's.

    Parameters
    ----------
    shape : str
        One of `SHAPES`.
    lean, native, invariant : bool
        As for `HFModel`.
    """

    def __init__(
        self,
        small: HFModel,
        shape: str,
        lean: bool = True,
        native: bool = True,
        invariant: bool | None = None,
    ) -> None:
        big = inflate(small.hf_model, SHAPES.get(shape))
        super().__init__(big, f"{PREFIX}:{shape}:{small.name}", lean, native=native, invariant=invariant)
        self.width = self.hidden_size
        """Hidden size of the large model."""
        self.hidden_size = small.hidden_size
        self.shape, self.source = shape, small.name

    @property
    def note(self) -> str:
        """One line that says what figures of such a target mean."""
        billions = SHAPES.get(self.shape).num_parameters(self.vocab_size) / 1e9
        return (
            f"inflated: the weights of {self.source} inside a Llama of {billions:.1f}B parameters; texts and acceptance are "
            "the small model's, times are the large one's"
        )

    def start(self, batch_size: int, capacity: int) -> "InflatedContext":
        """Return an empty context, with the large model's cache."""
        return InflatedContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Apply the large output head."""
        hidden_RF = features_RF[..., : self.hidden_size]
        return self.output.whole(functional.pad(hidden_RF, (0, self.width - self.hidden_size)))


class InflatedContext(HFContext):
    """Keys and values of the large model."""

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Run the large model and return the features of the small one."""
        return self._narrowed(super().extend(tokens_BT, block))

    def _replayed(self, parts: Sequence[list[int]], rows: Sequence[int]) -> Tensor | None:
        features_BTF = super()._replayed(parts, rows)
        return None if features_BTF is None else self._narrowed(features_BTF)

    def _narrowed(self, features_BTF: Tensor) -> Tensor:
        size = self.model.hidden_size
        parts = features_BTF.chunk(1 + len(self.model.taps), dim=-1)
        return torch.cat([part[..., :size] for part in parts], dim=-1)
