"""Shapes of hybrids with recurrent layers: about 1B parameters each, and tiny ones."""

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # LFM2 1.2B: short convolutions.
    "lfm2": {
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": [*["conv", "full_attention", "conv"] * 5, "conv"],
    },
    # Between Qwen3.5 0.8B and 2B: gated delta rule.
    "qwen3_5_text": {
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"] * 4,
    },
    # Falcon-H1 1.5B: Mamba 2 beside attention in every layer.
    "falcon_h1": {
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "num_hidden_layers": 20,
    },
}
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 4,
}
