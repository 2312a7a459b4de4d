"""Fingerprints of models and settings, kept with measured figures so that stale ones are noticed."""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from polydraft.models.bundled import BUNDLED, SHIPPED_DRAFTS, bundled_source


def digest_of(value: Any) -> str:
    """Return a short hash of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def package_version() -> str:
    """Return the installed version of polydraft."""
    try:
        return metadata.version("polydraft")
    except metadata.PackageNotFoundError:  # run from source
        return "0"


def model_fingerprint(name: str) -> str | None:
    """Return a hash of a model's files without reading them, or None if they are not on this machine.

    A model that was trained or downloaded again has files of another size or time. Drafts made from the target itself have no
    files; they are identified by name.
    """
    if name.startswith("early-exit") or name == "int8":
        return name
    path = bundled_source() if name == BUNDLED else SHIPPED_DRAFTS.get(name, Path(name))
    files = _files(path) if os.path.exists(path) else _files(_snapshot(name))
    return digest_of(files) if files else None


def _files(place: Path | None) -> Sequence[tuple[str, int, int]]:
    """Return names, sizes and times of the files in a folder, or of a single GGUF file."""
    if place is None:
        return []
    folder = place if place.is_dir() else place.parent
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if place.is_dir() else [place]
    return [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _snapshot(name: str) -> Path | None:
    """Return the folder that a model was downloaded to from the hub, if it was."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a hub name; loading will say so
        return None
    return Path(file).parent if isinstance(file, str) else None
