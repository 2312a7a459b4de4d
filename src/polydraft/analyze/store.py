"""Collected laws on disk: asking for another scheme needs no model."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polydraft.analyze.fingerprint import digest_of
from polydraft.analyze.laws import Laws
from polydraft.atomic import written_whole

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAMES = ("target", "draft", "prompt")


class LawStore:
    """Keep laws by what they were computed from.

    A file says in its header what it was made of and what its numbers sum up to. One that says anything else, or cannot be
    read to the end, is not there for all purposes, and is written anew.

    Parameters
    ----------
    folder : Path
        Made when something is kept.
    most_bytes : int, optional
        Remove the oldest files beyond that; none if not given.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def file(self, origin: dict[str, Any]) -> Path:
        """Return where the laws of an origin are kept."""
        return self._folder / f"laws-{digest_of(origin)}.safetensors"

    def load(self, origin: dict[str, Any]) -> Laws | None:
        """Return the laws of an origin, or None where they are not kept, or not whole."""
        file = self.file(origin)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
                target_RV, draft_RV, prompt_R = (opened.get_tensor(name) for name in _NAMES)
        except (OSError, SafetensorError, ValueError) as error:
            logger.info("%s cannot be read (%s): collecting its laws again", file, str(error).splitlines()[0])
            return None
        if header != _header(origin, target_RV, draft_RV, prompt_R):
            logger.info("%s does not hold what it should: collecting its laws again", file)
            return None
        return Laws(target_RV, draft_RV, prompt_R)

    def save(self, origin: dict[str, Any], laws: Laws) -> None:
        """Keep laws, whole or not at all; where there is no room for them, they are not kept."""
        tensors = [tensor.contiguous() for tensor in (laws.target_RV, laws.draft_RV, laws.prompt_R)]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self.file(origin)) as partial:
                save_file(dict(zip(_NAMES, tensors, strict=True)), partial, _header(origin, *tensors))
            self._make_room()
        except (OSError, SafetensorError) as error:
            logger.info("laws are not kept: cannot write to %s (%s)", self._folder, error)

    def _make_room(self) -> None:
        if self._most_bytes is None:
            return
        newest_first = sorted(self._folder.glob("laws-*.safetensors"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        kept = 0
        for file in newest_first:
            kept += file.stat().st_size
            if kept > self._most_bytes and file is not newest_first[0]:
                file.unlink(missing_ok=True)


def _header(origin: dict[str, Any], *tensors: Tensor) -> dict[str, str]:
    """Say what the numbers were computed from, and what they sum up to."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.numpy().tobytes())
    return {"format": str(_FORMAT), "origin": json.dumps(origin, sort_keys=True), "checksum": checksum.hexdigest()}
