"""EAGLE-3 heads trained elsewhere: folders in the authors' own format, or in that of vLLM's speculators.

Both hold the same layer: `fc` over the outputs of some layers of the target, a transformer layer whose queries, keys and values
read the token's embedding and the features side by side, a norm, and an output table for the draft's own vocabulary. The
formats differ in the names of tensors and the layout of the config.

References
----------
.. [1] Li et al. 2025, EAGLE-3, arXiv:2503.01840.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from polydraft.errors import UsageError, shown
from polydraft.models.heads.feature_head import ENDLESS, FeatureHead, HeadShape, TapNorm
from polydraft.models.heads.foreign_tensors import (
    FIRST,
    drafted_vocabulary,
    layer_shapes,
    layer_weights,
    loaded,
    own_tables,
    shapes_of,
    weight_files,
)
from polydraft.models.heads.head_folder import (
    Target,
    check_tensors,
    checked_number,
    checked_shape,
    installed,
    new_head,
    unreadable,
)
from polydraft.models.hf import HFModel

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions that do not depend on the length of the text."""
_KINDS = ("dflash", "eagle3", "mtp", "peagle")
"""Types of speculators that can be loaded."""
_MOST_LAYERS = 64
_OPTIONAL = ("embed_tokens.weight", "t2d")
"""Tensors that may be missing: the target has the first, and the second repeats d2t. Drafts of all tokens may have d2t, too."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The content of a config.json in either format."""

    layer: Mapping[str, Any]
    """Sizes of the transformer layer, under the names that transformers uses."""
    form: Mapping[str, Any]
    """All else: where norms are, which layers of the target are read, and so on."""

    def drafted(self, tokens: int) -> int:
        """Return how many of the target's tokens are drafted."""
        drafted: int = self.form.get("draft_vocab_size") or tokens
        return drafted


