"""Fingerprints of what figures were computed from: the files of a model, or any JSON value."""

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
    """Return the version of polydraft that is installed."""
    try:
        return metadata.version("polydraft")
    except metadata.PackageNotFoundError:  # run from its sources
        return "0"


def model_fingerprint(name: str) -> str | None:
    """Return a hash of the files of a model, without loading it, or None if they are not on this machine.

    A model that was trained or downloaded again has files of another size or time. Drafts made from the target itself have no
    files: their names identify them.
    """
    if name.startswith("early-exit") or name == "int8":
        return name
    path = bundled_source() if name == BUNDLED else SHIPPED_DRAFTS.get(name, Path(name))
    files = _files(path) if os.path.exists(path) else _files(_snapshot(name))
    return digest_of(files) if files else None


def _files(place: Path | None) -> Sequence[tuple[str, int, int]]:
    """Return names, sizes and times of the files in a folder, or of the one file that a GGUF model is."""
    if place is None:
        return []
    folder = place if place.is_dir() else place.parent
    paths = sorted(path for path in folder.rglob("*") if path.is_file()) if place.is_dir() else [place]
    return [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _snapshot(name: str) -> Path | None:
    """Return where a model of the hub was downloaded to."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name of the hub; loading will say so
        return None
    return Path(file).parent if isinstance(file, str) else None
