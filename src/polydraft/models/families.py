"""Which Hugging Face models can score trees: the families that the test suite covers, and the reasons why others cannot."""

from typing import Any

from polydraft.errors import UsageError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "opt", "gpt2", "gpt_neox", "gpt_neo")
"""Model types that the test suite covers, with tiny models in `tests/families.py`; others are tried on a twin."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
WHOLE_KINDS = {FULL, "indexed_attention", "hybrid"}
"""Kinds of attention that see the whole text. An indexer chooses among the tokens that its mask shows."""
_SLIDING_KINDS = {SLIDING, "hybrid_sliding"}
_RECURRENT_WORDS = ("mamba", "rwkv", "recurrent", "jamba", "xlstm", "hyena", "lfm2", "retnet")
_RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent"}
_HARMLESS_KINDS = {*WHOLE_KINDS, SLIDING, CHUNKED, "mlp", "moe"}  # layers without attention have no cache
_MISFITS = {
    "compressed_sparse_attention": "keep one key per group of tokens, from which no branch can be masked",
    "heavily_compressed_attention": "keep one key per group of tokens, from which no branch can be masked",
    "minimax_m3_sparse": "choose blocks of slots, in which the branches of a tree would stand side by side",
}
"""Kinds of layers that cannot read trees, and why."""
_STEADY_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Kinds of rotary positions that do not depend on the length of the text."""
_FORGETFUL = {"phi4_multimodal"}
"""Model types whose `generate` drops its cache at the original context and continues from one token (transformers 5.22)."""
_NOT_CAUSAL = ("is_causal", False), ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all")
"""Settings of a configuration that let tokens see later ones."""


def text_config(model: Any) -> Any:
    """Return the configuration of a model's language part."""
    return model.config.get_text_config(decoder=True)


def layer_kinds(config: Any) -> list[str]:
    """Return each layer's kind of attention, in the words of `transformers`."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    if (neo := getattr(config, "attention_layers", None)) is not None:  # GPT-Neo has words of its own
        return [{"global": FULL, "local": SLIDING}.get(kind, kind) for kind in neo]
    sliding = getattr(config, "sliding_window", None) is not None
    return [SLIDING if sliding else FULL] * config.num_hidden_layers


def attention_kinds(config: Any) -> list[str]:
    """Return the kinds of attention in a model that need their own mask; at least one."""
    kinds = set(layer_kinds(config))
    return sorted(kinds & (WHOLE_KINDS | _SLIDING_KINDS | {CHUNKED})) or [FULL]


def key_shape(config: Any) -> tuple[int, int]:
    """Return the number of heads of keys and values, and the size of each."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(key_heads), int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def chunk_size(config: Any) -> int | None:
    """Return the tokens per chunk, outside of which tokens do not see each other; None if no layer has chunks."""
    return config.attention_chunk_size if CHUNKED in layer_kinds(config) else None


def window_size(config: Any) -> int | None:
    """Return how many tokens back sliding layers see, the token itself included; None if no layer slides."""
    if not _SLIDING_KINDS & set(layer_kinds(config)):
        return None
    size: int | None = getattr(config, "sliding_window", None)
    return size if size is not None else getattr(config, "window_size", None)


def steady_positions(config: Any) -> bool:
    """Whether positions are computed by the same rule at every length, so that texts may outgrow the context."""
    if config.model_type in _FORGETFUL or _scale_step(config) is not None:
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return all(part.get("rope_type") in _STEADY_ROPE for part in parts)


def _scale_step(config: Any) -> int | None:
    """Return the text length from which Llama 4 and Inkling scale queries by their slot; None for other models."""
    if (floor := getattr(config, "log_scaling_n_floor", None)) is not None:
        return int(floor) + 1
    tuned = getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or [True])
    return int(config.floor_scale) if tuned else None


def context_limit(config: Any) -> int | None:
    """Return how many positions a model has; None for any number.

    With `longrope` only those before its frequencies change: a pass across the change would apply the new frequencies to all of
    its tokens, and `transformers` itself reads the whole text again at that point, or forgets it. Likewise for the scales of
    Llama 4 and Inkling, which in a tree would be those of other positions.
    """
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    limit: int | None = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if (step := _scale_step(config)) is not None:
        return step - 1 if limit is None else min(limit, step - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" and config.model_type not in _FORGETFUL:
        return limit
    unchanged: int | None = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return unchanged or limit


def is_recurrent(model: Any) -> bool:
    """Whether a model may have recurrent layers; only a pass can tell for certain."""
    config = text_config(model)
    return (
        bool(set(layer_kinds(config)) & _RECURRENT_KINDS)
        or bool(getattr(model, "_is_stateful", False))
        or any(word in config.model_type for word in _RECURRENT_WORDS)
    )


def quantised_by(model: Any) -> str | None:
    """Return what a model was quantised by when it was loaded, such as torchao; None if its weights are plain numbers."""
    if getattr(model, "hf_quantizer", None) is not None:  # without one, the weights were dequantised
        return scheme_of(model.config)
    import torch

    # It may also have been quantised in place, which the configuration does not say.
    owners = {type(weight).__module__.split(".")[0] for weight in model.parameters() if type(weight) is not torch.nn.Parameter}
    return min(owners - {"torch"}, default=None)


def scheme_of(config: Any) -> str | None:
    """Return the name of the quantisation scheme in a configuration; None without one."""
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    return None if own is None else str(getattr(method, "value", method) or "a scheme without a name")


def refuse_unsupported(model: Any) -> None:
    """Refuse a model type that cannot score trees, with the reason."""
    config = text_config(model)
    kind = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(f"model type {kind!r} is an encoder-decoder; polydraft needs a decoder-only causal language model")
    # MusicGen has several heads. Quantised heads may have sizes but no weight, or one that takes long to compute. For early
    # refusals there is only a configuration, which has no head.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model
    if head is not model and not hasattr(head, "out_features") and not hasattr(head, "weight"):
        raise UsageError(
            f"model type {kind!r} has no single output head over its tokens; polydraft needs a causal language model"
        )
    for name, value in _NOT_CAUSAL:
        if getattr(config, name, None) is value or (isinstance(value, str) and getattr(config, name, None) == value):
            raise UsageError(
                f"model type {kind!r} with {name}={value!r} is not causal: tokens see later ones; load a causal language model"
            )
    if not hasattr(config, "layer_types") and not hasattr(config, "num_hidden_layers"):
        raise UsageError(f"the configuration of model type {kind!r} has no number of layers; use another model")
    others = sorted(set(layer_kinds(config)) - _RECURRENT_KINDS - _HARMLESS_KINDS)
    if others:
        reason = _MISFITS.get(others[0], "take no tree masks")
        raise UsageError(
            f"model type {kind!r} has layers of kinds that {reason} ({', '.join(others)}); use a model with full, sliding or "
            "chunked attention"
        )
    if window_size(config) == 1:
        raise UsageError(
            f"model type {kind!r} has a window of 1 token, for which transformers gives different logits with and without a "
            "cache; use a wider window"
        )
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UsageError(
            f"attention implementation {implementation!r} does not take tree masks; allowed: sdpa, eager; "
            "load the model with attn_implementation='sdpa'"
        )
