"""Tiny models with recurrent layers of every family that the tests cover."""

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polydraft.models.hf import HFModel
from polydraft.models.twin import sharpen

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}

CASES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **_MIXED,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
    },
    "falcon_h1": {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2,
        **_MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "time_step_min": 1e-12,  # the usual least step holds in a row, but not alone
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
    },
    "nemotron_h": {
        "time_step_min": 1e-12,  # the usual least step holds in a row, but not alone
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {"num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
}


@cache
def build(model_type: str, seed: int = 0, **options: Any) -> Any:
    """Make a tiny model with random weights large enough for every layer to show in the logits."""
    config = AutoConfig.for_model(model_type, **{**_SIZES, **CASES[model_type], **options})
    # Whatever the test that asks first is in.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        sharpen(model)
    model.generation_config.eos_token_id = None
    return model


@cache
def wrapped(model: Any) -> HFModel:
    """Wrap a model once for all tests: whether its class is sound is tried each time."""
    with torch.inference_mode(False):
        return HFModel(model)


@cache
def noisy(model: Any) -> Any:
    """Make a draft that agrees in part."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=generator))
    return draft
