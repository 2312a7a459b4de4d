"""Text files of any size, a block at a time."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from polydraft.errors import UsageError

BLOCK = 1 << 18
"""Characters read in one go."""


def check_text_file(file: Path) -> None:
    """Refuse what is no file, before hours are spent on others."""
    if not file.is_file():
        raise UsageError(f"cannot read {str(file)!r}: there is no such file; allowed: UTF-8 text, plain or gzipped (.gz)")


def blocks_of(file: Path, block: int = BLOCK, advance: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the text of a file in blocks that end with a line, or after two blocks' length where lines are longer.

    `advance` is told how many of the file's bytes have been read.
    """
    check_text_file(file)
    try:
        with file.open("rb") as raw:
            source = gzip.open(raw) if file.suffix == ".gz" else raw  # noqa: SIM115 (the wrapper closes it)
            # Universal newlines would hide a carriage return that the target will see; texts keep theirs.
            with io.TextIOWrapper(source, encoding="utf-8", newline="") as opened:
                while text := opened.read(block):
                    yield text if text.endswith("\n") else text + opened.readline(block)
                    if advance:
                        advance(raw.tell())
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {str(file)!r}: it is no UTF-8 text (byte {error.start} of a block)") from None
    except (OSError, EOFError, zlib.error) as error:
        kind = "gzipped text" if file.suffix == ".gz" else "text"
        raise UsageError(f"cannot read {str(file)!r} as {kind} ({error}); get another copy") from None
