"""The tensors of heads trained elsewhere: which ones there must be, and their names here."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.heads.feature_head import FeatureHead, HeadShape
from polydraft.models.heads.head_folder import pickled_files, shapes_in
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary

FIRST = "layers.0."
_NOT_READ = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Suffixes of tensors that training leaves behind and drafting does not need."""


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the weight files of a head; refuse pickled ones."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and (pickled := pickled_files(folder)):
        raise UsageError(
            f"the weights of draft {name!r} are pickled ({pickled[0]}), which could run any code; get a copy with safetensors, "
            "or write one: save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    if not files:
        raise UsageError(f"draft {name!r} has no weights: {folder} holds no .safetensors file; get another copy")
    return files


def _name(theirs: str) -> str:
    """Return a tensor's name in speculators' format; the authors call their only layer midlayer."""
    return theirs.removeprefix("model.").replace("midlayer.", FIRST)


def shapes_of(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in some files, reading only headers."""
    shapes = (item for file in files for item in shapes_in(file).items())
    return {_name(name): shape for name, shape in shapes if not name.endswith(_NOT_READ)}


def loaded(files: list[Path]) -> dict[str, Tensor]:
    """Read the tensors of some files."""
    from safetensors.torch import load_file

    return {_name(name): tensor for file in files for name, tensor in load_file(file).items() if not name.endswith(_NOT_READ)}


def layer_shapes(shape: HeadShape, layer: str, reads: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors."""
    size, queries, keys = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_key_heads * shape.head_size
    mlp = shape.mlp_size
    products = {
        "self_attn.q_proj": (queries, reads, shape.qkv_bias),
        "self_attn.k_proj": (keys, reads, shape.qkv_bias),
        "self_attn.v_proj": (keys, reads, shape.qkv_bias),
        "self_attn.o_proj": (size, queries, shape.output_bias),
        "mlp.gate_proj": (mlp, size, shape.mlp_bias),
        "mlp.up_proj": (mlp, size, shape.mlp_bias),
        "mlp.down_proj": (size, mlp, shape.mlp_bias),
    }
    expected: dict[str, tuple[int, ...]] = {
        f"{layer}{norm}.weight": (size,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for part, (rows, columns, biased) in products.items():
        expected[f"{layer}{part}.weight"] = (rows, columns)
        if biased:
            expected[f"{layer}{part}.bias"] = (rows,)
    if shape.query_key_norm:
        expected |= {f"{layer}self_attn.{part}_norm.weight": (shape.head_size,) for part in "qk"}
    return expected


def layer_weights(theirs: Mapping[str, Tensor], shape: HeadShape, layer: str) -> dict[str, Tensor]:
    """Return the weights of a layer under our names, without the norm before attention."""

    def side_by_side(parts: str, kind: str) -> Tensor:
        return torch.cat([theirs[f"{layer}{part}_proj.{kind}"] for part in parts.split()])

    products = {
        "qkv": ("self_attn.q self_attn.k self_attn.v", shape.qkv_bias),
        "attention_output": ("self_attn.o", shape.output_bias),
        "gate_up": ("mlp.gate mlp.up", shape.mlp_bias),
        "down": ("mlp.down", shape.mlp_bias),
    }
    ours = {"mlp_norm.weight": theirs[f"{layer}post_attention_layernorm.weight"]}
    for name, (parts, biased) in products.items():
        ours |= {f"{name}.{kind}": side_by_side(parts, kind) for kind in (["weight", "bias"] if biased else ["weight"])}
    if shape.query_key_norm:
        ours |= {f"{long}_norm.weight": theirs[f"{layer}self_attn.{long[0]}_norm.weight"] for long in ("query", "key")}
    return ours


def drafted_vocabulary(theirs: Mapping[str, Tensor], target: HFModel) -> PartialVocabulary | None:
    """Return the tokens that are drafted, None for all; column i stands for token i + d2t[i]."""
    count = len(theirs["d2t"]) if "d2t" in theirs else target.vocab_size
    if count == target.vocab_size:
        return None
    tokens_D = torch.arange(count) + theirs["d2t"].long()
    if int(tokens_D.min()) < 0 or int(tokens_D.max()) >= target.vocab_size or len({*tokens_D.tolist()}) != count:
        raise ValueError(f"d2t does not name {count} different tokens below {target.vocab_size}")
    if "t2d" in theirs and not torch.equal(theirs["t2d"].bool().nonzero()[:, 0], tokens_D.sort().values):
        raise ValueError("t2d and d2t name different tokens")
    return PartialVocabulary(tokens_D.sort().values.to(target.device), target.vocab_size)


def own_tables(theirs: Mapping[str, Tensor], head: FeatureHead, vocabulary: PartialVocabulary | None) -> tuple[Tensor, Tensor]:
    """Return the head's own tables; its input table is the target's if they are equal."""
    targets_VH, output_DH = head.tables[0], theirs.get("lm_head.weight", head.tables[1])
    if vocabulary is not None:  # our columns are in ascending order of tokens
        output_DH = output_DH[(torch.arange(len(output_DH)) + theirs["d2t"].long()).argsort()]
    own_VH = theirs.get("embed_tokens.weight")
    if own_VH is None or torch.equal(own_VH.to(targets_VH), targets_VH):
        own_VH = targets_VH
    return own_VH, output_DH