class Format:
    """How to read heads from such folders: those of EAGLE-3 here, others in subclasses."""

    kind = "eagle3"
    """Its type in speculators' format."""
    head: type[FeatureHead] = FeatureHead
    one_layer = True
    """Whether heads of several layers are refused."""
    taps = "eagle_aux_hidden_state_layer_ids"
    """Key of the config that lists the layers of the target to read."""
    feature_norm = f"{FIRST}hidden_norm.weight"
    """Tensor with the norm of fused features."""

    def recognise(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a head, or of an unknown draft in speculators' format, refused later."""
        names = config.get("architectures")
        named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
        return named or "speculators_model_type" in config or "draft_vocab_size" in config

    def load(self, folder: Path, target: HFModel, tokenizer: Any, name: str) -> FeatureHead:
        """Load a head for its target, and have the target provide the features it reads.

        Raises
        ------
        UsageError
            If it is for another target, or of an unknown form.
        FailureError
            If its files are incomplete.
        """
        shape, files, expected = self.check(folder, target, name)
        try:
            theirs = {part: tensor for part, tensor in loaded(files).items() if part in expected}
            vocabulary = drafted_vocabulary(theirs, target)
        except (OSError, SafetensorError, ValueError) as error:
            raise unreadable(f"draft {name!r}", error) from None
        head = new_head(shape, target, vocabulary, name, self.head)
        head.load_state_dict(self._renamed(theirs, shape))
        head.tables = own_tables(theirs, head, vocabulary)
        return installed(head, target)

    def check(self, folder: Path, target: Target, name: str) -> tuple[HeadShape, list[Path], Mapping[str, tuple[int, ...]]]:
        """Return a head's sizes and form, its weight files, and the shapes of all its tensors.

        Refuse a head with incomplete files, of an unknown form, or for a target of other sizes.
        """
        try:
            config = self._config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            _check_target(config, target, name)
            files = weight_files(folder, name)
            ignored = self._ignored(config, target.vocab_size)
            found = {part: shape for part, shape in shapes_of(files).items() if part not in ignored}
            shape = self._shape(config, target, {*found})
        except UsageError:
            raise
        except (OSError, SafetensorError) as error:
            raise unreadable(f"draft {name!r}", error) from None
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"draft {name!r} has no usable config.json ({error}); get another copy") from None
        _check_taps(shape, target, name)
        expected = self._expected(config, shape, target.vocab_size)
        try:
            check_tensors(found, expected, optional=_OPTIONAL if "d2t" in expected else (*_OPTIONAL, "d2t"))
        except ValueError as error:
            raise unreadable(f"draft {name!r}", error) from None
        return shape, files, expected

    def _config(self, config: Any) -> Config:
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
        kind = config.get("speculators_model_type")
        if kind is None:
            found = self._of_authors(config)
        elif kind != self.kind:
            raise ValueError(f"speculators_model_type is {shown(kind)}; allowed: {', '.join(_KINDS)}")
        else:
            found = Config(layer=config["transformer_layer_config"], form=config)
        if not isinstance(found.layer, dict):
            raise ValueError(f"transformer_layer_config is {shown(found.layer)}, not an object")
        layers, model_type = found.layer.get("num_hidden_layers", 1), found.layer.get("model_type", "llama")
        if self.one_layer and layers != 1:
            raise ValueError(f"num_hidden_layers is {shown(layers)}; heads of 1 layer can be loaded")
        if model_type not in _MODEL_TYPES:
            raise ValueError(f"model_type is {shown(model_type)}; allowed: {', '.join(_MODEL_TYPES)}")
        if (activation := found.layer.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act is {shown(activation)}; heads with silu can be loaded")
        return found

    def _of_authors(self, config: Mapping[str, Any]) -> Config:
        """Read a config in the authors' own format."""
        return Config(layer=config, form={**config, **(config.get("eagle_config") or {})})

    def _shape(self, config: Config, target: Target, found: set[str]) -> HeadShape:
        """Read sizes and form. There are biases and norms of queries and keys if the file has them or the config says so."""
        layer, form = config.layer, config.form
        middle = target.num_layers // 2
        taps = form.get(self.taps) or [2, middle, target.num_layers - 3]
        if not isinstance(taps, list) or len({*map(str, taps)}) != len(taps):
            raise ValueError(f"{self.taps} is {shown(taps)}, not a list of different layers")
        each, whole = form.get("fc_norm", False), form.get("norm_before_fc", False)
        biased = bool(layer.get("attention_bias", False))
        queries = layer.get("num_attention_heads")
        size = layer.get("head_dim") or (layer["hidden_size"] // queries if isinstance(queries, int) and queries > 0 else None)
        fields = {
            "hidden_size": layer.get("hidden_size"),
            "taps": sorted(taps) if all(isinstance(tap, int) for tap in taps) else taps,  # the order of the target's features
            "num_heads": queries,
            "num_key_heads": layer.get("num_key_value_heads") or queries,
            "head_size": size,
            "mlp_size": layer.get("intermediate_size"),
            "window": layer_windows(config)[0],
            "norm_epsilon": layer.get("rms_norm_eps", 1e-6),
            "reads_last": False,
            "tap_norm": TapNorm.EACH if each else TapNorm.ALL if whole else TapNorm.NONE,
            "joins": False,
            "normed_residual": form.get("norm_before_residual", False),
            "normed_output": form.get("norm_output", False),
            "qkv_bias": biased or f"{FIRST}self_attn.q_proj.bias" in found,
            "output_bias": (biased and layer.get("model_type") != "qwen2") or f"{FIRST}self_attn.o_proj.bias" in found,
            "mlp_bias": bool(layer.get("mlp_bias", False)) or f"{FIRST}mlp.gate_proj.bias" in found,
            "query_key_norm": layer.get("model_type") == "qwen3" or f"{FIRST}self_attn.q_norm.weight" in found,
        }
        shape = checked_shape(fields)
        return checked_shape({**fields, **_rope(layer, shape)})

    def _ignored(self, config: Config, tokens: int) -> Collection[str]:
        """Return the names of tensors to ignore, because the target's own are used."""
        return ()

    def _expected(self, config: Config, shape: HeadShape, tokens: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of a head."""
        size, drafted, reads = shape.hidden_size, config.drafted(tokens), self.head.side_by_side * shape.hidden_size
        expected = {"fc.weight": (size, size * len(shape.taps)), "norm.weight": (size,), "lm_head.weight": (drafted, size)}
        expected[self.feature_norm] = (size,)
        for number in range(len(layer_windows(config))):
            expected |= layer_shapes(shape, f"layers.{number}.", size if number else reads)
        if shape.tap_norm == TapNorm.EACH:
            expected |= {f"fc_norm.{tap}.weight": (size,) for tap in range(len(shape.taps))}
        if shape.tap_norm == TapNorm.ALL:
            expected["input_norm.weight"] = (size * len(shape.taps),)
        if drafted != tokens:
            expected["d2t"] = (drafted,)
        return expected | {"embed_tokens.weight": (tokens, size), "t2d": (tokens,)}

    def _renamed(self, theirs: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
        """Return the weights of a head under our names; our first layer reads features first, then tokens."""
        ours = {
            "fuse.weight": theirs["fc.weight"],
            "feature_norm.weight": theirs[self.feature_norm],
            "token_norm.weight": theirs[f"{FIRST}input_layernorm.weight"],
            "output_norm.weight": theirs["norm.weight"],
            **layer_weights(theirs, shape, FIRST),
        }
        if self.head.side_by_side == 2:
            ours["qkv.weight"] = ours["qkv.weight"].roll(shape.hidden_size, 1)
        if shape.tap_norm == TapNorm.ALL:
            ours["tap_norms.0.weight"] = theirs["input_norm.weight"]
        if shape.tap_norm == TapNorm.EACH:
            ours |= {f"tap_norms.{tap}.weight": theirs[f"fc_norm.{tap}.weight"] for tap in range(len(shape.taps))}
        return ours


EAGLE3 = Format()


def layer_windows(config: Config) -> tuple[int, ...]:
    """Return how many positions each layer reaches back."""
    kinds = config.layer.get("layer_types") or []
    count = checked_number("num_hidden_layers", config.layer.get("num_hidden_layers", 1), most=_MOST_LAYERS)
    if not isinstance(kinds, list) or len(kinds) not in (0, count):
        raise ValueError(f"layer_types is {shown(kinds)}, not a list of {count} types")
    window = checked_number("sliding_window", config.layer.get("sliding_window") or ENDLESS)
    return tuple(window if kind == "sliding_attention" else ENDLESS for kind in kinds or [None] * count)


def _check_target(config: Config, target: Target, name: str) -> None:
    for said in (config.layer.get("hidden_size"), config.form.get("target_hidden_size")):
        if said is not None and said != target.hidden_size:
            raise UsageError(
                f"head {name!r} reads hidden states of size {shown(said)}, but target {target.name!r} has "
                f"{target.hidden_size}; use the head's own target"
            )
    tokens = config.layer.get("vocab_size", target.vocab_size)
    if tokens != target.vocab_size:
        raise UsageError(
            f"head {name!r} is for a vocabulary of {shown(tokens)} tokens, but target {target.name!r} has {target.vocab_size}; "
            "use the head's own target"
        )


def _check_taps(shape: HeadShape, target: Target, name: str) -> None:
    if shape.taps and shape.taps[-1] >= target.num_layers:
        raise UsageError(
            f"head {name!r} reads layers {', '.join(map(str, shape.taps))}, but of target {target.name!r} layers 1 to "
            f"{target.num_layers - 1} can be read; use the head's own target"
        )


def _rope(layer: Mapping[str, Any], shape: HeadShape) -> dict[str, Any]:
    """Return the rotary frequencies and gain that transformers computes from these settings, or the base if that is enough."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    said = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    if kind not in _STEADY_ROPE:
        raise ValueError(f"rope_type is {shown(kind)}; allowed: {', '.join(_STEADY_ROPE)}")
    said.setdefault("rope_theta", layer.get("rope_theta") or 10_000.0)
    if kind == "default":
        return {"rope_theta": said["rope_theta"]}
    try:
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_size,
            max_position_embeddings=layer.get("max_position_embeddings", 2048),
            rope_parameters={"rope_type": kind, **said},
        )
        rotary = LlamaRotaryEmbedding(config)
    except Exception:  # transformers raises anything here
        raise ValueError(f"rope parameters are {shown(said)}, which does not fit rope_type {kind}") from None
    return {"rope_frequencies": rotary.inv_freq.tolist(), "rope_gain": float(rotary.attention_scaling)}
