"""Targets and drafts by name: bundled, a folder, a GGUF file or a hub name, with errors that say what to do."""

import json
import logging
import math
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from polydraft.devices import is_host
from polydraft.errors import FailureError, PolydraftError, UsageError, first_line
from polydraft.models.adapters import ALLOWED, check_adapter, with_adapter
from polydraft.models.bundled import BUNDLED
from polydraft.models.families import scheme_of
from polydraft.models.finding import head_place, hub_options, model_source
from polydraft.models.generation_defaults import GenerationDefaults
from polydraft.models.gguf import converted_folder, gguf_source, load_converted, load_converted_tokenizer, vocabulary_of
from polydraft.models.given import check_draft, given_draft, given_model
from polydraft.models.heads.head import Head
from polydraft.models.heads.head_folder import load_vocabulary, shapes_in
from polydraft.models.hf import HFModel, early_exit, in_training
from polydraft.models.inflated import InflatedModel, is_inflated, parse_inflated
from polydraft.models.int8_copy import NAME as INT8_COPY
from polydraft.models.int8_copy import Int8Copy
from polydraft.models.language_model import LanguageModel
from polydraft.models.placement import TENSOR_PARALLEL, layout_options
from polydraft.models.quantised import is_quantised, quantise, refuse_without_kernels
from polydraft.models.translation import check_same_tokens, check_vocabularies, have_same_numbers, translated

PACKAGES = {
    **{name: name for name in ("torchao", "bitsandbytes", "compressed-tensors", "hqq", "aqlm", "eetq", "auto-round")},
    "gptq": "gptqmodel and optimum",
    "awq": "gptqmodel",
    "quanto": "optimum-quanto",
    **dict.fromkeys(("fp8", "mxfp4", "nvfp4"), "kernels"),
}
"""Packages that transformers needs to load quantised weights, by scheme."""
ALLOWED_TARGETS = f"{BUNDLED}, a folder, a GGUF file, or a hub name"

logger = logging.getLogger(__name__)
if logger.level == logging.NOTSET:  # most programs report progress themselves
    logger.setLevel(logging.WARNING)


def check_name(kind: str, name: str, allowed: str) -> None:
    """Refuse names that cannot be a model's before asking a hub."""
    if not name.strip():
        raise UsageError(f"empty {kind} name; allowed: {allowed}")
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):  # clearly a path
        what = "it is a file, but not in GGUF format" if os.path.isfile(name) else "there is no such folder"
        raise UsageError(f"cannot load {kind} {name!r}: {what}; allowed: {allowed}")


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, end-of-text tokens and generation defaults."""

    model: HFModel
    tokenizer: Any
    """None if a model object came without one."""
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults | None = None
    """The settings in its generation config."""


def load_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    device_map: str | None = None,
    native: bool = True,
    invariant: bool | None = None,
    adapter: str | None = None,
) -> Loaded:
    """Load a model by name: the bundled one, a folder, a GGUF file, a hub name, or one of these inflated.

    Parameters
    ----------
    name : str
    device : torch.device
    dtype : torch.dtype
        With int8 its weights are quantised, see `polydraft.models.quantised`.
    device_map : str, optional
        Spread the model over several devices instead of loading it to `device`, see `polydraft.models.placement`.
    native, invariant : bool
        As for `HFModel`.
    adapter : str, optional
        An adapter to merge into the weights, see `polydraft.models.adapters`.
    """
    _check_combination(name, dtype, device_map, native, adapter)
    if is_inflated(name):
        return _load_inflated(name, device, dtype, native, invariant, adapter)
    source = model_source(name)
    if source is not None:
        if dtype == torch.int8:
            refuse_without_kernels()
        # An adapter is merged before anything is rounded.
        folder = str(converted_folder(source, torch.float32 if dtype == torch.int8 and adapter is not None else dtype))
    else:
        check_name("model", name, ALLOWED_TARGETS)
        folder = name
        check_size(name)
    logger.info("loading %s ...", name)
    with _explained(name, folder, device):
        hf_model, found, tokenizer = _read(name, folder, device, dtype, device_map, converted=source is not None)
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise FailureError(
            f"the weights of model {name!r} lack {len(missing)} of its tensors, such as {missing[0]}; download or save it again"
        )
    if adapter is not None:
        hf_model = with_adapter(hf_model, adapter, name, **hub_options(adapter))
    if dtype == torch.int8 and not is_quantised(hf_model):
        hf_model = quantise(hf_model)
    return _with_defaults(HFModel(hf_model, name, native=native, invariant=invariant), tokenizer)


def _check_combination(name: str, dtype: torch.dtype, device_map: str | None, native: bool, adapter: str | None) -> None:
    """Refuse options that do not go together, and an adapter that cannot work, before anything is loaded."""
    if dtype == torch.int8 and (is_inflated(name) or device_map is not None or not native):
        what = "an inflated target" if is_inflated(name) else "a device map" if native else "native kernels off"
        raise UsageError(f"dtype int8 does not work with {what}; use float32 or bfloat16")
    if adapter is not None:
        check_name("adapter", adapter, ALLOWED)
        check_adapter(adapter)
        if device_map == TENSOR_PARALLEL:
            raise UsageError(f"adapter {adapter!r} does not work with --device-map tp; merge it and save the model first")
    if is_inflated(name) and device_map is not None:
        raise UsageError(f"target {name!r} is built on one device; leave out --device-map {device_map}")


def _read(
    name: str, folder: str, device: torch.device, dtype: torch.dtype, device_map: str | None, converted: bool
) -> tuple[Any, dict[str, Any], Any]:
    """Load a model from a folder or a hub: return it, what transformers says it found, and its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    options = hub_options(folder)
    layout: dict[str, Any] = {} if device_map is None else layout_options(device_map)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # refused with an error
        if converted and device_map is None:
            hf_model, found = load_converted(Path(folder))
        else:
            if not layout and not is_host(device) and scheme_of(AutoConfig.from_pretrained(folder, **options)) is not None:
                layout = {"device_map": {"": device}}  # bitsandbytes and others cannot be moved once they are loaded
            number_type = torch.float32 if dtype == torch.int8 else dtype
            hf_model, found = _pretrained(name, folder, dtype=number_type, **layout, **options)
    hf_model = hf_model if layout else hf_model.to(device)
    tokenizer = load_converted_tokenizer(Path(folder)) if converted else AutoTokenizer.from_pretrained(folder, **options)
    return hf_model, found, tokenizer


