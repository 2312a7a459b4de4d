"""The `transformers` model in a GGUF file: its config, and which tensors of the file each parameter is made of.

Config keys and transposed or permuted tensors are looked up in the tables of `transformers`, names of tensors in those of the
package `gguf`. Tensors are converted one at a time, whereas `from_pretrained(gguf_file=...)` holds all of them in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polydraft.errors import FailureError, UsageError, first_line
from polydraft.models.gguf.header import OUTPUT, GgufHeader, GgufTensor

_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""Architectures that have another name in `transformers`."""
_TEXT_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Model types of which files contain only the text part."""
_ALWAYS_TIED = ("falcon", "bloom")
_DEEPEST = 2
"""How many outer modules the names in a file may omit."""
_NO_TEXT = ("t5", "t5encoder", "umt5")


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, and the tensors that it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    """More than one for experts, whose tensors are joined."""
    is_linear: bool
    """Whether it is the weight of a linear layer, which can be stored in int8."""


class Architecture:
    """The model in a GGUF file.

    Raises
    ------
    UsageError
        If `transformers` does not know the architecture.
    FailureError
        If tensors are missing or do not have the sizes in the header.
    """

    def __init__(self, source: Path, header: GgufHeader) -> None:
        self.config, said = _config(source, header)
        self.model = _on_meta(source, self.config)
        modules = {module: name for name, module in self.model.named_modules()}
        self.embedding: str = modules[self.model.get_input_embeddings()]
        """Name of the embedding table."""
        self.head: str = modules[self.model.get_output_embeddings()]
        """Name of the output head, which may share that table."""
        self._processor = _processor(header.architecture, said)
        self._names = _names(self.model, header, self._processor)
        self.weights = tuple(self._weights(source, header))

    @property
    def tied(self) -> bool:
        """Whether the output head shares the embedding table."""
        return all(weight.name != f"{self.head}.weight" for weight in self.weights)

    def restored(self, weight: Weight, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """Return a parameter, given the numbers of its sources, undoing how they were changed when the file was written."""
        joined: dict[str, dict[str, Tensor]] = {"tensors": {}}
        result = None
        for source, numbers in zip(weight.sources, values, strict=True):
            options = {"tensor_key_mapping": self._names, "parsed_parameters": joined}
            result = self._processor.process(weights=numbers, name=source.name, **options)
        assert result is not None
        held = joined["tensors"].get(weight.name)
        tensor = torch.from_numpy(np.ascontiguousarray(result.weights)) if held is None else held
        if tuple(tensor.shape) != weight.shape:
            sizes = f"{tuple(tensor.shape)}, not {weight.shape}"
            raise FailureError(f"tensor {weight.sources[0].name} has the shape {sizes}; download or convert the file again")
        return tensor

    def _weights(self, source: Path, header: GgufHeader) -> Iterator[Weight]:
        parts: dict[str, list[GgufTensor]] = {}
        for tensor in header.tensors.values():
            name = self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                parts.setdefault(name, []).append(tensor)
        kinds = {name: type(module) for name, module in self.model.named_modules()}
        shared = f"{self.head}.weight" if self.config.tie_word_embeddings else None
        for name, tensor in self.model.state_dict().items():
            found = parts.get(name)
            if found is None and name == shared:
                continue
            if found is None:
                raise FailureError(f"{source.name} has no {name}, which its model needs; download or convert it again")
            if (numbers := sum(part.num_weights for part in found)) != tensor.numel():
                raise FailureError(
                    f"tensor {found[0].name} of {source.name} has {numbers} numbers, but its sizes ask for {tensor.numel()}; "
                    "download or convert it again"
                )
            module, _, kind = name.rpartition(".")
            yield Weight(name, tuple(tensor.shape), tuple(found), kind == "weight" and kinds[module] is nn.Linear)


def _config(source: Path, header: GgufHeader) -> tuple[Any, dict[str, Any]]:
    """Return the config, and the values from the header that it is made of."""
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    architecture = header.architecture
    model_type = _MODEL_TYPES.get(architecture, architecture)
    if architecture == "llama" and header.fields.get("general.name") == "mistral":
        model_type = "mistral"
    known = sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer", *_NO_TEXT})
    if model_type not in known:
        raise UsageError(
            f"transformers cannot read {source.name}, whose architecture is {architecture!r}; use the model in its own format, "
            f"or one of: {', '.join(known)}"
        )
    said: dict[str, Any] = {
        "tie_word_embeddings": OUTPUT not in header.tensors or architecture in _ALWAYS_TIED,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}),
        **({"vocab_size": len(header.tokens)} if header.tokens else {}),
    }
    for key, value in header.fields.items():
        prefix, _, rest = key.partition(".")
        renamed = GGUF_CONFIG_MAPPING.get(model_type if prefix == architecture else prefix, {}).get(rest)
        if renamed is not None and renamed != -1:
            said[renamed] = value
    said["model_type"] = _TEXT_TYPES.get(model_type, model_type)
    _adjust(said, header)
    return AutoConfig.for_model(**said), said


def _adjust(said: dict[str, Any], header: GgufHeader) -> None:
    """Set values that some architectures do not state directly, as `transformers` does."""
    if said["model_type"] == "qwen3" and isinstance(size := header.fields.get("qwen3.attention.key_length"), int):
        said["head_dim"] = size
    elif said["model_type"] == "stablelm":
        said["use_qkv_bias"] = any(name.endswith("attn_q.bias") for name in header.tensors)
        said["use_parallel_residual"] = not any("ffn_norm" in name for name in header.tensors)
    elif said["model_type"] == "lfm2":
        heads = said["num_key_value_heads"]
        said |= {"num_key_value_heads": max(heads), "block_auto_adjust_ff_dim": False}
        said["full_attn_idxs"] = [number for number, count in enumerate(heads) if count > 0]
    elif said["model_type"] == "gemma4_text":
        said["eos_token_id"] = [1, 106, 50]
    elif said["model_type"] == "minimax_m2":
        said["scoring_func"] = {0: "none", 1: "softmax", 2: "sigmoid"}.get(said.get("scoring_func", 1), "softmax")


def _on_meta(source: Path, config: Any) -> Any:
    """Return a model on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise UsageError(
            f"transformers cannot build the model in {source.name} ({first_line(error)}); use the model in its own format"
        ) from None


def _processor(architecture: str, said: dict[str, Any]) -> Any:
    """Return the object of `transformers` that undoes how an architecture's tensors were changed for the file."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=said)


def _names(model: Any, header: GgufHeader, processor: Any) -> dict[str, str]:
    """Map the names of tensors in a file to those in the model."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(kinds[header.architecture], int(model.config.get_text_config().num_hidden_layers))
    found: dict[str, str] = {}
    for depth in range(_DEEPEST + 1):  # some files were made from an inner module, where names are shorter
        for whole in model.state_dict():
            outer, inner = whole.split(".")[:depth], ".".join(whole.split(".")[depth:])
            inner = processor.preprocess_name(inner)
            name, dot, suffix = inner.rpartition(".")
            if suffix not in ("weight", "bias"):
                name, dot, suffix = inner, "", ""
            theirs = table.get_name(name)
            if theirs is None:
                extra: dict[str, str] = {}
                processor.perform_fallback_tensor_mapping(extra, dot + suffix, "".join(f"{part}." for part in outer), inner)
                found = {**extra, **found}
            else:
                found.setdefault(f"{theirs}{dot}{suffix}", whole)
    return found
