"""Random P-EAGLE and DFlash heads, the logits of all their levels, and what these should be.

Run as ``python parallel_cases.py``, where speculators 0.9.0 is installed, this writes the logits that it computes to EXPECTED.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from models.eagle3_cases import CHANNELS, DRAFTED, HIDDEN, KEYS, LLAMA3, MLP, QUERIES, TOKENS, target_model
from polydraft.models.heads.parallel_head import ParallelHead

EXPECTED = Path(__file__).parent / "parallel_logits.safetensors"
LENGTHS, FRESH = (11, 6), (3, 2)
"""Tokens before the last one of two texts, and how many of them are read together with the places for tokens to come."""
ENTRIES, LEVELS, MASK = 18, 4, 7
SLIDING = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
PEAGLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "one layer": {"num_hidden_layers": 1},
    "whole vocabulary": {"draft_vocab_size": TOKENS},
    "normed residual": {"norm_before_residual": True},
    "norm per tap": {"fc_norm": True},
    "norm of all taps": {"norm_before_fc": True, "norm_output": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "qwen3, windows": {"model_type": "qwen3", **SLIDING},
}
DFLASH: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "one layer": {"num_hidden_layers": 1},
    "whole vocabulary": {"draft_vocab_size": TOKENS},
    "two taps": {"taps": [1, 3]},
    "biases": {"attention_bias": True, "rope_parameters": LLAMA3},
    "from the anchor": {"sample_from_anchor": True},
    "windows": SLIDING,
    "windows without order": {**SLIDING, "sliding_window_non_causal": True},
}
CASES = {f"peagle, {name}": ("peagle", case) for name, case in PEAGLE.items()}
CASES |= {f"dflash, {name}": ("dflash", case) for name, case in DFLASH.items()}
FORM = (
    "draft_vocab_size", "norm_before_residual", "fc_norm", "norm_before_fc", "norm_output", "sample_from_anchor",
    "sliding_window_non_causal",
)  # fmt: skip


def config_of(kind: str, verifier: str = "target", **changes: Any) -> dict[str, Any]:
    """Return a config in the format of speculators."""
    layer = {
        "model_type": "llama" if kind == "peagle" else "qwen3", "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_attention_heads": QUERIES, "num_key_value_heads": KEYS, "head_dim": CHANNELS, "num_hidden_layers": 2,
        "vocab_size": TOKENS, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
        "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    taps = changes.pop("taps", [1, 2, 3])
    form = {"draft_vocab_size": DRAFTED, "mask_token_id": MASK}
    form |= {name: changes[name] for name in FORM if name in changes}
    if kind == "dflash":
        form |= {"aux_hidden_state_layer_ids": taps, "block_size": LEVELS + (not form.get("sample_from_anchor"))}
    else:
        form["eagle_aux_hidden_state_layer_ids"] = taps
    layer |= {name: value for name, value in changes.items() if name not in FORM}
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": LEVELS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        **form,
    }


def taps_of(config: dict[str, Any]) -> list[int]:
    """Return the layers of the target that a head reads."""
    taps: list[int] = config.get("aux_hidden_state_layer_ids") or config["eagle_aux_hidden_state_layer_ids"]
    return taps


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Draw the weights that such a config asks for; a DFlash head's tables of all tokens are the target's."""
    generator = torch.Generator().manual_seed(seed)
    layer, drafted, taps = config["transformer_layer_config"], config["draft_vocab_size"], taps_of(config)
    eagle, layers = config["speculators_model_type"] == "peagle", layer["num_hidden_layers"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    def vector(size: int, around: float = 1.0) -> Tensor:
        return around + 0.2 * torch.randn(size, generator=generator)

    weights = {"fc.weight": matrix(HIDDEN, HIDDEN * len(taps)), "norm.weight": vector(HIDDEN)}
    weights |= {"lm_head.weight": matrix(drafted, HIDDEN), "embed_tokens.weight": matrix(TOKENS, HIDDEN)}
    if not eagle:
        target = target_model()
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        if drafted == TOKENS:
            weights["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    for number in range(layers):
        reads = 2 * HIDDEN if eagle and not number else HIDDEN
        products = {f"self_attn.{part}": ((QUERIES if part == "q" else KEYS) * CHANNELS, reads) for part in "qkv"}
        products |= {"self_attn.o": (HIDDEN, QUERIES * CHANNELS)}
        products |= {"mlp.gate": (MLP, HIDDEN), "mlp.up": (MLP, HIDDEN), "mlp.down": (HIDDEN, MLP)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{number}.{norm}.weight"] = vector(HIDDEN)
        for part, sizes in products.items():
            weights[f"layers.{number}.{part}_proj.weight"] = matrix(*sizes)
            if layer.get("attention_bias" if "attn" in part else "mlp_bias"):
                weights[f"layers.{number}.{part}_proj.bias"] = vector(sizes[0], 0.0)
        if layer["model_type"] == "qwen3":
            weights |= {f"layers.{number}.self_attn.{part}_norm.weight": vector(CHANNELS) for part in "qk"}
    weights["layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight"] = vector(HIDDEN)
    if eagle:
        weights["mask_hidden"] = torch.randn(1, 1, HIDDEN * len(taps), generator=generator)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{tap}.weight": vector(HIDDEN) for tap in range(len(taps))}
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = vector(HIDDEN * len(taps))
    if drafted != TOKENS:
        known = torch.randperm(TOKENS, generator=generator)[:drafted].sort().values
        weights["d2t"] = known - torch.arange(drafted)
        weights["t2d"] = torch.zeros(TOKENS, dtype=torch.bool).index_fill_(0, known, True)
    return weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write a head."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def as_authors(config: dict[str, Any]) -> dict[str, Any]:
    """Return a DFlash config in the authors' own format, which counts layers from 0."""
    own = {"mask_token_id": config["mask_token_id"], "target_layer_ids": [tap - 1 for tap in taps_of(config)]}
    layer = {"architectures": ["DFlashDraftModel"], **config["transformer_layer_config"]}
    return {**layer, "block_size": config["block_size"], "dflash_config": own}


def features_and_tokens(reads: int) -> tuple[Tensor, Tensor]:
    """Draw what a head reads of a text: the outputs of layers `[1, E, F]`, and the tokens that follow them."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, ENTRIES, HIDDEN * reads, generator=generator)
    return features, torch.randint(TOKENS, (1, ENTRIES), generator=generator)


def levels_of(head: ParallelHead, features_1EF: Tensor, tokens_1E: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return the logits of all levels `[B, LEVELS, D]`, below the texts of some of LENGTHS, side by side."""
    context, fused_1EH = head.start(len(rows), ENTRIES + 2 * LEVELS), head.fused(features_1EF)
    kept = [LENGTHS[row] - FRESH[row] for row in rows]
    context.store(tokens_1E[:, : max(kept)].expand(len(rows), -1), fused_1EH[:, : max(kept)].expand(len(rows), -1, -1))
    context.rewind(kept)
    width = max(FRESH)  # whatever follows a row's own entries must not count
    tokens_BW = torch.cat([tokens_1E[:, start : start + width] for start in kept])
    fused_BWH = torch.cat([fused_1EH[:, start : start + width] for start in kept])
    return head.head(context.draft(tokens_BW, fused_BWH, torch.tensor([FRESH[row] for row in rows])))


def plain_levels(config: dict[str, Any], weights: dict[str, Tensor], features_EF: Tensor, text: list[int]) -> Tensor:
    """Return the logits of all levels below a text by a few lines; features are those of all tokens but the last."""
    layers, eagle = config["transformer_layer_config"]["num_hidden_layers"], "mask_hidden" in weights
    embedding, known, masks = weights["embed_tokens.weight"], len(text) - 1, [MASK] * (LEVELS - eagle)

    def norm(hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weights[f"{name}.weight"], 1e-6)

    def turned(heads_HTC: Tensor, first: int) -> Tensor:
        angles = torch.arange(first, first + heads_HTC.shape[1])[:, None] * 1e4 ** (-torch.arange(0, CHANNELS, 2) / CHANNELS)
        numbers = torch.complex(*heads_HTC.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([numbers.real, numbers.imag], -1)

    if eagle:
        fused = torch.cat([features_EF, weights["mask_hidden"][0].expand(len(masks), -1)]) @ weights["fc.weight"].T
        hidden = fused
        embedded = norm(embedding[[*text[1:], *masks]], "layers.0.input_layernorm")
        read = torch.cat([embedded, norm(fused, "layers.0.hidden_norm")], -1)
        visible = torch.ones(len(fused), len(fused), dtype=torch.bool).tril()
    else:
        context = norm(features_EF @ weights["fc.weight"].T, "hidden_norm")
        hidden = embedding[[text[-1], *masks]]
        read, visible = norm(hidden, "layers.0.input_layernorm"), torch.ones(len(hidden), known + len(hidden), dtype=torch.bool)
    for number in range(layers):
        name = f"layers.{number}."
        if number:
            read = norm(hidden, f"{name}input_layernorm")

        def heads(part: str, inputs: Tensor, name: str = name) -> Tensor:
            split = (inputs @ weights[f"{name}self_attn.{part}_proj.weight"].T).view(len(inputs), -1, CHANNELS).transpose(0, 1)
            return norm(split, f"{name}self_attn.{part}_norm") if not eagle and part != "v" else split

        both = torch.cat([context, read]) if not eagle else read
        query, key = turned(heads("q", read), 0 if eagle else known), turned(heads("k", both), 0)
        mixed = functional.scaled_dot_product_attention(query, key, heads("v", both), attn_mask=visible, enable_gqa=True)
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ weights[f"{name}self_attn.o_proj.weight"].T
        gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        inner = norm(hidden, f"{name}post_attention_layernorm")
        hidden = hidden + (functional.silu(inner @ gate) * (inner @ up)) @ down
    return norm(hidden[-LEVELS:], "norm") @ weights["lm_head.weight"].T


def reference_levels(folder: Path, features_1EF: Tensor, tokens_1E: Tensor, length: int) -> Tensor:
    """Return the logits of all levels `[LEVELS, D]` below one text as speculators computes them."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.dflash import core as dflash
    from speculators.models.peagle import core as peagle

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _layer, _inputs, output: logits.append(output[0]))
    eagle = config.speculators_model_type == "peagle"
    # Training draws the places at which it looks: here it looks at one, and its loss is of no interest.
    last = length - 1
    starts = torch.cat([torch.arange(ENTRIES), torch.full((LEVELS - 1,), last)])
    chosen = starts, torch.arange(-ENTRIES + 1, LEVELS).clamp(min=0)
    peagle.generate_cod_sample_indices = lambda **_: chosen
    peagle.compute_metrics = dflash.compute_metrics = lambda *_, **__: (None, {})
    # P-EAGLE has each token beside the features before it, DFlash beside those of its own place.
    inputs = tokens_1E if eagle else functional.pad(tokens_1E, (1, 0))[:, :ENTRIES]
    mask = torch.zeros(1, ENTRIES).index_fill_(1, torch.tensor([last if eagle else length]), 1.0)
    documents, states = torch.zeros(1, ENTRIES, dtype=torch.long), torch.zeros(1, ENTRIES, HIDDEN)
    named = {"document_ids": documents, "loss_mask": mask, "verifier_last_hidden_states": states}
    with torch.no_grad():
        model(hidden_states=features_1EF, input_ids=inputs, max_anchors=1, **named)
    return torch.cat([logits[0][last : last + 1], logits[0][ENTRIES:]]) if eagle else logits[0][-LEVELS:]


def all_reference_levels() -> dict[str, Tensor]:
    """Return the logits of all cases and texts as speculators computes them, `[texts, LEVELS, D]`."""
    found = {}
    with TemporaryDirectory() as folder:
        target_model().save_pretrained(f"{folder}/target")
        for name, (kind, changes) in CASES.items():
            config = config_of(kind, f"{folder}/target", **changes)
            features, tokens = features_and_tokens(len(taps_of(config)))
            written = write(Path(folder) / "head", config, weights_of(config))
            found[name] = torch.stack([reference_levels(written, features, tokens, length) for length in LENGTHS])
    return found


if __name__ == "__main__":
    save_file(all_reference_levels(), EXPECTED)
