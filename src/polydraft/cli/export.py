"""`polydraft export`."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from polydraft.cli.options import machine_options, placed
from polydraft.cli.terminal import announce_start
from polydraft.errors import UsageError
from polydraft.output import cannot_write, check_folder, partial_folder


@click.group("export")
def command() -> None:
    """Export a draft for other engines."""


@command.command("head", short_help="Export a feature head.")
@click.argument("folder", metavar="HEAD")
@click.option(
    "--format", "form", type=click.Choice(["speculators"]), required=True, help="Format to write: vLLM's speculators (EAGLE-3)."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the exported head.")
@click.option("--target", help="Target model of the head  [default: the one it was trained for].")
@click.option("--verifier", help="Name or folder of the target where the head will be used  [default: the same as --target].")
@machine_options(dtype={"help": "Number format: auto, float32 or bfloat16."})
def head(
    folder: str, form: str, out: Path, target: str | None, verifier: str | None, device: str, dtype: str, threads: int | None
) -> None:
    """Export the feature head HEAD (a folder or a name), so that other engines can load it and compute the same logits.

    Prints to standard error what the format cannot express.
    """
    check_folder(out, resume=False)
    if out.exists():
        raise UsageError(f"--out {out} already exists; choose another --out")
    announce_start()

    from polydraft.models import FeatureHead
    from polydraft.models.bundled import BUNDLED, bundled_folder
    from polydraft.models.heads.head_export import export_speculators
    from polydraft.models.loading import load_draft, load_model

    place = placed(device, dtype, threads)
    with _new_folder(out) as partial:
        name = target or _trained_for(folder)
        loaded = load_model(name, *place)
        draft = load_draft(folder, loaded)
        if not isinstance(draft, FeatureHead):
            raise UsageError(f"{folder} is not a feature head; give a folder made by: polydraft train head")
        found = verifier or (str(bundled_folder()) if name == BUNDLED else name)
        notes = export_speculators(draft, loaded.model, found, partial)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"head written to {out}, for the target {found}")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` at the end of the block; fail at once if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(out) as partial:
            yield partial
            os.replace(partial, out)
    except OSError as error:
        raise cannot_write(out, error) from None


def _trained_for(folder: str) -> str:
    """Return the target that a head was trained for."""
    from polydraft.models.bundled import SHIPPED_DRAFTS

    try:
        config: Any = json.loads((SHIPPED_DRAFTS.get(folder, Path(folder)) / "config.json").read_text(encoding="utf-8"))
        name = config.get("trained_for")
    except (OSError, ValueError, AttributeError):
        name = None
    if name is None and folder not in SHIPPED_DRAFTS and not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder}, so its target is unknown; check the name, or pass --target NAME")
    if not isinstance(name, str):
        raise UsageError(f"{folder} does not say which target it was trained for; pass --target NAME")
    return name
