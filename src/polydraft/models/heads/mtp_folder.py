"""MTP layers on disk: finding them in the checkpoints of each family, checking and loading them.

They are stored with the target's own weights, or in a folder of their own. All families have the same parts under different
names: a norm of the embedding, a norm of the hidden state, a projection of both, a decoder layer, a final norm, and sometimes
tables of their own.
"""

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polydraft.errors import FailureError, UsageError, first_line
from polydraft.models.families import scheme_of
from polydraft.models.heads.head_folder import Target, pickled_files, shapes_in
from polydraft.models.heads.mtp import MtpHead, TokenPair
from polydraft.models.hf import HFModel

logger = logging.getLogger(__name__)
NAME = "mtp"
"""Name of the draft that consists of the MTP layers in the target's own checkpoint."""
_EXTRA_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.eh_proj\.weight$")
"""DeepSeek-V3, GLM-4-MoE: a layer after those of the target."""
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?mtp(?:_layers|\.layers)\.(\d+)\.(.+)$")
_SHARED = re.compile(r"^(?:model\.)?(?:language_model\.)?mtp\.([a-z]\w*\.weight)$")
"""Qwen3-Next, Qwen3.5: parts that all layers share."""
_PARTS = {
    "token_norm": ("enorm", "token_layernorm", "pre_fc_norm_embedding"),
    "feature_norm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden"),
    "join": ("eh_proj", "input_proj", "fc"),
    "final_norm": ("shared_head.norm", "final_layernorm", "norm"),
    "embedding": ("embed_tokens",),
    "output": ("shared_head.head", "lm_head"),
}
"""The names of each part in all families."""
_OWN_NAMES = {f"{theirs}.weight": ours for ours, names in _PARTS.items() for theirs in names}
_TABLES = ("embedding", "output")
_MARKS = ("mtp", "nextn")
_PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of MTP layers alone, without the target."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(mark in str(name).lower() for mark in _MARKS for name in names)
    return named or config.get("speculators_model_type") == "mtp"


@dataclass(frozen=True)
class MtpFiles:
    """The MTP layers in a folder's weights."""

    folder: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each tensor in the folder, from the index or from headers."""
        for index in sorted(self.folder.glob("*.safetensors.index.json")):
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.folder / file for name, file in weights.items()}
        return {name: file for file in sorted(self.folder.glob("*.safetensors")) for name in shapes_in(file)}

    @cached_property
    def layers(self) -> dict[int, dict[str, str]]:
        """Each layer's tensor names in the checkpoint, by our names for parts and transformers' for the decoder layer."""
        extra = {int(found[2]): f"{found[1]}.{found[2]}." for found in map(_EXTRA_LAYER.match, self.files) if found}
        layers: dict[int, dict[str, str]] = {}
        shared: dict[str, str] = {}
        for name in self.files:
            if found := _LAYER.match(name):
                layers.setdefault(int(found[1]), {})[_part(found[2])] = name
            elif (found := _SHARED.match(name)) and found[1] in _OWN_NAMES:
                shared[_OWN_NAMES[found[1]]] = name
            else:
                for number, prefix in extra.items():
                    if name.startswith(prefix):
                        layers.setdefault(number, {})[_part(name.removeprefix(prefix))] = name
        return {number: {**shared, **layers[number]} for number in sorted(layers)}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        found = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}

    @property
    def promised(self) -> int:
        """Number of MTP layers according to the config."""
        config = {**self.config, **(self.config.get("text_config") or {})}
        return next((value for name in _PROMISES if isinstance(value := config.get(name), int)), 0)

    @property
    def features_first(self) -> bool:
        """Whether the projection reads features first, as in MiMo's own checkpoints only."""
        return "speculators_model_type" not in self.config and any(".mtp_layers." in name for name in self.files)


def _part(theirs: str) -> str:
    # MiMo-V2 has a name for the norm before the MLP that the rest of the model does not use.
    return _OWN_NAMES.get(theirs) or theirs.replace("pre_mlp_layernorm", "post_attention_layernorm")


