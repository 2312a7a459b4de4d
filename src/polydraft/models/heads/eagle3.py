"""EAGLE-3 heads that others have trained: folders in the authors' own format, and in that of vLLM's speculators.

Both hold the same layer: `fc` over the outputs of some layers of the target, one transformer layer whose queries, keys and
values read the token's embedding and the features side by side, a norm, and an output table of the draft's own vocabulary. They
differ in how the file names its tensors and where the config says what.

References
----------
.. [1] Li et al. 2025, EAGLE-3, arXiv:2503.01840.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from polydraft.errors import FailureError, UsageError, shown
from polydraft.models.heads.feature_head import FeatureHead, HeadShape, TapNorm
from polydraft.models.heads.head_folder import Target, checked_shape, new_head, shapes_in
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary

_LAYER = "layers.0."
_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Ways to turn channels that do not depend on the length of the text."""
_NOT_READ = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ends of the names of tensors that training leaves behind."""
_ENDLESS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What a config.json says, whichever format it is in."""

    layer: Mapping[str, Any]
    """Sizes of the transformer layer, as transformers names them."""
    form: Mapping[str, Any]
    """Where norms are, and which layers of the target are read."""


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, or of another draft in speculators' format, which is then refused."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or "speculators_model_type" in config or "draft_vocab_size" in config


def check_eagle3(folder: Path, target: Target, name: str) -> None:
    """Refuse an EAGLE-3 head whose files are not whole, of a form that is not understood, or for a target of other sizes."""
    _read(folder, target, name)


def _read(folder: Path, target: Target, name: str) -> tuple[HeadShape, list[Path]]:
    """Return a head's sizes and form, and the files of its weights."""
    try:
        config = _config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        _check_target(config, target, name)
        files = _files(folder, name)
        found = _found(files)
        shape = _shape(config, target, {*found})
    except UsageError:
        raise
    except (OSError, SafetensorError) as error:
        raise _unreadable(name, str(error)) from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"draft {name!r} has no usable config.json ({error}); get another copy") from None
    _check_taps(shape, target, name)
    try:
        _check_tensors(found, _expected(shape, config, target.vocab_size))
    except ValueError as error:
        raise _unreadable(name, str(error)) from None
    return shape, files


def load_eagle3(folder: Path, target: HFModel, tokenizer: Any, name: str) -> FeatureHead:
    """Load an EAGLE-3 head for its target, and let the target show the features it reads.

    Raises
    ------
    UsageError
        If it is for another target, or of a form that is not understood.
    FailureError
        If its files are not whole.
    """
    shape, files = _read(folder, target, name)
    try:
        theirs = _load(files)
        vocabulary = _vocabulary(theirs, target)
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(name, str(error).strip().splitlines()[0]) from None
    head = new_head(shape, target, vocabulary, name)
    head.load_state_dict(renamed(theirs, shape))
    head.tables = _tables(theirs, head, vocabulary)
    target.tap(shape.taps)
    # Of a draft, fewer bits change speed and never the text's distribution: it is read in int8, whatever the target is.
    head.int8 = True
    return head.to(target.device, target.dtype).requires_grad_(False).eval()


def _unreadable(name: str, reason: str) -> FailureError:
    return FailureError(f"cannot read the weights of draft {name!r} ({reason}); get another copy")


