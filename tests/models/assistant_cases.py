"""Tiny Gemma 4 targets of random weights and assistants for them, and what transformers makes of such a pair."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, WINDOW = 96, 5
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class AssistantCase:
    """Sizes of a target and of its assistant."""

    unified: bool = False
    target: dict[str, Any] = field(default_factory=dict)
    assistant: dict[str, Any] = field(default_factory=dict)
    """Of its layers."""
    form: dict[str, Any] = field(default_factory=dict)
    """Of what is around them."""


_PER_LAYER = {"vocab_size_per_layer_input": TOKENS, "hidden_size_per_layer_input": 4}
CASES = {
    "E2B": AssistantCase(
        target={**_PER_LAYER, "num_kv_shared_layers": 2},
        form={"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3},
    ),
    "31B": AssistantCase(),
    "one shape": AssistantCase(target={"global_head_dim": 8}, assistant={"global_head_dim": 8}),
    "12B": AssistantCase(unified=True),
}


@cache
def build(name: str, vocab_size: int = TOKENS) -> tuple[Any, Any]:
    """Make a target and its assistant."""
    case = CASES[name]
    kind = "gemma4_unified" if case.unified else "gemma4"
    sizes = {**_SIZES, "vocab_size": vocab_size}
    kinds = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    if case.unified:
        for left_out in ("vocab_size_per_layer_input", "hidden_size_per_layer_input"):
            sizes.pop(left_out)
    text = AutoConfig.for_model(f"{kind}_text", **{**sizes, "num_hidden_layers": 6, "layer_types": kinds, **case.target})
    own = {**sizes, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
    layers = AutoConfig.for_model(f"{kind}_text", **{**own, **case.assistant})
    whole = AutoConfig.for_model(f"{kind}_assistant", text_config=layers, backbone_hidden_size=text.hidden_size, **case.form)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(text).eval()
        target.generation_config.eos_token_id = None
        torch.manual_seed(1)
        assistant = AutoModelForCausalLM.from_config(whole).eval()
        if assistant.masked_embedding is not None:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return target, assistant


def write(assistant: Any, folder: Path) -> Path:
    """Write an assistant to a folder."""
    assistant.save_pretrained(folder)
    return folder


def chain(target: Any, assistant: Any, text: list[int], drafted: list[int]) -> Tensor:
    """Return the logits of each step of a chain below a text, whose last token the target has not read, by transformers."""
    with torch.no_grad():
        seen = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        features, place, logits = seen.hidden_states[-1][:, -1:], torch.tensor([[len(text) - 1]]), []
        for token in [text[-1], *drafted]:
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            step = assistant(
                inputs_embeds=torch.cat([embedded, features], -1), position_ids=place, shared_kv_states=seen.shared_kv_states
            )
            features = step.last_hidden_state
            logits.append(step.logits[0, 0])
    return torch.stack(logits)
