"""Models in GGUF files: made into folders that `transformers` reads quickly, once, in the cache."""

import hashlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch

from polydraft.errors import FailureError, UsageError
from polydraft.models.gguf_header import GgufHeader, read_header
from polydraft.output import cache_root, partial_folder, remove_leftovers

logger = logging.getLogger(__name__)

_SAMPLE = 1 << 20
"""Bytes at either end of a file that, with its size, tell it from others."""
_MANY_TOKENS = 100_000
"""From so many on, transformers takes minutes to find the merges that a file's scores mean."""
_CONVERSION = 2
"""Counts up when folders that were made before are to be made again."""


def gguf_source(name: str) -> Path | None:
    """Return the GGUF file that a name stands for: the file itself, or the only one in a folder without a config.json."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise UsageError(f"cannot load model {name!r}: there is no such file; name a GGUF file or a folder with one")
        return path
    if not os.path.isdir(path) or (path / "config.json").exists():  # of names longer than any, Path.is_dir raises
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise UsageError(f"folder {name!r} has {len(files)} GGUF files ({names}); name one of them, such as {files[0]}")
    return files[0] if files else None


def converted_folder(source: Path, dtype: torch.dtype) -> Path:
    """Return a folder with a GGUF file's model in a number format, converting it the first time."""
    remove_leftovers(cache_root())  # of gigabytes each, which nobody sees
    kind = str(dtype).removeprefix("torch.")
    folder = cache_root() / f"{source.stem[:80]}-{_fingerprint(source)}-{kind}"
    if not (folder / "config.json").exists():
        convert(source, folder, dtype)
    return folder


def convert(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Dequantise into a temporary folder, then rename: what is there is whole.

    A file that cannot be used is refused by its header, before anything is written.
    """
    _check_packages(source)
    header = read_header(source)
    needed = header.num_weights * dtype.itemsize
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = stack.enter_context(partial_folder(folder))
        except OSError as error:
            reason = f"cannot write to {folder.parent} ({error.strerror})"
            raise FailureError(f"{reason}; set POLYDRAFT_CACHE to another folder") from None
        if (free := shutil.disk_usage(folder.parent).free) < 1.02 * needed:
            raise FailureError(
                f"{source.name} needs {_gigabytes(needed)} in {folder.parent}, where {_gigabytes(free)} are free; set "
                "POLYDRAFT_CACHE to a folder with more"
            )
        logger.info("converting %s, once: %s in %s ...", source.name, _gigabytes(needed), folder)
        try:
            with _progress_bars():
                _save(source, header, partial, dtype)
            if not (folder / "config.json").exists():  # another process may have been faster
                os.replace(partial, folder)
        except OSError as error:
            raise FailureError(f"could not convert {source.name} into {folder}: {error}") from None
        except Exception as error:  # of architectures that are not known there; tokenizers raise nothing narrower
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"transformers cannot read {source.name} ({reason}); use the model in its own format") from None


def vocabulary_of(source: Path) -> dict[str, int]:
    """Return the tokens of a GGUF file, by its header; converted, a few may be spelled otherwise."""
    _check_packages(source)
    return read_header(source).vocabulary


def _check_packages(source: Path) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"reading {source.name} needs the package {module}; get it with: pip install 'polydraft[gguf]'")


def _save(source: Path, header: GgufHeader, folder: Path, dtype: torch.dtype) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.name}
    # Newer releases may keep weights in the file's blocks, for kernels that not every machine has.
    if (config_class := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = config_class(dequantize=True)
    logger.info("reading its weights ...")
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, **options)
    # Otherwise save_pretrained refuses: it takes the dequantised weights for quantised ones.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    logger.info("writing them ...")
    model.save_pretrained(folder)
    large = model.config.get_text_config().vocab_size > _MANY_TOKENS
    logger.info("making its tokenizer%s ...", ", which takes minutes for a vocabulary as large as this" if large else "")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _add_ends(tokenizer, header)
    tokenizer.save_pretrained(folder)


def _add_ends(tokenizer: Any, header: GgufHeader) -> None:
    """Let a tokenizer begin and end texts as its file says; transformers does not read that.

    Gemma without its first token repeats one word for ever.
    """
    for end in ("bos", "eos"):
        said = header.fields.get(f"tokenizer.ggml.add_{end}_token")
        if said is not None and getattr(tokenizer, f"{end}_token") is not None:
            setattr(tokenizer, f"add_{end}_token", bool(said))


def _fingerprint(source: Path) -> str:
    """Return what tells a file from others, whatever it is called and wherever it is."""
    size = source.stat().st_size
    with source.open("rb") as file:
        head = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        return hashlib.sha256(b"%d|%d|%b%b" % (_CONVERSION, size, head, file.read())).hexdigest()[:12]


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"


@contextmanager
def _progress_bars() -> Iterator[None]:
    """Show how far loading and saving are, even where commands keep such bars off the screen; in a file they are illegible."""
    from tqdm.std import tqdm
    from transformers.utils import logging as transformers_logging

    shown, usual = transformers_logging.is_progress_bar_enabled(), tqdm.__init__
    transformers_logging.enable_progress_bar()
    if sys.stderr is None or not sys.stderr.isatty():
        tqdm.__init__ = partialmethod(usual, disable=True)  # one of these bars asks nobody
    try:
        yield
    finally:
        tqdm.__init__ = usual
        if not shown:
            transformers_logging.disable_progress_bar()
