"""Output files that are either complete or absent, and folders of work that can be resumed."""

import errno
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polydraft.errors import FailureError, UsageError

_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{16}")
"""The hidden names that `partial_beside` makes."""
_LONGEST_NAME = 100
_YOUNG_SECONDS = 60
"""Age below which a folder may not be locked yet."""
_POLL_SECONDS = 0.2


@contextmanager
def partial_beside(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path, in a folder that exists, for unfinished output; remove what is left there at the end.

    The name is on the same file system, so that it can be renamed to `path`, and different for every writer. Nothing exists
    there yet, so output gets the usual permissions of new files.
    """
    partial = path.with_name(f".{path.name[:_LONGEST_NAME]}.{uuid.uuid4().hex[:16]}")
    try:
        yield partial
    finally:
        with suppress(OSError):  # the caller must see the error of the block, not this one
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder beside a path, to be renamed to it; it is locked during the block, and removed if it is left.

    A killed process leaves its folder behind; the next writer of the same path removes it.
    """
    remove_leftovers(path.parent, path.name[:_LONGEST_NAME])
    with partial_beside(path) as partial:
        partial.mkdir()
        lock, _ = _lock(partial)
        try:
            yield partial
        finally:
            if lock is not None:
                os.close(lock)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove the partial folders that dead writers of this name have left in a folder."""
    with suppress(OSError):
        for leftover in list(folder.iterdir()):
            found = _PARTIAL.fullmatch(leftover.name)
            if found is None or found[1] != name or leftover.is_symlink() or not leftover.is_dir():
                continue
            if time.time() - leftover.stat().st_mtime < _YOUNG_SECONDS or (lock := _lock(leftover)[0]) is None:
                continue
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> tuple[int | None, bool]:
    """Lock a folder; return an open descriptor that holds the lock, or None, and whether another process holds it."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None, False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return None, error.errno in (errno.EAGAIN, errno.EACCES)
    return descriptor, False


@contextmanager
def locked(folder: Path, waiting: Callable[[], None] | None) -> Iterator[bool]:
    """Lock a folder that exists against other processes, and yield whether that worked: some folders cannot be locked.

    If another process holds the lock, call `waiting` once, then wait for the lock; without `waiting`, go on without the lock.
    """
    lock, taken = _lock(folder)
    if taken and waiting is not None:
        waiting()
        while lock is None and folder.exists():
            time.sleep(_POLL_SECONDS)
            lock, _ = _lock(folder)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a name to write to; at the end of the block, that file replaces `path`, in a folder that exists.

    After an exception or a kill, `path` is unchanged; only a kill leaves a hidden partial file behind. Of several writers, the
    last to finish wins.
    """
    path = Path(os.path.realpath(path))  # replace the target of a link, not the link
    if path.exists() and not path.is_file():  # write to a pipe or device instead of replacing it
        yield path
        return
    with partial_beside(path) as partial:
        yield partial
        os.replace(partial, path)


def write_text(path: Path, text: str, *, remedy: str = "what was measured is in runs.jsonl") -> None:
    """Write a file, completely or not at all, in a folder that exists.

    Raises
    ------
    FailureError
        If it cannot be written; the message ends in the remedy.
    """
    try:
        with written_whole(path) as partial:
            # Unpaired surrogates, which byte-level tokenizers may produce, become question marks.
            partial.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise FailureError(f"cannot write {path} ({error.strerror}); {remedy}") from None


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that cannot be written to, before anything is loaded.

    Raises
    ------
    UsageError
        If it holds a benchmark that is not to be resumed, or cannot be written to.
    """
    try:
        if not resume and (folder / "runs.jsonl").exists():
            raise UsageError(f"{folder} already holds a benchmark; pass --resume to continue it, or choose another --out")
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(prefix=".polydraft-", dir=there):  # writing is the only reliable test
            pass
    except OSError as error:
        raise cannot_write(folder, error) from None


def check_empty(folder: Path, *, remedy: str = "choose another --out") -> None:
    """Refuse a folder that is not empty or cannot be written to, before anything is loaded."""
    check_folder(folder, resume=True)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; {remedy}")


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is loaded."""
    parent = file.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {parent}; create it, or choose another file")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder; choose another file")


def cannot_write(out: Path, error: OSError) -> UsageError:
    """Return the error for a folder or file that cannot be written to."""
    return UsageError(f"cannot write to {out} ({error.strerror}); choose another --out")


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings with which work in a folder was started."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise FailureError(
            f"cannot read {path} ({error}), the settings that this was started with; restore it, or choose another --out"
        ) from None
    return settings


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path, free: set[str]) -> None:
    """Refuse to resume work that was started with other settings, except for those that are `free` to change."""
    changed = [key for key in sorted({*before, *now} - free) if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise UsageError(
            f"{folder} was started with {key}={before.get(key)!r}, not {now.get(key)!r}; use the same settings to resume, "
            "or choose another --out"
        )


def keep_settings(file: Path, settings: dict[str, Any], folder: Path, *, resume: bool, free: set[str]) -> None:
    """Write the settings of work in a folder to a file; on resuming, only those that are `free` may have changed."""
    written = json.loads(json.dumps(settings))
    if resume and file.exists():
        check_same(read_settings(file), written, folder, free)
    with written_whole(file) as partial:
        partial.write_text(json.dumps(written, indent=1))


def cache_root() -> Path:
    """Return the cache folder: `POLYDRAFT_CACHE`, or `polydraft` in the user's cache folder."""
    if chosen := os.environ.get("POLYDRAFT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polydraft"
