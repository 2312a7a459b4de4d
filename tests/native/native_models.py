"""Tiny models in every number format, and texts passed through them in different ways."""

import copy
import random
from functools import cache

import torch

from families import FAMILIES
from models.test_families import block_of, path_to
from polydraft.models.hf import HFModel
from polydraft.models.quantised import quantise
from polydraft.trees import Topology, causal_block

CPU = torch.device("cpu")
ODD = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 2}
"""No size is a multiple of a vector."""
WIDE = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 1}
CROWDED = {
    "hidden_size": 63, "intermediate_size": 48, "head_dim": 68, "num_attention_heads": 7, "num_key_value_heads": 1,
    "initializer_range": 0.2,
}  # fmt: skip
"""More heads share keys than are attended to at a time, and channels are some vectors more than are mixed at a time."""
SHAPES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral-sliding", {}),
    "qwen2": ("qwen2", {}),
    "odd": ("llama", ODD),
    "wide": ("llama", WIDE),
    "crowded": ("llama", CROWDED),
}
FORMATS = ["float32", "bfloat16", "int8"]


@cache
def native(shape, number_format):
    """A model that runs natively."""
    with torch.inference_mode(False):
        family, options = SHAPES[shape]
        model = FAMILIES.get(family).build(seed=3, **options)
        if number_format == "bfloat16":
            model = model.bfloat16()
        model = HFModel(quantise(model) if number_format == "int8" else model)
    assert model.fast is not None
    return model


@cache
def plain(shape, number_format="float32"):
    """The same weights by torch."""
    with torch.inference_mode(False):
        family, options = SHAPES[shape]
        model = FAMILIES.get(family).build(seed=3, **options)
        return HFModel(model.bfloat16() if number_format == "bfloat16" else model, native=False)


def unquantised(shape):
    """The weights that an int8 model stands for, in float32, by torch."""
    twin = copy.deepcopy(plain(shape).hf_model)
    parts = dict(native(shape, "int8").hf_model.named_modules())
    with torch.no_grad():
        for name, part in twin.named_modules():
            if type(part) is torch.nn.Linear:
                part.weight = torch.nn.Parameter(parts[name].weight)
    return HFModel(twin, native=False)


def random_text(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(length)]


def random_tree(nodes, seed=0):
    rng = random.Random(seed)
    return Topology((0, *sorted(rng.randrange(node) for node in range(1, nodes))))


__all__ = ["FORMATS", "SHAPES", "block_of", "native", "path_to", "random_text", "random_tree", "read"]


@torch.inference_mode()
def read(model, texts, sizes):
    """Features of texts of one length, read in parts of the given sizes."""
    context = model.start(len(texts), len(texts[0]))
    parts, done = [], 0
    for size in sizes:
        tokens_BT = torch.tensor([text[done : done + size] for text in texts])
        parts.append(context.extend(tokens_BT, causal_block(len(texts), size, CPU)))
        done += size
        context.rewind([done] * len(texts))
    assert done == len(texts[0])
    return torch.cat(parts, dim=1)
