"""Files and folders that are whole or not there at all: written under another name, then put in their place."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def partial_beside(path: Path) -> Iterator[Path]:
    """Lend a name beside a path for what is not ready yet, and remove what is left under it.

    Parameters
    ----------
    path : Path
        Its folder exists.

    Yields
    ------
    Path
        A hidden name on the same file system, so that it can be renamed to `path`, and one that no other writer is given.
        Nothing is there yet: what is written has the permissions that any new file has.
    """
    partial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:16]}")
    try:
        yield partial
    finally:
        with suppress(OSError):  # what made the block fail is what the caller must hear of
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Lend a name to write a file under, which takes the place of `path` at the end of the block.

    An exception in the block leaves the old file, or none, and nothing beside it. After a kill the old file is there too;
    what had been written stays under its hidden name. Of several writers the last to end wins.

    Parameters
    ----------
    path : Path
        Its folder exists.

    Yields
    ------
    Path
        Where to write.
    """
    path = Path(os.path.realpath(path))  # of a link, what it points to
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        yield path
        return
    with partial_beside(path) as partial:
        yield partial
        os.replace(partial, path)


def cache_root() -> Path:
    """Return the folder for what is made once: `POLYDRAFT_CACHE`, or `polydraft` in the user's cache folder."""
    if chosen := os.environ.get("POLYDRAFT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polydraft"
