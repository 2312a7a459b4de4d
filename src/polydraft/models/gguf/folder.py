"""Converted GGUF files in the cache: found by content, converted once, by one process at a time, and resumable.

A folder is complete once it has its manifest, which is written last. Every other file is complete or absent, too, so the next
process can continue after an interruption. Abandoned folders are removed after a week.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from polydraft.devices import dtype_name
from polydraft.errors import FailureError, UsageError
from polydraft.models.gguf.architecture import Architecture
from polydraft.models.gguf.conversion import Conversion
from polydraft.models.gguf.header import read_header
from polydraft.models.gguf.shards import SHARD_BYTES, write_index
from polydraft.models.gguf.tokenizer import check_tokenizer, write_tokenizer
from polydraft.output import cache_root, locked, written_whole

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_VERSION = 3
"""Increased when existing folders must be converted again."""
_SAMPLE = 1 << 20
"""Bytes at either end of a file that identify it, together with its size."""
_KEPT_SECONDS = 7 * 24 * 3600
"""How long the files of an interrupted conversion are kept."""
_REMEDY = "set POLYDRAFT_CACHE to another folder"


def gguf_source(name: str) -> Path | None:
    """Return the GGUF file that a name refers to: the file itself, or the only one in a folder without a config.json."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise UsageError(f"cannot load model {name!r}: there is no such file; name a GGUF file or a folder with one")
        return path
    if not os.path.isdir(path) or (path / "config.json").exists():  # not Path.is_dir, which raises if a name is too long
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise UsageError(f"folder {name!r} has {len(files)} GGUF files ({names}); name one of them, such as {files[0]}")
    return files[0] if files else None


def converted_folder(source: Path, dtype: torch.dtype) -> Path:
    """Return the folder with a GGUF file's model in a number format, converting it the first time."""
    folder = _folder(source, dtype)
    _tidy(folder.parent)
    if not is_complete(folder):
        convert(source, folder, dtype)
    return folder


def is_converted(source: Path, dtype: torch.dtype) -> bool:
    """Whether a GGUF file was already converted to a number format."""
    return is_complete(_folder(source, dtype))


def _folder(source: Path, dtype: torch.dtype) -> Path:
    kind = dtype_name(dtype)
    return cache_root() / "gguf" / f"{source.stem[:80]}-{_fingerprint(source)}-{kind}"


def is_complete(folder: Path) -> bool:
    """Whether a folder has all files in its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"].items()
        return manifest["version"] == _VERSION and all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def convert(source: Path, folder: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> None:
    """Convert a GGUF file into a folder, or continue an interrupted conversion.

    Files that cannot be used are refused by their headers, before anything is written.

    Parameters
    ----------
    shard_bytes : int
        Size above which a new file of weights is started: an interruption loses at most this much.
    """
    header = read_header(source)
    check_tokenizer(source, header)
    kinds = Counter(tensor.type for tensor in header.tensors.values() for _ in tensor.shape[1:])
    kind, billions = ", ".join(name for name, _ in kinds.most_common(2)), header.num_weights / 1e9
    logger.info("%s: %s, %.1fB weights in %s, %d tokens", source.name, header.architecture, billions, kind, len(header.tokens))
    architecture = Architecture(source, header)
    conversion = Conversion(source, architecture, dtype, shard_bytes)
    _make_writable(folder)
    with locked(folder, lambda: logger.info("another process is converting %s; waiting for it ...", source.name)):
        if is_complete(folder):
            return
        _remove_partial(folder)
        there = {path.name: path.stat().st_size for path in folder.iterdir()}
        left = [shard for shard in conversion.shards if there.get(shard.file) != shard.num_bytes]
        needed = sum(shard.num_bytes for shard in left)
        _check_space(source, folder, needed)
        done = conversion.num_bytes - needed
        size = _gigabytes(conversion.num_bytes) + (f", {_gigabytes(done)} of it there already" if done else "")
        logger.info("converting %s, once: %s in %s (POLYDRAFT_CACHE) ...", source.name, size, folder)
        try:
            write_tokenizer(header, folder)
            _write_config(architecture.config, architecture.model, folder, dtype)
            with _progress_bar(needed) as bar:
                for shard in left:
                    conversion.write(shard, folder, bar.update)
            if dtype != torch.int8:
                write_index(folder, conversion.shards)
            _write_manifest(folder, source, dtype)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            reason = f"could not convert {source.name} into {folder} ({error.strerror or error})"
            raise FailureError(f"{reason}; free some space, or {_REMEDY}") from None


def _make_writable(folder: Path) -> None:
    """Create a folder; refuse one that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # the only reliable test is to write
            pass
    except OSError as error:
        raise FailureError(f"cannot write to {folder.parent} ({error.strerror}); {_REMEDY}") from None


def _check_space(source: Path, folder: Path, needed: int) -> None:
    """Refuse a conversion that would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < 1.02 * needed:
        shutil.rmtree(folder, ignore_errors=True)
        raise FailureError(
            f"{source.name} needs {_gigabytes(needed)} ({needed} bytes) in {folder.parent}, where {_gigabytes(free)} are "
            f"free; set POLYDRAFT_CACHE to a folder with more space"
        )


def _progress_bar(total: int) -> Any:
    """Return a progress bar, which shows only on terminals."""
    from tqdm import tqdm

    hidden = sys.stderr is None or not sys.stderr.isatty()
    return tqdm(total=total, unit="B", unit_scale=True, desc="converting", leave=False, disable=hidden)


def _write_config(config: Any, model: Any, folder: Path, dtype: torch.dtype) -> None:
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32 if dtype == torch.int8 else dtype
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _write_manifest(folder: Path, source: Path, dtype: torch.dtype) -> None:
    whole = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != MANIFEST)
    files = {path.name: path.stat().st_size for path in whole}
    found = source.stat()
    manifest = {
        "version": _VERSION,
        "format": dtype_name(dtype),
        "source": {"name": source.name, "bytes": found.st_size, "modified": found.st_mtime_ns, "digest": _fingerprint(source)},
        "files": files,
    }
    with written_whole(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _remove_partial(folder: Path) -> None:
    """Remove the partial files of killed processes. The folder must be locked."""
    with suppress(OSError):
        for path in folder.glob(".*"):
            path.unlink(missing_ok=True)


def _tidy(root: Path) -> None:
    """Remove the partial files of killed processes, and folders abandoned long ago."""
    with suppress(OSError):
        for folder in [path for path in root.iterdir() if path.is_dir() and not (path / MANIFEST).exists()]:
            with locked(folder, None) as held:
                if held and time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
                elif held:
                    _remove_partial(folder)


def _fingerprint(source: Path) -> str:
    """Return a hash of a file's size and of its first and last bytes, which identifies it under any name."""
    size = source.stat().st_size
    with source.open("rb") as file:
        head = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        return hashlib.sha256(b"%d|%d|%b%b" % (_VERSION, size, head, file.read())).hexdigest()[:12]


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"
