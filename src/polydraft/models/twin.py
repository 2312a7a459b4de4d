"""Twins: small random models of the same class as a given model, to try out what would take too long on the model itself.

How a class treats masks, windows, caches and positions depends on its code and configuration, not on its weights. So a twin
keeps every switch of the configuration and one layer of each kind, and has less of everything else: tokens, layers, channels,
experts, positions. Its windows are a few tokens wide, so that short texts go past all of them.

See docs/decisions/020-unknown-models-are-tried-on-a-twin.md.
"""

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

WINDOW, POSITIONS = 6, 48
"""Width of a twin's windows and chunks, and length of its context, in tokens."""
_VOCABULARY = 96
_MOST_WEIGHTS = 5e7
"""Twins with more weights are not built: filling these takes seconds already."""
_LAYERS = r"(num_hidden_|num_|n_|num_decoder_|decoder_|num_encoder_|encoder_)layers?|depth"
_POSITIONS = r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_target_positions|model_max_length"
WINDOWS = r".*window(_size)?|.*attention_chunk_size|local_attention|attention_window_size|.*chunk_length"
_PERIODS = (
    r"_?(prefix_dense_)?sliding_window_pattern|.*_interval|.*_every_n_layers|.*_sparse_step|interleave_.*_step|.*layer_period"
)
_EXPERTS = r"num_experts|num_local_experts|n_routed_experts|moe_num_experts"
_PER_TOKEN = r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts"
_HEADS = r"(num_attention_|n_|num_|attention_|(num_)?(decoder|encoder)_attention_|swa_num_attention_)heads?"
_KEY_HEADS = r"(num_|swa_num_)?(key_value|kv)_heads|num_query_groups"
_HEAD_SIZES = r"(swa_|attention_)?head_dim|kv_channels|d_kv|attention_head_size"
_WIDTHS = r"hidden_size|n_embd|d_model|dim_model|embedding_size|word_embed_proj_dim|emb_dim|.*_embedding_size"
_INNER = r".*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|dim_ff|dff|feed_forward_size|n_inner|ffn_embed_dim"
_NUMBERS = {
    _POSITIONS: POSITIONS,
    "original_max_position_embeddings": POSITIONS // 2,
    WINDOWS: WINDOW,
    "index_topk|indexer_budget": WINDOW,  # how many tokens sparse layers choose: fewer than a text has
    "indexer_compress_ratio": 2,
    _PERIODS: 2,
    _EXPERTS: 4,
    _PER_TOKEN: 2,
    "mamba_chunk_size": 8,  # texts are padded to whole chunks, whose cost is quadratic without kernels
    "n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers": 1,
    r"(type_)?vocab_size(_per_layer_input)?|n_words|ngram_vocab_size_base": _VOCABULARY,
}
_NARROW = {
    _HEADS: 4,
    _HEAD_SIZES: 16,
    "global_head_dim": 32,  # another size than other layers have, to keep two shapes
    _WIDTHS: 64,
    _INNER: 48,
    "rotary_dim|qk_(rope|nope)_head_dim": 8,
    "linear_(key_|value_)?head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_(value_)?heads": 4,
    ".*_lora_rank|qk_head_dim|v_head_dim": 16,
}


def twins(model: Any) -> Iterator[Any]:
    """Yield the twins that can be built, on the host in float32: a narrow one, then one as wide as the model."""
    for narrow in (True, False):
        try:
            config = twin_config(model.config, narrow)
            config._attn_implementation = model.config._attn_implementation
            if not narrow and _num_weights(type(model), config) > _MOST_WEIGHTS:
                continue
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
                torch.manual_seed(0)
                twin = type(model)(config).float().eval()
                sharpen(twin)
        except Exception:  # an unknown class may fail in any way with an unusual configuration
            continue
        yield twin


def twin_config(config: Any, narrow: bool = True) -> Any:
    """Return a smaller configuration of the same class, which keeps all channels unless `narrow`."""
    values = copy.deepcopy(config.to_dict())
    values.pop("quantization_config", None)
    return type(config).from_dict(_fewer(values, narrow))


