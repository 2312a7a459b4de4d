"""Tiny checkpoints of random weights with an MTP layer, as each family names its tensors, and what such a layer computes."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.recurrent_cases import CASES

HIDDEN, TOKENS, LAYERS, WINDOW = 32, 96, 3, 7
_SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
_DEEPSEEK = {"n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_ENDS_WITH_ATTENTION = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "initializer_range": 0.35}
_EXTRA = ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_MIMO_V2 = ("model.mtp.layers.0.", "enorm", "hnorm", "eh_proj", "final_layernorm")
_MIMO = ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


@dataclass(frozen=True, kw_only=True)
class MtpCase:
    """A family, and what its checkpoints call the parts of an MTP layer."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...]
    """Prefix of the decoder layer's tensors; norm of tokens, norm of features, projection, and final norm."""
    features_first: bool = False
    window: int | None = None


MTP_CASES = {
    "deepseek_v3": MtpCase(
        model_type="deepseek_v3", sizes={**_EXPERTS, **_DEEPSEEK, **_LATENT, "num_key_value_heads": 4}, names=_EXTRA
    ),
    "glm4_moe": MtpCase(model_type="glm4_moe", sizes={**_EXPERTS, **_DEEPSEEK, "use_qk_norm": True}, names=_EXTRA),
    "qwen3_next": MtpCase(model_type="qwen3_next", sizes={**CASES["qwen3_next"], **_ENDS_WITH_ATTENTION}, names=_QWEN),
    "qwen3_5": MtpCase(model_type="qwen3_5_text", sizes={**CASES["qwen3_5_text"], **_ENDS_WITH_ATTENTION}, names=_QWEN),
    "qwen3_5_moe": MtpCase(
        model_type="qwen3_5_moe_text", sizes={**CASES["qwen3_5_moe_text"], **_ENDS_WITH_ATTENTION}, names=_QWEN
    ),
    "mimo_v2_flash": MtpCase(
        model_type="mimo_v2_flash",
        sizes={
            **_EXPERTS,
            "v_head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        names=_MIMO_V2,
        window=WINDOW,
    ),
    # MiMo-7B is a Qwen2 with such layers: transformers has no type of its own for it.
    "mimo": MtpCase(model_type="qwen2", names=_MIMO, features_first=True),
}


@dataclass(frozen=True)
class MtpParts:
    """The modules of a layer, as they are before they are written."""

    model: Any
    block: nn.Module
    case: MtpCase
    token_norm: Tensor
    feature_norm: Tensor
    join: Tensor
    final_norm: Tensor

    def outputs(self, features_EH: Tensor, tokens_E: Tensor) -> Tensor:
        """Return what the layer makes of the entries of one text, all of them at once and without a cache."""
        body = self.model.base_model

        def normed(hidden_EH: Tensor, weight_H: Tensor) -> Tensor:
            norm = copy.deepcopy(body.norm)
            norm.weight.data = weight_H
            return norm(hidden_EH)

        pair = [normed(body.embed_tokens(tokens_E), self.token_norm), normed(features_EH, self.feature_norm)]
        joined_1EH = torch.cat(pair[::-1] if self.case.features_first else pair, -1)[None] @ self.join.T
        places_E = torch.arange(len(tokens_E))
        apart_EE = places_E[:, None] - places_E
        seen_EE = (apart_EE >= 0) & (apart_EE < (self.case.window or len(tokens_E)))
        kind = {"layer_type": "sliding_attention"} if self.case.window else {}
        turns = body.rotary_emb(joined_1EH, position_ids=places_E[None], **kind)
        mask_EE = torch.zeros_like(seen_EE, dtype=torch.float32).masked_fill(~seen_EE, torch.finfo(torch.float32).min)
        output_1EH = self.block(
            joined_1EH, attention_mask=mask_EE[None, None], position_ids=places_E[None], position_embeddings=turns
        )
        output_1EH = output_1EH[0] if isinstance(output_1EH, tuple) else output_1EH
        return normed(output_1EH, self.final_norm)[0]

    def chain(self, features_EH: Tensor, tokens_E: Tensor) -> Tensor:
        """Return the logits of each step of a chain: features are known of its beginning, then come the layer's own outputs."""
        logits = []
        with torch.no_grad():
            while len(features_EH) <= len(tokens_E):
                outputs_EH = self.outputs(features_EH, tokens_E[: len(features_EH)])
                logits.append(self.model.lm_head(outputs_EH[-1]))
                features_EH = torch.cat([features_EH, outputs_EH[-1:]])
        return torch.stack(logits)


def build(case: MtpCase, **sizes: Any) -> MtpParts:
    """Make a target of random weights, and a layer whose decoder layer is like the target's last, but not the same."""
    config = AutoConfig.for_model(case.model_type, **{**_SIZES, **case.sizes, **sizes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.eos_token_id = None
        block = copy.deepcopy(model.base_model.layers[LAYERS - 1])
        for weight in block.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        block.self_attn.layer_idx = 0
        size = config.hidden_size
        token_norm, feature_norm, final_norm = torch.rand(3, size)
        return MtpParts(model, block, case, token_norm, feature_norm, 0.3 * torch.randn(size, 2 * size), final_norm)


def write(parts: MtpParts, folder: Path) -> Path:
    """Write target and layer as one checkpoint."""
    model, (prefix, *names) = parts.model, parts.case.names
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    own = model.base_model.layers[LAYERS - 1]
    model.base_model.layers[LAYERS - 1] = parts.block  # so that transformers writes its tensors as checkpoints have them
    model.save_pretrained(folder)
    layer = load_file(folder / "model.safetensors")
    model.base_model.layers[LAYERS - 1] = own
    last = f"model.layers.{LAYERS - 1}."
    weights |= {prefix + name.removeprefix(last): weight for name, weight in layer.items() if name.startswith(last)}
    for name, weight in zip(names, (parts.token_norm, parts.feature_norm, parts.join, parts.final_norm), strict=True):
        weights[f"{name if name.startswith('mtp.') else prefix + name}.weight"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
