"""Tiny random models of the model types that polydraft covers by tests."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polydraft.registry import Registry

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


@dataclass(frozen=True)
class Family:
    """A Hugging Face model type, and the configuration of a tiny model of it for tests."""

    model_type: str
    tiny: dict[str, Any]

    def build(self, seed: int = 0, **overrides: Any) -> Any:
        """Make a tiny random model whose distributions are far from uniform."""
        config = AutoConfig.for_model(self.model_type, **{**self.tiny, **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.eos_token_id = None
        return model


FAMILIES: Registry[Family] = Registry("model family")


def _add(model_type: str, tiny: dict[str, Any], name: str | None = None) -> None:
    FAMILIES.register(name or model_type)(Family(model_type, tiny))


def _common(*names: str) -> dict[str, Any]:
    return {name: _COMMON[name] for name in (*names, "vocab_size", "bos_token_id", "eos_token_id")}


_add("llama", _COMMON)
_add("mistral", {**_COMMON, "sliding_window": None})
_add("mistral", {**_COMMON, "sliding_window": 7}, name="mistral-sliding")
_add("qwen2", _COMMON)
_add("qwen3", {**_COMMON, "head_dim": 8})
_add("gemma", {**_COMMON, "head_dim": 8})
# With tied embeddings and scaled inputs, a random Gemma 2 would repeat the last token whatever its layers do.
_add(
    "gemma2",
    {**_COMMON, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
)
_add("phi", {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"})
_add("phi3", _COMMON)
_add(
    "opt",
    {
        **_common("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "pad_token_id"),
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "init_std": 0.35,
    },
)
_add(
    "gpt2",
    {
        **_common("initializer_range", "pad_token_id"),
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
    },
)
_add("gpt_neox", {**_COMMON, "intermediate_size": 64})
_add(
    "gpt_neo",
    {
        **_common("hidden_size", "intermediate_size", "max_position_embeddings", "initializer_range", "pad_token_id"),
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global"], 1], [["local"], 2]],
        "window_size": 7,
    },
)