def mtp_layers(folder: Path) -> tuple[int, int]:
    """Return how many MTP layers a folder's weights hold and how many its config promises; 0 if they cannot be read."""
    try:
        files = MtpFiles(folder)
        return len(files.layers), files.promised
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return 0, 0


def check_mtp(folder: Path, target: Target, name: str, *, arriving: bool = False) -> tuple[MtpFiles, dict[str, str]]:
    """Return the files of MTP layers, and the names of the first layer's tensors in them.

    Refuse layers that are incomplete, of an unknown form, or for a target of other sizes.

    If they are `arriving` from a hub with the target, only their names can be checked until their files are here.
    """
    files, layer = _first_layer(folder, target, name)
    if arriving and not all(files.files[theirs].exists() for theirs in layer.values()):
        return files, layer
    with _explained(name):
        tensors = {part: torch.empty(shape, device="meta") for part, shape in _shapes(files, layer).items()}
    _one_layer(tensors, target, name)
    return files, layer


def load_mtp(folder: Path, target: HFModel, tokenizer: Any, name: str) -> MtpHead:
    """Load the first MTP layer of a folder for its target; it drafts all levels."""
    if target.spread is not None:
        raise UsageError(f"MTP layers read the tables of target {target.name!r}, but {target.spread}; use a draft model")
    files, layer = check_mtp(folder, target, name)
    if (number := len(files.layers)) > 1:
        logger.info("%s has %d MTP layers, of which the first drafts, at every depth", name, number)
    with _explained(name):
        tensors = dict(_tensors(files, layer))
    model = _one_layer(tensors, target, name).requires_grad_(False).eval().to(target.device)
    target.tap(())
    tensors = {part: tensors[part].to(target.device, target.dtype) for part in _PARTS if part in tensors}
    norms = [copy.deepcopy(model.base_model.norm) for _ in range(2)]
    for norm, part in zip(norms, ("token_norm", "feature_norm"), strict=True):
        norm.weight.data = tensors[part]
    # The target's own tables come last, because nothing above may change them.
    embedding, output = target.hf_model.get_input_embeddings(), target.hf_model.get_output_embeddings()
    if "embedding" in tensors and not _same(tensors["embedding"], embedding):
        table_VH = tensors["embedding"]
        embedding = nn.Embedding(len(table_VH), table_VH.shape[1], _weight=table_VH).requires_grad_(False)
    if "output" in tensors and not _same(tensors["output"], output):
        output = _linear(tensors["output"])
    pair = TokenPair(embedding, norms[0], norms[1], _linear(tensors["join"]), files.features_first)
    model.base_model.set_input_embeddings(pair)
    model.set_output_embeddings(output)
    return MtpHead(HFModel(model, name, lean=False, native=target.native, invariant=False, trusted=True), pair, name)


def _linear(weight_FH: Tensor) -> nn.Linear:
    layer = nn.Linear(weight_FH.shape[1], weight_FH.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight_FH, requires_grad=False)
    return layer


