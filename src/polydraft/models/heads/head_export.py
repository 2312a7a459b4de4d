"""Export for other engines: one of our feature heads as an EAGLE-3 head in the format of vLLM's speculators.

Our heads join features and token to one vector before attention; an EAGLE-3 layer reads them separately. But a speculators head
may have several layers, and the first one can do the joining. All its queries and keys are the same constant, so that after
rotation each entry's own key scores highest, by so much that all others get a weight of 0. Its values are the joined vector
less the features in the residual stream, and its MLP adds nothing. The second layer is ours, unchanged.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.heads.feature_head import FeatureHead, TapNorm
from polydraft.models.hf import HFModel

_MARGIN = 110.0
"""How far an entry's own score is above all others in the layer that joins: exp(-110) is 0 in float32."""
_FARTHEST = 2**17
"""Distance in tokens up to which that margin is guaranteed."""
LAST_STATES = (
    "the head reads the target's last hidden states after the final norm, as the last of its inputs; the format can only call "
    "them layer {layer}, which engines provide before that norm: provide them normed, or drafts are worse there (texts stay "
    "exact)"
)


def export_speculators(head: FeatureHead, target: HFModel, verifier: str, folder: Path) -> list[str]:
    """Write a head into an existing folder, so that speculators computes the same logits from the same inputs.

    Parameters
    ----------
    verifier : str
        Name or folder of the target for other engines.

    Returns
    -------
    list of str
        What the format cannot express, for the user.

    Raises
    ------
    UsageError
        If the head cannot be expressed in the format.
    """
    shape = head.shape
    if obstacle := export_obstacle(head):
        raise UsageError(f"head {head.name!r} cannot be written for speculators: {obstacle}")
    tensors = {**_around(head, target.vocab_size), **(_joining(head) if shape.joins else {}), **_layer(head)}
    save_file(
        {name: _smallest(tensor.detach().cpu()) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(_config(head, target, verifier), indent=1) + "\n")
    return [LAST_STATES.format(layer=target.num_layers)] if shape.reads_last else []


def export_obstacle(head: FeatureHead) -> str | None:
    """Return why a head cannot be expressed in the format and what to do instead; None if it can."""
    shape = head.shape
    if head.depths is not None:
        return "it drafts several levels in one pass, and only heads that read their candidates can be written"
    if not shape.normed:
        return "it norms neither features nor tokens (EAGLE), and the format always does; train one with polydraft train head"
    if shape.rope_frequencies or shape.rope_gain != 1:
        return "its rotary frequencies do not follow from one base; convert the folder it came from with speculators itself"
    if shape.joins and shape.query_key_norm:
        return "it joins features and token, and norms queries and keys; train one without that norm"
    if shape.joins and shape.num_heads * shape.head_size < shape.hidden_size:
        width = shape.num_heads * shape.head_size
        return f"its attention is {width} channels wide, less than its hidden size {shape.hidden_size}; train a wider one"
    return None


def _smallest(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, which may be part of another one, in bfloat16 if that changes nothing."""
    short = tensor.to(torch.bfloat16)
    exact = tensor.is_floating_point() and torch.equal(short.to(tensor.dtype), tensor)
    return (short if exact else tensor).clone(memory_format=torch.contiguous_format)


def _around(head: FeatureHead, tokens: int) -> dict[str, Tensor]:
    """Return the tensors below and above the layers."""
    shape, size = head.shape, head.shape.hidden_size
    # Our features begin with the last hidden states; in the order of layers they come last.
    back = -size if shape.reads_last else 0
    fuse_HF = torch.eye(size) if head.fuse is None else head.fuse.weight
    tensors = {
        "fc.weight": fuse_HF.roll(back, 1) if head.fuse is not None else fuse_HF,
        "norm.weight": head.output_norm.weight,
        "embed_tokens.weight": head.tables[0],
        "lm_head.weight": head.tables[1],
    }
    norms = list(head.tap_norms.state_dict().values())
    if shape.tap_norm == TapNorm.ALL:
        tensors["input_norm.weight"] = norms[0].roll(back)
    else:
        norms = norms[1:] + norms[:1] if shape.reads_last else norms
        tensors |= {f"fc_norm.{place}.weight": weight for place, weight in enumerate(norms)}
    if head.vocabulary is not None:
        known_D = head.vocabulary.tokens_D.cpu()
        tensors["d2t"] = known_D - torch.arange(len(known_D))
        tensors["t2d"] = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, known_D, True)
    return tensors


def _joining(head: FeatureHead) -> dict[str, Tensor]:
    """Return the tensors of the layer that joins features and token."""
    shape, size = head.shape, head.shape.hidden_size
    assert head.join is not None
    width = shape.num_heads * shape.head_size
    features_HH, token_HH = head.join.weight.detach().float().cpu().chunk(2, dim=1)
    value_XF = torch.zeros(width, 2 * size)
    value_XF[:size] = torch.cat([token_HH, features_HH - torch.eye(size)], dim=1)
    constant = torch.full((width,), _constant(head))
    attention = {
        "q_proj.weight": torch.zeros(width, 2 * size),
        "q_proj.bias": constant,
        "k_proj.weight": torch.zeros(width, 2 * size),
        "k_proj.bias": constant,
        "v_proj.weight": value_XF,
        "v_proj.bias": torch.zeros(width),
        "o_proj.weight": torch.eye(size, width),
        "o_proj.bias": torch.zeros(size),
    }
    tensors = {f"self_attn.{name}": tensor for name, tensor in attention.items()}
    for kind, tensor in head.gate_up.state_dict().items():
        tensors |= {f"mlp.{part}_proj.{kind}": torch.zeros_like(tensor.chunk(2)[0]) for part in ("gate", "up")}
    tensors |= {f"mlp.down_proj.{kind}": torch.zeros_like(tensor) for kind, tensor in head.down.state_dict().items()}
    tensors |= {
        "input_layernorm.weight": head.token_norm.weight,
        "hidden_norm.weight": head.feature_norm.weight,
        "post_attention_layernorm.weight": torch.ones(size),
    }
    return {f"layers.0.{name}": tensor for name, tensor in tensors.items()}


def _constant(head: FeatureHead) -> float:
    """Return the constant that, in all channels of queries and keys, makes every entry attend only to itself."""
    cosines_PC = head.angles(torch.arange(1, _FARTHEST + 1), torch.float32)[:, 0]
    loss = float((1 - cosines_PC).sum(1).min()) * 2 * head.shape.head_size**-0.5
    return float((_MARGIN / loss) ** 0.5)


def _biased(head: FeatureHead) -> bool:
    """Whether attention has biases in the exported head."""
    return head.shape.joins or head.shape.qkv_bias or head.shape.output_bias


def _layer(head: FeatureHead) -> dict[str, Tensor]:
    """Return the tensors of our own layer: the only one, or the second, with a key head per query head."""
    shape, size = head.shape, head.shape.hidden_size
    groups = shape.num_heads // shape.num_key_heads if shape.joins else 1
    counts = [shape.num_heads * shape.head_size, *[shape.num_key_heads * shape.head_size] * 2]
    tensors = {f"self_attn.o_proj.{kind}": tensor for kind, tensor in head.attention_output.state_dict().items()}
    for kind, whole in head.qkv.state_dict().items():
        # The format reads the token first, then features.
        ordered = whole.roll(size, 1) if kind == "weight" and not shape.joins else whole
        for part, rows in zip("qkv", torch.tensor_split(ordered, torch.tensor(counts[:2]).cumsum(0)), strict=True):
            heads = rows.view(-1, shape.head_size, *rows.shape[1:])
            heads = heads if part == "q" else heads.repeat_interleave(groups, 0)
            tensors[f"self_attn.{part}_proj.{kind}"] = heads.flatten(0, 1)
    if _biased(head):  # the format has all of them or none
        for part in "qkvo":
            rows = tensors[f"self_attn.{part}_proj.weight"]
            tensors.setdefault(f"self_attn.{part}_proj.bias", torch.zeros(len(rows)))
    for kind, tensor in head.gate_up.state_dict().items():
        tensors[f"mlp.gate_proj.{kind}"], tensors[f"mlp.up_proj.{kind}"] = tensor.chunk(2)
    tensors |= {f"mlp.down_proj.{kind}": tensor for kind, tensor in head.down.state_dict().items()}
    tensors["post_attention_layernorm.weight"] = head.mlp_norm.weight
    if head.attention_norm is not None:
        tensors["input_layernorm.weight"] = head.attention_norm.weight
    else:
        tensors["input_layernorm.weight"], tensors["hidden_norm.weight"] = head.token_norm.weight, head.feature_norm.weight
    if head.query_norm is not None and head.key_norm is not None:
        tensors["self_attn.q_norm.weight"], tensors["self_attn.k_norm.weight"] = head.query_norm.weight, head.key_norm.weight
    return {f"layers.{int(shape.joins)}.{name}": tensor for name, tensor in tensors.items()}


def _config(head: FeatureHead, target: HFModel, verifier: str) -> dict[str, Any]:
    shape, theirs = head.shape, target.config
    positions = getattr(theirs, "max_position_embeddings", None) or 4096
    slides = shape.window < positions
    layer: dict[str, Any] = {
        "model_type": "qwen3" if shape.query_key_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": 1 + shape.joins,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads if shape.joins else shape.num_key_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": shape.norm_epsilon,
        "attention_bias": _biased(head),
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }
    if slides:
        kinds = ["full_attention"] * shape.joins + ["sliding_attention"]
        layer |= {"layer_types": kinds, "sliding_window": shape.window, "use_sliding_window": True}
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": list(getattr(theirs, "architectures", None) or [])},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.num_columns,
        "eagle_aux_hidden_state_layer_ids": [*shape.taps, *([target.num_layers] if shape.reads_last else [])],
        "norm_before_residual": shape.joins or shape.normed_residual,
        "norm_before_fc": shape.tap_norm == TapNorm.ALL,
        "fc_norm": shape.tap_norm == TapNorm.EACH,
        "norm_output": shape.normed_output,
        "embed_requires_grad": False,
        "target_hidden_size": None,
    }