@contextmanager
def _explained(name: str, folder: str, device: torch.device) -> Iterator[None]:
    """Turn what transformers raises when it loads a model into errors that say what to do."""
    try:
        yield
    except PolydraftError:
        raise
    except torch.OutOfMemoryError:
        raise FailureError(
            f"model {name!r} does not fit into the memory of {device}; use a smaller dtype or --device cpu"
        ) from None
    except (OSError, ValueError) as error:
        raise cannot_load(name, name_obstacle(folder, error)) from None
    except pickle.UnpicklingError:
        raise FailureError(
            f"cannot read the weights of model {name!r}: they are pickled and hold more than tensors, which could run any "
            "code; save it again with safetensors"
        ) from None
    except (SafetensorError, RuntimeError, EOFError) as error:
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:  # an option of transformers that polydraft does not offer
            reason = "its tensors have other shapes than config.json says"
        raise FailureError(f"cannot read the weights of model {name!r} ({reason}); download or save it again") from None
    except Exception as error:  # tokenizers raise nothing narrower
        raise FailureError(f"cannot load model {name!r} ({first_line(error)}); download or save it again") from None


def load_given(target: Any, tokenizer: Any, native: bool = True, invariant: bool | None = None) -> Loaded:
    """Take a model object of `transformers` or `peft` as it is: on its device, with its adapters."""
    hf_model = given_model(target, "target")
    if any(part.training for part in hf_model.modules()):
        raise in_training("target")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise UsageError(
            f"tokenizer is an object of type {type(tokenizer).__name__}; allowed: a tokenizer of transformers, such as "
            "AutoTokenizer.from_pretrained(NAME), or none for prompts of token ids"
        )
    model = HFModel(hf_model, native=native, invariant=invariant)
    if tokenizer is not None and max(tokenizer.get_vocab().values(), default=0) >= model.vocab_size:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens but target {model.name!r} {model.vocab_size}; pass the target's own"
        )
    return _with_defaults(model, tokenizer)