def _config(config: Any) -> _Config:
    if not isinstance(config, dict):
        raise ValueError("it is not an object")
    kind = config.get("speculators_model_type")
    if kind is None:
        nested = config.get("eagle_config") or {}
        found = _Config(layer=config, form={**config, **nested})
    elif kind != "eagle3":
        raise ValueError(f"speculators_model_type is {shown(kind)}, which is not known")
    else:
        found = _Config(layer=config["transformer_layer_config"], form=config)
    if not isinstance(found.layer, dict):
        raise ValueError(f"transformer_layer_config is {shown(found.layer)}, not an object")
    layers, model_type = found.layer.get("num_hidden_layers", 1), found.layer.get("model_type", "llama")
    if layers != 1:
        raise ValueError(f"num_hidden_layers is {shown(layers)}; heads of 1 layer can be loaded")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type is {shown(model_type)}; allowed: {', '.join(_MODEL_TYPES)}")
    if (activation := found.layer.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {shown(activation)}; heads with silu can be loaded")
    return found


def _check_target(config: _Config, target: Target, name: str) -> None:
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
    if shape.taps[-1] >= target.num_layers:
        raise UsageError(
            f"head {name!r} reads layers {', '.join(map(str, shape.taps))}, but of target {target.name!r} layers 1 to "
            f"{target.num_layers - 1} can be read; use the head's own target"
        )


def _shape(config: _Config, target: Target, found: set[str]) -> HeadShape:
    """Read sizes and form; biases and norms of heads are where the file has them, or the config asks for them."""
    layer, form = config.layer, config.form
    middle = target.num_layers // 2
    taps = form.get("eagle_aux_hidden_state_layer_ids") or [2, middle, target.num_layers - 3]
    if not isinstance(taps, list) or len({*map(str, taps)}) != len(taps):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids is {shown(taps)}, not a list of different layers")
    each, whole = form.get("fc_norm", False), form.get("norm_before_fc", False)
    biased = bool(layer.get("attention_bias", False))
    queries = layer.get("num_attention_heads")
    size = layer.get("head_dim") or (layer["hidden_size"] // queries if isinstance(queries, int) and queries > 0 else None)
    slides = (layer.get("layer_types") or [None])[0] == "sliding_attention"
    fields = {
        "hidden_size": layer.get("hidden_size"),
        "taps": sorted(taps) if all(isinstance(tap, int) for tap in taps) else taps,  # as the target computes them
        "num_heads": queries,
        "num_key_heads": layer.get("num_key_value_heads") or queries,
        "head_size": size,
        "mlp_size": layer.get("intermediate_size"),
        "window": layer.get("sliding_window") if slides else _ENDLESS,
        "norm_epsilon": layer.get("rms_norm_eps", 1e-6),
        "reads_last": False,
        "tap_norm": TapNorm.EACH if each else TapNorm.ALL if whole else TapNorm.NONE,
        "joins": False,
        "normed_residual": form.get("norm_before_residual", False),
        "normed_output": form.get("norm_output", False),
        "qkv_bias": biased or f"{_LAYER}self_attn.q_proj.bias" in found,
        "output_bias": (biased and layer.get("model_type") != "qwen2") or f"{_LAYER}self_attn.o_proj.bias" in found,
        "mlp_bias": bool(layer.get("mlp_bias", False)) or f"{_LAYER}mlp.gate_proj.bias" in found,
        "query_key_norm": layer.get("model_type") == "qwen3" or f"{_LAYER}self_attn.q_norm.weight" in found,
    }
    shape = checked_shape(fields)
    return checked_shape({**fields, **_rope(layer, shape)})


def _rope(layer: Mapping[str, Any], shape: HeadShape) -> dict[str, Any]:
    """Return how far each pair of channels turns per position, and the factor of what is turned, as transformers has them."""
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
    except Exception:  # there is no common class of what transformers raises here
        raise ValueError(f"rope parameters are {shown(said)}, which does not describe {kind}") from None
    return {"rope_frequencies": rotary.inv_freq.tolist(), "rope_gain": float(rotary.attention_scaling)}


def _files(folder: Path, name: str) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    pickled = sorted(file.name for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}"))
    if not files and pickled:
        raise UsageError(
            f"the weights of draft {name!r} are pickled ({pickled[0]}), which could run any code; get a copy with safetensors, "
            "or write one: save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    if not files:
        raise UsageError(f"draft {name!r} has no weights: {folder} holds no .safetensors file; get another copy")
    return files


def _name(theirs: str) -> str:
    """Return a tensor's name as speculators writes it; the authors' only layer is called midlayer."""
    return theirs.removeprefix("model.").replace("midlayer.", _LAYER)


def _found(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Read which tensors there are, and their shapes; only headers are read."""
    shapes = (item for file in files for item in shapes_in(file).items())
    return {_name(name): shape for name, shape in shapes if not name.endswith(_NOT_READ)}


def _load(files: list[Path]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {_name(name): tensor for file in files for name, tensor in load_file(file).items() if not name.endswith(_NOT_READ)}


def _expected(shape: HeadShape, config: _Config, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a head must have."""
    size, queries, keys = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_key_heads * shape.head_size
    mlp, drafted = shape.mlp_size, config.form.get("draft_vocab_size") or tokens
    products = {
        "self_attn.q_proj": (queries, 2 * size, shape.qkv_bias),
        "self_attn.k_proj": (keys, 2 * size, shape.qkv_bias),
        "self_attn.v_proj": (keys, 2 * size, shape.qkv_bias),
        "self_attn.o_proj": (size, queries, shape.output_bias),
        "mlp.gate_proj": (mlp, size, shape.mlp_bias),
        "mlp.up_proj": (mlp, size, shape.mlp_bias),
        "mlp.down_proj": (size, mlp, shape.mlp_bias),
    }
    expected = {"fc.weight": (size, size * len(shape.taps)), "norm.weight": (size,), "lm_head.weight": (drafted, size)}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        expected[f"{_LAYER}{norm}.weight"] = (size,)
    for part, (rows, columns, biased) in products.items():
        expected[f"{_LAYER}{part}.weight"] = (rows, columns)
        if biased:
            expected[f"{_LAYER}{part}.bias"] = (rows,)
    if shape.query_key_norm:
        expected |= {f"{_LAYER}self_attn.{part}_norm.weight": (shape.head_size,) for part in "qk"}
    if shape.tap_norm == TapNorm.EACH:
        expected |= {f"fc_norm.{tap}.weight": (size,) for tap in range(len(shape.taps))}
    if shape.tap_norm == TapNorm.ALL:
        expected["input_norm.weight"] = (size * len(shape.taps),)
    if drafted != tokens:
        expected["d2t"] = (drafted,)
    return expected | {"embed_tokens.weight": (tokens, size), "t2d": (tokens,)}


def _check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in found:
            if name in ("embed_tokens.weight", "t2d"):  # the target has the one, and d2t says the same as the other
                continue
            raise ValueError(f"{name} is missing")
        if found[name] != shape:
            raise ValueError(f"{name} has the shape {list(found[name])}, where config and target ask for {list(shape)}")
    if others := sorted({*found} - {*expected, "d2t"}):
        raise ValueError(f"{others[0]} is not part of it")


def _vocabulary(theirs: Mapping[str, Tensor], target: HFModel) -> PartialVocabulary | None:
    """Return which tokens are drafted: column i stands for token i + d2t[i]."""
    count = len(theirs["lm_head.weight"])
    if count == target.vocab_size:
        return None
    tokens_D = torch.arange(count) + theirs["d2t"].long()
    if int(tokens_D.min()) < 0 or int(tokens_D.max()) >= target.vocab_size or len({*tokens_D.tolist()}) != count:
        raise ValueError(f"d2t does not name {count} different tokens below {target.vocab_size}")
    if "t2d" in theirs and not torch.equal(theirs["t2d"].bool().nonzero()[:, 0], tokens_D.sort().values):
        raise ValueError("t2d and d2t name different tokens")
    return PartialVocabulary(tokens_D.sort().values.to(target.device), target.vocab_size)


def _tables(theirs: Mapping[str, Tensor], head: FeatureHead, vocabulary: PartialVocabulary | None) -> tuple[Tensor, Tensor]:
    """Return the head's own tables; that of the input is the target's where it is the same."""
    targets_VH, output_DH = head.tables[0], theirs["lm_head.weight"]
    if vocabulary is not None:  # columns ascend by token here
        output_DH = output_DH[(torch.arange(len(output_DH)) + theirs["d2t"].long()).argsort()]
    own_VH = theirs.get("embed_tokens.weight")
    if own_VH is None or torch.equal(own_VH.to(targets_VH), targets_VH):
        own_VH = targets_VH
    return own_VH, output_DH


def renamed(theirs: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
    """Return the weights of a head under our names; of what queries, keys and values read, we have features first."""

    def side_by_side(parts: str, kind: str) -> Tensor:
        return torch.cat([theirs[f"{_LAYER}{part}_proj.{kind}"] for part in parts.split()])

    ours = {
        "fuse.weight": theirs["fc.weight"],
        "feature_norm.weight": theirs[f"{_LAYER}hidden_norm.weight"],
        "token_norm.weight": theirs[f"{_LAYER}input_layernorm.weight"],
        "mlp_norm.weight": theirs[f"{_LAYER}post_attention_layernorm.weight"],
        "output_norm.weight": theirs["norm.weight"],
        "qkv.weight": side_by_side("self_attn.q self_attn.k self_attn.v", "weight").roll(shape.hidden_size, 1),
    }
    products = {"attention_output": "self_attn.o", "gate_up": "mlp.gate mlp.up", "down": "mlp.down"}
    ours |= {f"{name}.weight": side_by_side(parts, "weight") for name, parts in products.items()}
    biased = {"attention_output": shape.output_bias, "gate_up": shape.mlp_bias, "down": shape.mlp_bias}
    ours |= {f"{name}.bias": side_by_side(parts, "bias") for name, parts in products.items() if biased[name]}
    if shape.qkv_bias:
        ours["qkv.bias"] = side_by_side("self_attn.q self_attn.k self_attn.v", "bias")
    if shape.query_key_norm:
        ours |= {f"{long}_norm.weight": theirs[f"{_LAYER}self_attn.{long[0]}_norm.weight"] for long in ("query", "key")}
    if shape.tap_norm == TapNorm.ALL:
        ours["tap_norms.0.weight"] = theirs["input_norm.weight"]
    if shape.tap_norm == TapNorm.EACH:
        ours |= {f"tap_norms.{tap}.weight": theirs[f"fc_norm.{tap}.weight"] for tap in range(len(shape.taps))}
    return ours
