"""Gemma 4's assistants on disk: checking that they are complete and fit their target, and loading them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from polydraft.errors import UsageError, first_line
from polydraft.models.heads.assistant import AssistantHead
from polydraft.models.heads.foreign_tensors import weight_files
from polydraft.models.heads.head_folder import Target, check_tensors, shapes_in, unreadable
from polydraft.models.hf import HFModel

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_NOT_READ = tuple(f".self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""Suffixes of tensors that training leaves behind: an assistant has no keys and values of its own."""


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an assistant."""
    return config.get("model_type") in MODEL_TYPES


def load_assistant(folder: Path, target: HFModel, tokenizer: Any, name: str) -> AssistantHead:
    """Load an assistant for its target, whose cache it attends to."""
    from transformers import AutoModelForCausalLM

    if target.spread is not None:
        raise UsageError(
            f"assistant {name!r} reads the cache of target {target.name!r}, but {target.spread}; use a draft model"
        )
    layers = check_assistant(folder, target, name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=target.dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise unreadable(f"assistant {name!r}", error) from None
    model = model.requires_grad_(False).eval().to(target.device)
    target.tap(())
    return AssistantHead(model, target.hf_model.get_input_embeddings(), layers, name, target.native)


def check_assistant(folder: Path, target: Target, name: str) -> dict[str, int]:
    """Return, for each kind of attention, the target's layer whose keys and values are read. Only headers are read.

    Refuse an assistant with incomplete files, or for another target.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises anything here
        raise UsageError(f"assistant {name!r} has no usable config.json ({first_line(error)}); get another copy") from None
    layers = _layers(config.get_text_config(), target, name)
    if (int(config.backbone_hidden_size), int(config.get_text_config().vocab_size)) != (target.hidden_size, target.vocab_size):
        raise UsageError(
            f"assistant {name!r} is for a hidden size of {config.backbone_hidden_size} and "
            f"{config.get_text_config().vocab_size} tokens, but target {target.name!r} has {target.hidden_size} and "
            f"{target.vocab_size}; use the assistant's own target"
        )
    expected = {part: tuple(tensor.shape) for part, tensor in model.state_dict().items()}
    files = weight_files(folder, name)
    try:
        found = {part: shape for file in files for part, shape in shapes_in(file).items() if not part.endswith(_NOT_READ)}
        check_tensors(found, expected, optional=("lm_head.weight",) if config.tie_word_embeddings else ())
    except (OSError, SafetensorError, ValueError) as error:
        raise unreadable(f"assistant {name!r}", error) from None
    return layers


def _layers(text: Any, target: Target, name: str) -> dict[str, int]:
    """Return the target's last layer of each kind of attention with its own keys and values; refuse a target of other sizes."""
    theirs, kinds = target.config, sorted({*text.layer_types})
    if not str(theirs.model_type).startswith("gemma4"):
        raise UsageError(
            f"assistant {name!r} attends to the keys and values of a Gemma 4, but target {target.name!r} is of type "
            f"{theirs.model_type!r}; use the assistant's own target"
        )
    own = list(theirs.layer_types)[: theirs.num_hidden_layers - getattr(theirs, "num_kv_shared_layers", 0)]
    layers = {}
    for kind in kinds:
        reads, has = _keys(text, [*text.layer_types].index(kind)), "none"
        if kind in own:
            layers[kind] = len(own) - 1 - own[::-1].index(kind)
            has = _keys(theirs, layers[kind])
        if reads != has:
            raise UsageError(
                f"assistant {name!r} reads {reads} in layers of type {kind}, but target {target.name!r} has {has}; use the "
                "assistant's own target"
            )
    return layers


def _keys(config: Any, layer: int) -> str:
    sizes = config.per_layer_config[layer]
    return f"{sizes.num_key_value_heads} heads of size {sizes.head_dim}"
