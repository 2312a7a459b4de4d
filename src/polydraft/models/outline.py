"""What can be known of a model without reading its weights, for `polydraft info`.

Sizes come from its config.json or the header of its GGUF file, and a twin shows whether it works with trees. This takes a
second or two, whatever the model's size.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polydraft.errors import FailureError, UsageError, first_line
from polydraft.models.check import working_twins
from polydraft.models.families import context_limit, refuse_unsupported, scheme_of, text_config
from polydraft.models.finding import hub_options, model_source
from polydraft.models.gguf.architecture import Architecture
from polydraft.models.gguf.conversion import Conversion
from polydraft.models.gguf.folder import is_converted
from polydraft.models.gguf.header import read_header
from polydraft.models.gguf.shards import SHARD_BYTES
from polydraft.models.gguf.tokenizer import check_tokenizer
from polydraft.models.hf import HFModel
from polydraft.models.inflated import is_inflated, source_name
from polydraft.models.int8_copy import copy_bytes
from polydraft.models.loading import (
    ALLOWED_TARGETS,
    cannot_load,
    check_name,
    check_size,
    missing_part,
    name_obstacle,
)
from polydraft.models.quantised import quantise, refuse_twice


@dataclass(frozen=True, eq=False)
class Outline:
    """A model whose weights were not read.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        On the meta device: it has all sizes, but no weights.
    device, dtype : torch.device, torch.dtype
        Where and in which number format it would run.
    source : Path, optional
        Its GGUF file, if it has one.
    """

    name: str
    model: Any
    device: torch.device
    dtype: torch.dtype
    source: Path | None = None
    architecture: Architecture | None = None
    """The architecture in its GGUF file."""

    @property
    def model_type(self) -> str:
        """Its type, as transformers names it."""
        return str(text_config(self.model).model_type)

    @property
    def num_layers(self) -> int | None:
        """Number of layers, if the configuration has it."""
        found = getattr(text_config(self.model), "num_hidden_layers", None)
        return None if found is None else int(found)

    @property
    def num_weights(self) -> int:
        """Number of weights; shared tables count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""
        table = self.model.get_output_embeddings()
        return int(getattr(table, "out_features", None) or text_config(self.model).vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Longest text that it can read; None for any length."""
        return context_limit(text_config(self.model))

    @property
    def scheme(self) -> str | None:
        """Name of the scheme that its weights are quantised by, if they are."""
        return scheme_of(self.model.config)

    @property
    def copy_bytes(self) -> int:
        """Bytes that an int8 copy of it would take."""
        return copy_bytes(self.model)

    @property
    def is_converted(self) -> bool:
        """Whether its GGUF file was already converted to this number format."""
        return self.source is not None and is_converted(self.source, self.dtype)

    def num_bytes(self, dtype: torch.dtype) -> int | None:
        """Return the bytes of its weights in a number format, in memory and, for GGUF files, on disk; None if unknown."""
        if self.source is not None and self.architecture is not None:
            return Conversion(self.source, self.architecture, dtype, SHARD_BYTES).num_bytes
        if self.scheme is not None:
            return sum(file.stat().st_size for file in Path(self.name).glob("*.safetensors")) or None
        if dtype != torch.int8:
            return self.num_weights * int(dtype.itemsize)
        # If the output head shares the embedding table, that table is kept beside its int8 form.
        tables = {id(part) for part in self.model.get_input_embeddings().parameters()}
        rounded = {id(part.weight) for part in self.model.modules() if type(part) is nn.Linear} - tables
        in_float32: int = sum(part.numel() for part in self.model.parameters() if id(part) not in rounded)
        return self.copy_bytes + 4 * in_float32

    @cached_property
    def twin(self) -> HFModel | None:
        """A small model that behaves like this one; None if none could be made.

        Raises
        ------
        UsageError
            If models of this kind cannot be used, with the reason that `polydraft.models.loading.load_model` gives.
        """
        refuse_unsupported(self.model)
        if self.dtype == torch.int8:
            refuse_twice(self.scheme)
        found = next(working_twins(self.model), None)
        if found is None:
            return None
        small = found.hf_model.to(self.device, torch.float32 if self.dtype == torch.int8 else self.dtype)
        twin = HFModel(quantise(small) if self.dtype == torch.int8 else small, self.name)
        twin.quantised_by = self.scheme  # twins are not quantised
        return twin


def _without_weights(name: str) -> Any:
    """Return the model of a folder or hub name on the meta device, from its config.json.

    If it is a folder, its weight files must exist; they are not read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_name("model", name, ALLOWED_TARGETS)
    if os.path.isdir(name) and (reason := missing_part(name)) is not None:
        raise cannot_load(name, reason)
    check_size(name)
    try:
        config = AutoConfig.from_pretrained(name, **hub_options(name))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise cannot_load(name, name_obstacle(name, error)) from None
    except Exception as error:  # sizes that do not fit each other raise anything
        raise FailureError(f"cannot load model {name!r} ({first_line(error)}); download or save it again") from None


def outline(name: str, device: torch.device, dtype: torch.dtype) -> Outline:
    """Return the outline of a model by name: the bundled one, a folder, a GGUF file, or a hub name.

    Missing and incomplete files, and files that are not models, are refused as by `polydraft.models.loading.load_model`.
    """
    if is_inflated(name):
        raise UsageError(f"target {name!r} is a small model at a large one's cost, for benchmarks; name {source_name(name)}")
    if (source := model_source(name)) is None:
        return Outline(name, _without_weights(name), device, dtype)
    header = read_header(source)
    check_tokenizer(source, header)
    architecture = Architecture(source, header)
    return Outline(name, architecture.model, device, dtype, source, architecture)
