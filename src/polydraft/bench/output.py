"""Writing files that are whole or not there at all."""

import os
from pathlib import Path

from polydraft.errors import FailureError


def write_text(path: Path, text: str, *, remedy: str = "what was measured is in runs.jsonl") -> None:
    """Write a file, in a folder that exists.

    Raises
    ------
    FailureError
        If it cannot be written, with the remedy; of a benchmark the journal is there already.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Half of a surrogate pair, which a byte-level tokenizer can produce, has no UTF-8: it becomes a question mark.
        partial.write_bytes(text.encode("utf-8", "replace"))
        os.replace(partial, path)
    except OSError as error:
        raise FailureError(f"cannot write {path} ({error.strerror}); {remedy}") from None
