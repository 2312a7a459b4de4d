"""Writing files that are whole or not there at all."""

from pathlib import Path

from polydraft.atomic import written_whole
from polydraft.errors import FailureError


def write_text(path: Path, text: str, *, remedy: str = "what was measured is in runs.jsonl") -> None:
    """Write a file, in a folder that exists.

    Raises
    ------
    FailureError
        If it cannot be written, with the remedy; of a benchmark the journal is there already.
    """
    try:
        with written_whole(path) as partial:
            # Half of a surrogate pair, which a byte-level tokenizer can produce, has no UTF-8: it becomes a question mark.
            partial.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise FailureError(f"cannot write {path} ({error.strerror}); {remedy}") from None
