"""How a head begins: its shape, and the weights of another head if there is one to go on from."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models import FeatureHead, HeadShape
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.heads.head_folder import checked_shape, tokenizer_fingerprint
from polydraft.models.loading import Loaded
from polydraft.train.settings import HeadSize


def shape_for(wanted: HeadSize, window: int, target: Loaded) -> HeadShape:
    """Return the shape of a head for a target: as wide as its layers, unless the settings say otherwise."""
    config, layers = target.model.config, target.model.num_layers
    taps = wanted.taps
    if taps is None:
        inner = {2, layers // 4, layers // 2, 3 * layers // 4, layers - 3}
        taps = tuple(sorted(layer for layer in inner if 1 <= layer < layers))
    if not all(1 <= tap <= layers for tap in taps):
        raise UsageError(f"--taps {','.join(map(str, taps))} is out of range; allowed: layers 1 to {layers} of this target")
    heads = int(config.num_attention_heads)
    size = target.model.hidden_size
    return HeadShape(
        hidden_size=size,
        taps=taps,
        num_heads=heads,
        num_key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or size // heads),
        mlp_size=wanted.mlp_size or int(getattr(config, "intermediate_size", None) or 4 * size),
        window=window,
        tap_norm=TapNorm.EACH if taps else TapNorm.NONE,
    )


@torch.no_grad()
def take_over(head: FeatureHead, folder: Path, features_BLF: Tensor, tokenizer: Any) -> None:
    """Begin with the weights of another head for the same target; what it had not begins without influence: layers, MLP units.

    Features that it read as they were are normed now, which changes their lengths: to the same on average.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        shape, weights = checked_shape(config), load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"--start {folder} holds no usable head ({error}); allowed: one made by polydraft train head"
        ) from None
    if config.get("tokenizer_fingerprint") != tokenizer_fingerprint(tokenizer) or shape.hidden_size != head.shape.hidden_size:
        raise UsageError(f"--start {folder} is a head for another target; use one for this target")
    own, size = head.state_dict(), shape.hidden_size
    inputs, known = [0, *head.shape.taps], [0, *shape.taps]  # the last hidden states come first
    parts = weights.pop("fuse.weight", torch.eye(size)).float().chunk(len(known), dim=1)
    wide = [parts[known.index(tap)] if tap in known else torch.zeros(size, size) for tap in inputs]
    if head.fuse is not None:
        weights["fuse.weight"] = torch.cat(wide, dim=1)
    norms = dict(zip(known, [weights.pop(f"tap_norms.{place}.weight", None) for place in range(len(known))], strict=True))
    lengths = [part_BLH.square().mean(-1).sqrt().median() for part_BLH in features_BLF.chunk(len(inputs), dim=-1)]
    for place, (tap, length) in enumerate(zip(inputs, lengths, strict=True)):
        if head.tap_norms and tap in known:
            norm = norms[tap]
            weights[f"tap_norms.{place}.weight"] = torch.full((size,), float(length)) if norm is None else norm
    if shape.mlp_size < head.shape.mlp_size:
        _widen(weights, own)
    if odd := [name for name, weight in weights.items() if name not in own or own[name].shape != weight.shape]:
        raise UsageError(
            f"--start {folder} has another shape ({odd[0]} differs); use its --mlp or a larger one, and taps if it has any"
        )
    head.load_state_dict({**own, **weights})


def _widen(weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Give the MLP more units: their inputs are random, their outputs zero until training changes that."""
    gates = zip(weights["gate_up.weight"].chunk(2), own["gate_up.weight"].cpu().chunk(2), strict=True)
    wide = [torch.cat([known_MH, fresh_MH[len(known_MH) :].to(known_MH.dtype)]) for known_MH, fresh_MH in gates]
    weights["gate_up.weight"] = torch.cat(wide)
    missing = own["down.weight"].shape[1] - weights["down.weight"].shape[1]
    weights["down.weight"] = functional.pad(weights["down.weight"], (0, missing))
