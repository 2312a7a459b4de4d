"""Feature heads on disk: `config.json` and `model.safetensors`, like any other model."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from polydraft.devices import is_host
from polydraft.errors import FailureError, UsageError, first_line, shown
from polydraft.models.heads.feature_head import FeatureHead, HeadShape, TapNorm
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary


def check_header(file: Path, module: type[nn.Module], *arguments: object) -> None:
    """Refuse a safetensors file that does not hold the state of a module made from these arguments, reading only its header.

    Raises
    ------
    ValueError
        If a tensor is missing, unexpected, or of another shape (it says which), or if torch refuses the sizes.
    OSError, SafetensorError
        If the file cannot be read.
    """
    try:
        with torch.device("meta"):  # before anything is allocated: wrong sizes may be larger than memory
            expected = module(*arguments).state_dict()
    except (RuntimeError, TypeError, OverflowError):
        raise ValueError("config.json asks for impossible sizes") from None
    check_tensors(shapes_in(file), {name: tuple(tensor.shape) for name, tensor in expected.items()})


def check_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()
) -> None:
    """Raise a `ValueError` for the first tensor that is missing (unless `optional`), unexpected, or of another shape."""
    for name, shape in expected.items():
        if name not in found and name not in optional:
            raise ValueError(f"{name} is missing")
        if name in found and found[name] != shape:
            raise ValueError(f"{name} has the shape {list(found[name])}, where config.json asks for {list(shape)}")
    if others := sorted({*found} - {*expected, *optional}):
        raise ValueError(f"{others[0]} is not part of it")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a safetensors file, reading only its header."""
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (not a mapping)


def pickled_files(folder: Path) -> list[str]:
    """Return the names of pickled weight files in a folder, which must not be loaded."""
    return sorted(file.name for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}"))


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """The sizes in a target's config, to check a head before the target is loaded."""

    name: str
    config: Any
    """The configuration of the language part."""

    @property
    def hidden_size(self) -> int:
        """Size of its hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""
        return int(self.config.vocab_size)


Target = HFModel | TargetSizes
"""What a head is checked against: a loaded target, or only its sizes."""
MODEL_TYPE = "polydraft_feature_head"
VOCABULARY_FILE = "draft_vocabulary.safetensors"
"""File in a draft's folder that lists the tokens it drafts, if not all."""
_MOST = 2**31


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a short hash of a tokenizer's vocabulary."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def new_head(
    shape: HeadShape,
    target: HFModel,
    vocabulary: PartialVocabulary | None,
    name: str,
    kind: Callable[..., FeatureHead] = FeatureHead,
) -> FeatureHead:
    """Build an untrained head that uses a target's tables."""
    ends = target.hf_model.get_input_embeddings(), target.hf_model.get_output_embeddings()
    tables = [end.weight for end in ends] if target.quantised_by is None else [_unpacked(end, target) for end in ends]
    if any(table.is_meta or type(table).__name__ == "DTensor" for table in tables):
        raise UsageError(f"a feature head reads the tables of target {target.name!r}, but {target.spread}; use a draft model")
    # An inflated target's tables are wider than its features.
    embedding_VH, output_VH = (table.detach()[:, : shape.hidden_size].to(target.device).contiguous() for table in tables)
    head = kind(shape, embedding_VH, output_VH, vocabulary, name)
    for layer in head.all_layers:
        layer.native = target.native and target.fast is not None and is_host(target.device)  # if the target does
    return head


def installed(head: FeatureHead, target: HFModel) -> FeatureHead:
    """Prepare a loaded head for drafting: on the target's device, with its layers tapped."""
    target.tap(head.taps)
    # Drafts are read in int8 whatever the target's dtype: that makes them faster and never changes the text's distribution.
    for layer in head.all_layers:
        layer.int8 = True
    return head.to(target.device, target.dtype).requires_grad_(False).eval()


def _unpacked(end: Any, target: HFModel) -> Any:
    """Return the table of an embedding or an output head, dequantised if necessary."""
    try:
        weight = end.weight
        table = weight if type(weight) is torch.nn.Parameter else weight.dequantize()
        assert table.is_floating_point() and len(table) == target.vocab_size
    except Exception:  # there is no weight, or it cannot be unpacked alone
        raise UsageError(
            f"a feature head reads the tables of target {target.name!r}, which {target.quantised_by} has packed; use a draft "
            "model"
        ) from None
    return table