def _fewer(values: dict[str, Any], narrow: bool) -> dict[str, Any]:
    """Return the values of a configuration, and of those nested in it, made smaller."""
    old_size = _head_size(values)
    values = {key: _fewer(value, narrow) if _is_nested(value) else value for key, value in values.items()}
    numbers = _NUMBERS | (_NARROW if narrow else {})
    heads = next((value for key, value in values.items() if re.fullmatch(_HEADS, key) and isinstance(value, int)), 0)
    layers = _kept_layers(values)
    for key, value in values.items():
        if key == "num_layers_per_stack":  # HRM derives one number of layers from the other
            values[key] = None
        elif key == "ple_layer_ids":  # numbers of layers, counted from 1
            values[key] = [1] if value else value
        elif key.endswith("_token_id"):
            values[key] = None if value is None else {"pad": 0, "bos": 1}.get(key.removesuffix("_token_id"), 2)
        elif key == "per_layer_config" and isinstance(value, dict):
            parts = {int(layer): part for layer, part in value.items()}
            own = {place: parts[layer] for place, layer in enumerate(layers) if layer in parts}
            values[key] = {place: _fewer(part, narrow) for place, part in own.items()}
            for place, part in own.items():
                if narrow and part.get("head_dim", old_size) != old_size:
                    values[key][place]["head_dim"] = _NARROW["global_head_dim"]
        elif isinstance(value, bool) or not isinstance(value, int | list):
            continue
        elif isinstance(value, list):
            kept = [value[layer] for layer in layers] if layers and len(value) == _num_layers(values) else value
            values[key] = [48] * len(kept) if narrow and re.fullmatch(_INNER, key) else kept
        elif narrow and re.fullmatch(_KEY_HEADS, key):
            values[key] = min(value, 4 if value == heads else 2)
        elif key == "num_kv_shared_layers":
            values[key] = len(layers) // 2 if value else 0
        else:
            # If only part of each head is rotated, "head_dim" is the size of that part.
            name = "qk_rope_head_dim" if key == "head_dim" and "qk_rope_head_dim" in values else key
            most = next((most for pattern, most in numbers.items() if re.fullmatch(pattern, name)), value)
            values[key] = min(value, most)
    for key, value in values.items():
        if layers and re.fullmatch(_LAYERS, key) and isinstance(value, int):
            values[key] = len(layers)
    _scale_sections(values, old_size)
    return values


def _scale_sections(values: dict[str, Any], old_size: int) -> None:
    """Divide the channels of a smaller head among the coordinates of multimodal positions; the first gets the remainder."""
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list) and old_size:
        section, new_size = rope["mrope_section"], _head_size(values)
        scaled = [part * new_size // old_size for part in section]
        rope["mrope_section"] = [scaled[0] + sum(section) * new_size // old_size - sum(scaled), *scaled[1:]]


def _head_size(values: dict[str, Any]) -> int:
    size, width, heads = (values.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    return int(size or (width // heads if width and heads else 0))


def _num_weights(model_class: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and not key.isdigit() for key in value)


def _num_layers(values: dict[str, Any]) -> int:
    return next((value for key, value in values.items() if re.fullmatch(_LAYERS, key) and isinstance(value, int)), 0)


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Return one layer of each kind, as told apart by the lists in the configuration, but at least two layers."""
    count = _num_layers(values)
    lists = [value for key, value in values.items() if isinstance(value, list) and len(value) == count]
    kinds = [str([value[layer] for value in lists]) for layer in range(count)]
    firsts = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    if len(firsts) == 1 and count > 1:
        firsts.append(1)
    # Layers that reuse the keys of others come last, and need one of each kind before them.
    return firsts + [layer for layer in firsts if values.get("num_kv_shared_layers")]


def sharpen(model: Any) -> None:
    """Scale weights so that every layer changes the logits: as initialised, many hardly do."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        embedding = isinstance(module, torch.nn.Embedding)
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1:
                # Tied embeddings much larger than what layers add would make every text repeat its last token.
                scale = 0.15 if embedding else 1.3 / math.sqrt(weight.shape[-1])
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
