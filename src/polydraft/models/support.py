"""Which Hugging Face models can score trees, and why others cannot."""

from typing import Any

from polydraft.errors import UsageError

FULL, SLIDING = "full_attention", "sliding_attention"

_RECURRENT_WORDS = ("mamba", "rwkv", "recurrent", "jamba", "xlstm", "hyena", "lfm2", "retnet")
_ALIBI = {"bloom", "mpt"}


def text_config(model: Any) -> Any:
    """Return the configuration of a model's language part."""
    return model.config.get_text_config(decoder=True)


def layer_kinds(config: Any) -> list[str]:
    """Return the attention kind of each layer, as `transformers` itself reads a configuration."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None) is not None
    return [SLIDING if sliding else FULL] * config.num_hidden_layers


def context_limit(config: Any) -> int | None:
    """Return how many positions a model has.

    With `longrope` only those before its frequencies change: a pass across the change would turn all of its tokens by the
    new ones, and `transformers` itself reads the whole text anew there.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return limit
    unchanged: int | None = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return unchanged or limit


def refuse_unsupported(model: Any) -> None:
    """Raise a `UsageError` that names the model and the reason, if it cannot score trees."""
    config = text_config(model)
    kind = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(f"model type {kind!r} is an encoder-decoder; polydraft needs a decoder-only causal language model")
    kinds = set(layer_kinds(config))
    recurrent = [name for name in kinds if name not in (FULL, SLIDING, "chunked_attention")]
    if recurrent or getattr(model, "_is_stateful", False) or any(word in kind for word in _RECURRENT_WORDS):
        what = f" ({', '.join(sorted(recurrent))})" if recurrent else ""
        raise UsageError(
            f"model type {kind!r} has recurrent layers{what}, whose state cannot hold a tree; use an attention-only model"
        )
    if "chunked_attention" in kinds:
        raise UsageError(f"model type {kind!r} has chunked attention layers, which are not supported; use another model")
    if kind in _ALIBI or getattr(config, "alibi", False):
        raise UsageError(f"model type {kind!r} uses ALiBi, which ignores position ids and tree masks; use another model")
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UsageError(
            f"attention implementation {implementation!r} takes no tree mask; allowed: sdpa, eager; "
            "load the model with attn_implementation='sdpa'"
        )
