"""Random EAGLE-3 heads in the formats of others, and chains through them.

Run as ``python eagle3_cases.py``, where speculators 0.9.0 is installed, this writes the logits that it computes to EXPECTED.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from families import FAMILIES
from polydraft.models import FeatureHead
from polydraft.trees import causal_block

HIDDEN, MLP, QUERIES, KEYS, CHANNELS, TOKENS, DRAFTED = 32, 48, 4, 2, 8, 64, 40
STEPS, ENTRIES = 4, 9
EXPECTED = Path(__file__).parent / "eagle3_logits.safetensors"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "whole vocabulary": {"draft_vocab_size": None},
    "normed residual": {"norm_before_residual": True},
    "normed output": {"norm_output": True},
    "norm per tap": {"fc_norm": True, "norm_output": True},
    "norm of all taps": {"norm_before_fc": True},
    "two taps": {"eagle_aux_hidden_state_layer_ids": [1, 3]},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen3": {"model_type": "qwen3", "norm_output": True},
    "qwen3, wide heads": {"model_type": "qwen3", "head_dim": 16},
    "window": {"model_type": "qwen3", "sliding_window": 4, "layer_types": ["sliding_attention"], "use_sliding_window": True},
}
"""What differs from the plainest head; of the layer, or of the form around it."""
TAPS = "eagle_aux_hidden_state_layer_ids"
FORM = ("draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", TAPS)


def config_of(verifier: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return a config in speculators' format, of a head for a target of four layers."""
    layer = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": QUERIES,
        "num_key_value_heads": KEYS, "head_dim": CHANNELS, "num_hidden_layers": 1, "vocab_size": TOKENS, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    form = {"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    form |= {name: value for name, value in changes.items() if name in FORM}
    form["draft_vocab_size"] = form["draft_vocab_size"] or TOKENS
    layer |= {name: value for name, value in changes.items() if name not in FORM}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        **form,
    }


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Draw the weights that such a config asks for."""
    generator = torch.Generator().manual_seed(seed)
    layer, drafted, taps = config["transformer_layer_config"], config["draft_vocab_size"], config[TAPS]
    queries, keys = (layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    tokens = layer["vocab_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    def vector(size: int, around: float = 1.0) -> Tensor:
        return around + 0.2 * torch.randn(size, generator=generator)

    products = {f"self_attn.{part}": (queries if part == "q" else keys, 2 * HIDDEN) for part in "qkv"}
    products |= {
        "self_attn.o": (HIDDEN, queries),
        "mlp.gate": (MLP, HIDDEN),
        "mlp.up": (MLP, HIDDEN),
        "mlp.down": (HIDDEN, MLP),
    }
    weights = {"fc.weight": matrix(HIDDEN, HIDDEN * len(taps)), "norm.weight": vector(HIDDEN)}
    weights["lm_head.weight"], weights["embed_tokens.weight"] = matrix(drafted, HIDDEN), matrix(tokens, HIDDEN)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"layers.0.{norm}.weight"] = vector(HIDDEN)
    for part, sizes in products.items():
        weights[f"layers.0.{part}_proj.weight"] = matrix(*sizes)
        if layer.get("attention_bias" if "attn" in part else "mlp_bias"):
            weights[f"layers.0.{part}_proj.bias"] = vector(sizes[0], 0.0)
    if layer["model_type"] == "qwen3":
        weights |= {f"layers.0.self_attn.{part}_norm.weight": vector(layer["head_dim"]) for part in "qk"}
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{tap}.weight": vector(HIDDEN) for tap in range(len(taps))}
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = vector(HIDDEN * len(taps))
    if drafted != tokens:
        known = torch.randperm(tokens, generator=generator)[:drafted].sort().values
        weights["d2t"] = known - torch.arange(drafted)
        weights["t2d"] = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, known, True)
    return weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], authors: bool = False) -> Path:
    """Write a head in speculators' format, or in that of the authors."""
    folder.mkdir(exist_ok=True)
    if authors:
        taps = config[TAPS]
        rope = config["transformer_layer_config"]["rope_parameters"]
        form = {name: value for name, value in config.items() if name in FORM and name != TAPS}
        layer = {**config["transformer_layer_config"], "rope_theta": rope["rope_theta"]}
        del layer["rope_parameters"]
        if rope["rope_type"] != "default":
            layer["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **form}
        config["eagle_config"] = {TAPS: taps}
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def features_and_tokens(reads: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Draw what a head reads of a text: the outputs of layers `[1, E, F]`, and the tokens that follow them."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, ENTRIES + STEPS, HIDDEN * reads, generator=generator)
    return features, torch.randint(TOKENS, (1, ENTRIES + STEPS), generator=generator)


def chain(head: FeatureHead, features_1EF: Tensor, tokens_1E: Tensor) -> Tensor:
    """Return the logits of each step of a chain below the last of the entries `[STEPS, D]`; tokens beyond them are its own."""
    context = head.start(1, ENTRIES + STEPS)
    device, logits = head.device, []
    fused = head.fused(features_1EF[:, :ENTRIES])
    outputs = context.read(tokens_1E[:, :ENTRIES], fused, causal_block(1, ENTRIES, device))[:, -1:]
    logits.append(head.head(outputs)[0, 0])
    context.rewind([ENTRIES])
    for step in range(STEPS - 1):
        token_11 = tokens_1E[:, ENTRIES + step : ENTRIES + step + 1]
        outputs = context.read(token_11, outputs, causal_block(1, 1, device))
        context.rewind([ENTRIES + step + 1])
        logits.append(head.head(outputs)[0, 0])
    return torch.stack(logits)


def reference_chain(folder: Path, features_1EF: Tensor, tokens_1E: Tensor) -> Tensor:
    """Return the same logits as speculators computes them, which unrolls all entries at once."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _layer, _inputs, output: logits.append(output[0]))
    with torch.no_grad():
        documents = torch.zeros(features_1EF.shape[:2], dtype=torch.long)
        model(features_1EF, tokens_1E, documents, ttt_steps=STEPS)
    return torch.stack([step[ENTRIES - 1] for step in logits])


def target_model() -> PreTrainedModel:
    return FAMILIES.get("llama").build(seed=0, vocab_size=TOKENS, num_hidden_layers=4)


def all_reference_chains() -> dict[str, Tensor]:
    """Return what speculators computes in every case."""
    found = {}
    with TemporaryDirectory() as folder:
        target_model().save_pretrained(f"{folder}/target")
        for case, changes in CASES.items():
            config = config_of(f"{folder}/target", **changes)
            features, tokens = features_and_tokens(len(config[TAPS]))
            found[case] = reference_chain(write(Path(folder) / "head", config, weights_of(config)), features, tokens)
    return found


if __name__ == "__main__":
    save_file(all_reference_chains(), EXPECTED)