def _with_defaults(model: HFModel, tokenizer: Any) -> Loaded:
    eos = getattr(model.hf_model.generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None and tokenizer is not None else eos
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Loaded(model, tokenizer, eos_ids, GenerationDefaults(model.hf_model, eos_ids))


def _pretrained(name: str, folder: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model; return it and what transformers says it found.

    If a quantised model fails to load, the error names the package that its scheme needs, the most likely cause.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        scheme = scheme_of(loaded[0].config)
        if scheme is None or getattr(loaded[0], "hf_quantizer", None) is not None:
            return loaded
        # It has ignored the scheme and taken the packed weights for plain numbers.
        reason = f"which transformers {transformers.__version__} does not know"
    except (torch.OutOfMemoryError, OSError, EOFError, SafetensorError, pickle.UnpicklingError):
        raise
    except Exception as error:  # schemes raise anything if their package or a GPU is missing
        scheme = scheme_of(AutoConfig.from_pretrained(folder, local_files_only=True))
        if scheme is None:
            raise
        reason = first_line(error)
    raise UsageError(
        f"cannot load model {name!r}, whose weights are quantised by {scheme} ({reason}); install "
        f"{PACKAGES.get(scheme, 'the package for that')}, or use weights that are not quantised"
    )


def cannot_load(name: str, reason: str) -> UsageError:
    """Return the error for a name that is not a model's."""
    return UsageError(f"cannot load model {name!r}: {reason}; allowed: {ALLOWED_TARGETS}")


def check_size(name: str) -> None:
    """Refuse a folder whose config.json asks for far more weights than its safetensors files hold.

    Transformers would fill all of them with random numbers before it compares shapes, and one wrong size can use up all memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        held = sum(math.prod(shape) for path in Path(name).glob("*.safetensors") for shape in shapes_in(path).values())
        if not held:  # a hub name, or a folder with other files
            return
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            asked: int = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    except Exception:  # loading it reports what is wrong
        return
    packed = 1 if scheme_of(config) is None else 32  # at most: weights of 1 bit in integers of 32 bits
    if asked > 2 * packed * held:  # 2: tables may be shared
        raise FailureError(
            f"cannot read the weights of model {name!r} (its tensors have other shapes than config.json says: it asks for more "
            "weights than the files could hold); download or save it again"
        )


def name_obstacle(folder: str, error: Exception) -> str:
    """Return why a folder or a hub name could not be loaded, given the error."""
    reason = first_line(error)
    if not os.path.isdir(folder):
        there = "does not appear to have" in reason  # the repository exists, but lacks a file
        return f"it is incomplete ({reason})" if there else f"no such folder, and not found on a hub ({reason})"
    return missing_part(folder) or f"the folder holds no loadable model ({reason})"


def missing_part(folder: str) -> str | None:
    """Return which file a model's folder lacks; None if it is complete."""
    names = os.listdir(folder)
    if "config.json" not in names:
        hint = " (its training has not ended: continue it with polydraft train and --resume)" if "training" in names else ""
        return f"its folder has no config.json{hint}"
    if lost := [shard for shard in _shards(folder) if shard not in names]:
        return f"its folder has no {lost[0]}, which holds part of its weights"
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        return "its folder has no weights, such as model.safetensors"
    return None


def _shards(folder: str) -> list[str]:
    """Return the weight files that a folder's index lists; none without an index."""
    for index in Path(folder).glob("*.index.json"):
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return []


def _load_inflated(
    name: str, device: torch.device, dtype: torch.dtype, native: bool, invariant: bool | None, adapter: str | None
) -> Loaded:
    shape, source = parse_inflated(name)
    small = load_model(source, device, dtype, native=native, adapter=adapter)
    try:
        model = InflatedModel(small.model, shape, native=native, invariant=invariant)
    except torch.OutOfMemoryError:
        raise FailureError(f"target {name!r} does not fit into the memory of {device}; use a smaller shape") from None
    return Loaded(model, small.tokenizer, small.eos_token_ids, small.defaults)


def load_draft(name: Any, target: Loaded) -> LanguageModel | Head | None:
    """Load a draft for a target: none, int8, mtp, early-exit:k, a shipped one, a folder, a GGUF file, a hub name or an object.

    A folder or hub name may hold a model, or a head of one of the kinds in `polydraft.models.heads.kinds`.
    """
    if not isinstance(name, str):
        given = given_draft(name)
        check_draft(given, target.model)
        if isinstance(given, Head):
            target.model.tap(given.taps)
        return given
    if name == "none":
        return None
    if name.startswith("early-exit"):
        number = name.removeprefix("early-exit").removeprefix(":")
        if not number.isdigit():
            raise UsageError(f"draft {name!r} has no number of layers; write early-exit:k, such as early-exit:4")
        return early_exit(target.model, int(number))
    if name == INT8_COPY:
        return Int8Copy(target.model)
    folder, kind = head_place(name, target.model.name)
    if kind is not None:
        return kind.load(folder, target.model, target.tokenizer, name)
    return _load_draft_model(name, folder, target)


def _load_draft_model(name: str, folder: Path, target: Loaded) -> LanguageModel:
    """Load a language model as a draft: of some of the target's tokens, or translated if it has another tokenizer."""
    if (source := gguf_source(name)) is not None and target.tokenizer is not None:
        check_vocabularies(target.tokenizer.get_vocab(), vocabulary_of(source), target.model.name, name)
    dtype, native = torch.int8 if target.model.int8 else target.model.dtype, target.model.native
    draft = load_model(name, target.model.device, dtype, native=native, invariant=False)
    vocabulary = load_vocabulary(folder, target.model.vocab_size, target.model.device)
    if vocabulary is not None or target.tokenizer is None:
        check_same_tokens(target, draft)
    elif not have_same_numbers(target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()):
        tokenizers, ends = (target.tokenizer, draft.tokenizer), (target.eos_token_ids, draft.eos_token_ids)
        return translated(draft.model, tokenizers, ends, target.model)
    if vocabulary is None:
        return draft.model
    return HFModel(draft.model.hf_model, name, vocabulary=vocabulary, native=native, invariant=False)