def save_head(head: FeatureHead, folder: Path, fingerprint: str, details: dict[str, Any]) -> None:
    """Write a head into an existing folder: its weights in bfloat16, its config, and its vocabulary if that is partial."""
    weights = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": MODEL_TYPE, "tokenizer_fingerprint": fingerprint, **asdict(head.shape), **details}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if head.vocabulary is not None:
        save_vocabulary(head.vocabulary, folder)


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of one of our feature heads."""
    return config.get("model_type") == MODEL_TYPE


def checked_shape(config: Any) -> HeadShape:
    """Read a head's shape from a config; raise a `ValueError` that says which value is impossible."""
    if not isinstance(config, dict):
        raise ValueError("it is not an object")
    fields = {field: config[field] for field in HeadShape.__dataclass_fields__ if field in config}
    for field in ("hidden_size", "num_heads", "num_key_heads", "head_size", "mlp_size", "window"):
        checked_number(field, fields.get(field))
    taps = fields.setdefault("taps", [])
    if not isinstance(taps, list) or not all(_is_number(tap, 1, _MOST) for tap in taps):
        raise ValueError(f"taps is {shown(taps)}, not a list of layers, counted from 1")
    for field in ("rope_theta", "rope_gain", "norm_epsilon"):
        if not _is_positive(fields.get(field, 1.0)):
            raise ValueError(f"{field} is {shown(fields[field])}, not a number above 0")
    for field, default in HeadShape.__dataclass_fields__.items():
        if isinstance(default.default, bool) and not isinstance(fields.get(field, True), bool):
            raise ValueError(f"{field} is {shown(fields[field])}, not true or false")
    if (norm := fields.get("tap_norm", "none")) not in [*TapNorm]:
        raise ValueError(f"tap_norm is {shown(norm)}, not one of {', '.join(TapNorm)}")
    if fields["num_heads"] % fields["num_key_heads"] or fields["head_size"] % 2:
        raise ValueError("num_heads is not a multiple of num_key_heads, or head_size is odd")
    if not taps and not fields.get("reads_last", True):
        raise ValueError("it reads neither taps nor the last hidden states")
    turns = fields.get("rope_frequencies", [])
    if not isinstance(turns, list) or not all(map(_is_positive, turns)) or len(turns) not in (0, fields["head_size"] // 2):
        raise ValueError(f"rope_frequencies is {shown(turns)}, not a list of {fields['head_size'] // 2} numbers above 0")
    return HeadShape(**{**fields, "taps": tuple(taps), "rope_frequencies": tuple(turns), "tap_norm": TapNorm(norm)})


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def checked_number(name: str, value: Any, least: int = 1, most: int = _MOST) -> int:
    """Return a whole number of a config; raise a `ValueError` if it is out of range or anything else."""
    if not _is_number(value, least, most):
        raise ValueError(f"{name} is {shown(value)}, not a whole number from {least} to {most}")
    number: int = value
    return number


def _is_number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_head(folder: Path, target: Target, name: str) -> tuple[HeadShape, str | None]:
    """Return a head's shape and the fingerprint of its tokenizer, reading only headers.

    Refuse a head whose files are incomplete, or for a target of other sizes.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = checked_shape(config)
    except (OSError, ValueError) as error:
        raise UsageError(f"draft {name!r} has no usable config.json ({error}); train it again or get another copy") from None
    if shape.hidden_size != target.hidden_size or max(shape.taps, default=0) > target.num_layers:
        raise UsageError(
            f"feature head {name!r} reads hidden states of size {shape.hidden_size}, but target {target.name!r} has "
            f"{target.hidden_size} and {target.num_layers} layers; use the head's own target"
        )
    try:
        check_header(folder / "model.safetensors", FeatureHead, shape, torch.empty(0), torch.empty(0))
    except (OSError, SafetensorError, ValueError) as error:
        raise unreadable(f"draft {name!r}", error, "train it again or get another copy") from None
    return shape, config.get("tokenizer_fingerprint")


def unreadable(what: str, error: Exception, remedy: str = "get another copy") -> FailureError:
    """Return the error for weights that cannot be read."""
    return FailureError(f"cannot read the weights of {what} ({first_line(error)}); {remedy}")


def load_head(folder: Path, target: HFModel, tokenizer: Any, name: str) -> FeatureHead:
    """Load a head for its target, and have the target provide the features it reads."""
    shape, fingerprint = check_head(folder, target, name)
    if tokenizer is None:
        raise UsageError(f"draft {name!r} is a head for one tokenizer; pass the target's tokenizer with tokenizer=...")
    if fingerprint != tokenizer_fingerprint(tokenizer):
        raise UsageError(
            f"feature head {name!r} was trained for another tokenizer than that of target {target.name!r}; use the head's own "
            "target, or train one with: polydraft train head"
        )
    head = new_head(shape, target, load_vocabulary(folder, target.vocab_size, target.device), name)
    try:
        head.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise unreadable(f"draft {name!r}", error, "train it again or get another copy") from None
    return installed(head, target)


def save_vocabulary(vocabulary: PartialVocabulary, folder: Path) -> None:
    """Write the tokens that a draft knows into its folder."""
    save_file({"tokens": vocabulary.tokens_D.to("cpu", torch.int32).contiguous()}, folder / VOCABULARY_FILE)


def load_vocabulary(folder: Path, size: int, device: torch.device) -> PartialVocabulary | None:
    """Read which tokens a draft knows; None if it knows all."""
    if not (folder / VOCABULARY_FILE).exists():
        return None
    try:
        tokens_D = load_file(folder / VOCABULARY_FILE)["tokens"].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise FailureError(f"cannot read {folder / VOCABULARY_FILE} ({error}); train the draft again") from None
    if tokens_D.ndim != 1 or len(tokens_D) == 0 or int(tokens_D.min()) < 0 or int(tokens_D.max()) >= size:
        raise UsageError(f"the draft vocabulary in {folder} does not fit a target of {size} tokens; use the draft's own target")
    return PartialVocabulary(tokens_D.to(device), size)