def _same(table_VH: Tensor, module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == table_VH.shape and torch.equal(table_VH.to(weight), weight)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors from reading files into one that says what to do."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise FailureError(f"cannot read the MTP layers of {name!r} ({first_line(error)}); get another copy") from None


def _first_layer(folder: Path, target: Target, name: str) -> tuple[MtpFiles, dict[str, str]]:
    """Return the files, and the names of the first MTP layer's tensors in them; refuse a folder without a usable one."""
    files = MtpFiles(folder)
    with _explained(name):
        layers, promised = files.layers, files.promised
        if not files.files and (pickled := pickled_files(folder)):
            raise UsageError(
                f"the weights of {name!r} are pickled ({pickled[0]}), but only safetensors can be read; get another copy"
            )
    if not layers:
        says = f"config.json promises {promised} MTP layers, but" if promised else "config.json promises none, and"
        raise UsageError(f"{name!r} has no MTP layers: {says} the weights hold none; use another draft, or get a complete copy")
    if (scheme := scheme_of(target.config)) is not None:
        raise UsageError(
            f"the MTP layers of {name!r} cannot be read, because their target is quantised by {scheme}; use another draft"
        )
    layer = next(iter(layers.values()))
    if missing := [part for part in _PARTS if part not in layer and part not in _TABLES]:
        raise FailureError(f"the MTP layers of {name!r} lack {' or '.join(_PARTS[missing[0]])}; get another copy")
    return files, layer


def _shapes(files: MtpFiles, layer: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    held = {file: shapes_in(file) for file in {files.files[theirs] for theirs in layer.values()}}
    return {part: held[files.files[theirs]][theirs] for part, theirs in layer.items()}


def _tensors(files: MtpFiles, layer: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for part, theirs in layer.items():
        with safe_open(files.files[theirs], "pt") as opened:
            yield part, opened.get_tensor(theirs)


def _check_sizes(tensors: Mapping[str, Tensor], target: Target, name: str) -> None:
    """Refuse MTP layers for a target of other sizes."""
    sizes: dict[str, tuple[int, ...]] = {"join": (target.hidden_size, 2 * target.hidden_size)}
    sizes |= dict.fromkeys(("token_norm", "feature_norm", "final_norm"), (target.hidden_size,))
    sizes |= dict.fromkeys(_TABLES, (target.vocab_size, target.hidden_size))
    for part, size in sizes.items():
        if part in tensors and tensors[part].shape != size:
            raise UsageError(
                f"the MTP layers of {name!r} are for another target than {target.name!r}: the shape of {_PARTS[part][0]} is "
                f"{list(tensors[part].shape)}, not {list(size)}; use their own target"
            )


def _one_layer(tensors: Mapping[str, Tensor], target: Target, name: str) -> Any:
    """Return the decoder layer as a model of the target's kind, on meta if the tensors are. Its tables are placeholders."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _check_sizes(tensors, target, name)
    config = _layer_config(target.config, tensors)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no warnings, because whatever they are about is refused below
    try:
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config))
        base = kind.base_model_prefix
        state = {f"{base}.layers.0.{part}": tensor for part, tensor in tensors.items() if part not in _PARTS}
        like_VH = tensors["final_norm"].new_zeros(config.vocab_size, config.hidden_size)
        tables = {f"{base}.embed_tokens.weight": like_VH, "lm_head.weight": like_VH}
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict={**state, f"{base}.norm.weight": tensors["final_norm"], **tables},
            dtype=target.dtype if isinstance(target, HFModel) else None,
            device_map={"": like_VH.device},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # a class may fail in any way with a layer that is not its own
        raise FailureError(f"cannot read the MTP layers of {name!r} ({first_line(error)}); get another copy") from None
    finally:
        logging.set_verbosity(verbosity)
    for keys, what in (
        ("missing_keys", "lack {}"),
        ("mismatched_keys", "have {} in another shape"),
        ("unexpected_keys", "hold {}"),
    ):
        if odd := sorted(map(str, found[keys])):
            raise FailureError(
                f"the MTP layers of {name!r} {what.format(odd[0])}, unlike layers of {target.name!r}; get another copy"
            )
    return model


def _layer_config(config: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the config of a model of the target's kind with only this layer; its tensors tell its form."""
    config = copy.deepcopy(config)
    experts = any(".experts." in part for part in tensors)
    attention = "full_attention"
    if config.model_type == "mimo_v2_flash":  # its MTP layers have attention sinks, like its sliding layers
        attention = "sliding_attention"
    config.num_hidden_layers, config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, 8, None, False
    for field, kind in (("layer_types", attention), ("mlp_layer_types", "sparse" if experts else "dense")):
        if getattr(config, field, None) is not None:
            setattr(config, field, [kind])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if experts else 1
    if getattr(config, "mlp_only_layers", None) is not None:
        config.mlp_only_layers, config.decoder_sparse_step = [] if experts else [0], 1
    return config
