"""Loading converted GGUF files: weights are memory-mapped and used in place, in int8 too."""

from pathlib import Path
from typing import Any

import torch

from polydraft.models.gguf.conversion import BLOCKS, SCALES
from polydraft.models.gguf.shards import mapped
from polydraft.models.packed import PackedEmbedding
from polydraft.models.quantised import Int8Linear


def load_converted(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a converted model on the CPU, in the number format that it was converted to.

    Returns
    -------
    transformers.PreTrainedModel
        If it is in int8, its linear layers are `Int8Linear`.
    dict
        The loading info of `from_pretrained`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in mapped(file)}
    scales = {name.removesuffix(SCALES): tensors.pop(name) for name in list(tensors) if name.endswith(SCALES)}
    held = {module: (tensors.pop(f"{module}.weight"), scale_F) for module, scale_F in scales.items()}
    blocks = {name: tensors.pop(name) for name in list(tensors) if BLOCKS in name}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    for module in {*held, *(name.partition(BLOCKS)[0] for name in blocks)}:
        # Placeholders of the right shape that take no memory.
        shape = empty.get_submodule(module).weight.shape
        tensors[f"{module}.weight"] = torch.zeros((), dtype=config.dtype).expand(shape)
    tied = config.tie_word_embeddings
    config.tie_word_embeddings = tied and not held
    model, found = type(empty).from_pretrained(
        None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
    )
    model.config.tie_word_embeddings = tied
    model.name_or_path = model.config.name_or_path = str(folder)
    for module, pair in held.items():
        model.set_submodule(module, Int8Linear(model.get_submodule(module), pair))
    for name, table in blocks.items():
        module, _, kind = name.partition(BLOCKS)
        model.set_submodule(module, PackedEmbedding(table, kind, model.get_submodule(module)))
    return model.requires_grad_(not held), found


def load_converted_tokenizer(folder: Path) -> Any:
    """Load a folder's tokenizer as it was written; `AutoTokenizer` would choose a class that changes it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)
