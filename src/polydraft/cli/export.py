"""`polydraft export`."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from polydraft.cli.options import machine_options, prepare
from polydraft.errors import UsageError
from polydraft.output import cannot_write, check_folder, partial_beside


@click.group("export")
def command() -> None:
    """Write a draft for other engines."""


@command.command("head")
@click.argument("folder", metavar="HEAD")
@click.option("--format", "form", type=click.Choice(["speculators"]), required=True, help="vLLM's speculators (EAGLE-3).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the head, which is not there yet.")
@click.option("--target", help="Model that the head is for  [default: the one it was trained for].")
@click.option("--verifier", help="Name or folder of the target where the head will be used  [default: that of --target].")
@machine_options(device={"help": "auto, cpu, cuda, cuda:1, ..."}, dtype={"help": "auto, float32, bfloat16."})
def head(
    folder: str, form: str, out: Path, target: str | None, verifier: str | None, device: str, dtype: str, threads: int | None
) -> None:
    """Write the feature head in the folder HEAD, or of this name, so that others load it and compute the same logits.

    What the format cannot say is printed.
    """
    check_folder(out, resume=False)
    if out.exists():
        raise UsageError(f"--out {out} is there already; choose another --out")

    from polydraft.models import FeatureHead
    from polydraft.models.bundled import BUNDLED, bundled_folder
    from polydraft.models.head_export import export_speculators
    from polydraft.models.loading import load_draft, load_model
    from polydraft.models.placement import resolve_device, resolve_dtype

    prepare(threads)
    with _new_folder(out) as partial:
        name = target or _trained_for(folder)
        place = resolve_device(device)
        loaded = load_model(name, place, resolve_dtype(dtype, place))
        draft = load_draft(folder, loaded)
        if not isinstance(draft, FeatureHead):
            raise UsageError(f"{folder} is no feature head; export takes a folder made by: polydraft train head")
        found = verifier or (str(bundled_folder()) if name == BUNDLED else name)
        notes = export_speculators(draft, loaded.model, found, partial)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"head written to {out}, for the target {found}")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Lend a folder to write into, which is `out` at the end of the block; refuse at its start where nothing can be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial_beside(out) as partial:
            partial.mkdir()
            yield partial
            os.replace(partial, out)
    except OSError as error:
        raise cannot_write(out, error) from None


def _trained_for(folder: str) -> str:
    """Return the target that a head says it was trained for."""
    from polydraft.models.bundled import SHIPPED_DRAFTS

    try:
        config: Any = json.loads((SHIPPED_DRAFTS.get(folder, Path(folder)) / "config.json").read_text(encoding="utf-8"))
        name = config.get("trained_for")
    except (OSError, ValueError, AttributeError):
        name = None
    if not isinstance(name, str):
        raise UsageError(f"{folder} does not say which target it was trained for; pass --target NAME")
    return name
