"""Model families that the test suite proves to work, each with a configuration small enough to build in tests."""

from dataclasses import dataclass
from typing import Any

from polydraft.registry import Registry


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type and the options that make a tiny model of it."""

    model_type: str
    tiny: dict[str, Any]

    def build(self, seed: int = 0, **overrides: Any) -> Any:
        """Make a tiny randomly initialised model, sharp enough that its laws differ from uniform."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(self.model_type, **{**self.tiny, **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.eos_token_id = None
        return model


FAMILIES: Registry[Family] = Registry("model family")

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _add(model_type: str, tiny: dict[str, Any], name: str | None = None) -> None:
    FAMILIES.register(name or model_type)(Family(model_type, tiny))


_add("llama", _COMMON)
_add("mistral", {**_COMMON, "sliding_window": None})
_add("mistral", {**_COMMON, "sliding_window": 7}, name="mistral-sliding")
_add("qwen2", _COMMON)
_add("qwen3", {**_COMMON, "head_dim": 8})
_add("gemma", {**_COMMON, "head_dim": 8})
# With tied embeddings and its scaled input a random Gemma 2 says the last token again, whatever the layers do.
_add(
    "gemma2",
    {**_COMMON, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
)
_add("phi", {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"})
_add("phi3", _COMMON)
_add(
    "opt",
    {
        **{key: _COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        **{key: _COMMON[key] for key in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "init_std": 0.35,
    },
)
_add(
    "gpt2",
    {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.35,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
_add("gpt_neox", {**_COMMON, "intermediate_size": 64})
_add(
    "gpt_neo",
    {
        **{key: _COMMON[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
        **{key: _COMMON[key] for key in ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")},
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global"], 1], [["local"], 2]],
        "window_size": 7,
    },
)
