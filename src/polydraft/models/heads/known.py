"""Finding a draft for a target: a head beside it, one trained for it on this machine, or its checkpoint's MTP layers."""

import json
import logging
import os
from functools import cache
from pathlib import Path

from polydraft.errors import PolydraftError
from polydraft.models.finding import checkpoint_folder, target_sizes
from polydraft.models.fingerprint import digest_of
from polydraft.models.heads.kinds import kind_of
from polydraft.models.heads.mtp_folder import NAME as MTP
from polydraft.models.heads.mtp_folder import check_mtp, mtp_layers
from polydraft.output import cache_root, written_whole

logger = logging.getLogger(__name__)


def known_draft(target: str) -> str | None:
    """Return the folder of a head for a target, or mtp if its own weights have MTP layers; None if nothing is found.

    The head may be in a subfolder of the target's (``head`` first), or in ``NAME-head`` or ``NAME-assistant`` beside the
    target's folder or GGUF file. Heads that do not fit the target are skipped, and the log says why.
    """
    path = Path(target)
    own = path.with_suffix("") if path.is_file() else path
    beside = [own.with_name(f"{own.name}-{kind}") for kind in ("head", "assistant")] if own.name else []
    near = [own / "head", *beside] if path.exists() else []
    inside = sorted(folder.parent for folder in path.glob("*/config.json")) if path.is_dir() else []
    for folder in (*near, *inside, *_remembered(target)):
        if (kind := kind_of(folder)) is None:
            continue
        try:
            if (sizes := target_sizes(target)) is not None:
                kind.check(folder, sizes, str(folder))
            return str(folder)
        except PolydraftError as error:
            _log_once(f"{target} has a head that cannot draft: {error}")
    return MTP if shipped_layers(target)[0] else None


@cache
def _log_once(line: str) -> None:
    """Log a line once, however often a draft is looked for."""
    logger.info(line)


def shipped_layers(target: str) -> tuple[bool, str]:
    """Return whether the MTP layers in a target's checkpoint can draft, and a line about them. No weights are read."""
    folder = checkpoint_folder(target)
    number, promised = (0, 0) if folder is None else mtp_layers(folder)
    sizes = target_sizes(target) if number else None
    if folder is None or sizes is None:
        return False, f"config.json promises {promised} MTP layers, but the weights hold none" if promised else "no MTP layers"
    try:
        check_mtp(folder, sizes, target, arriving=not os.path.isdir(target))
    except PolydraftError as error:
        return False, f"MTP layers that cannot draft: {error}"
    return True, f"MTP layers: {number}" + (", of which the first drafts" if number > 1 else "")


def remember_draft(target: str, folder: Path) -> None:
    """Note in the cache, if it is writable, that a head was trained for a target."""
    if _ignores_this_machine():
        return
    file = _file(target)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as partial:
            partial.write_text(json.dumps({"target": target, "draft": str(folder.resolve())}) + "\n", encoding="utf-8")
    except OSError:
        return


def _remembered(target: str) -> list[Path]:
    if _ignores_this_machine():
        return []
    try:
        return [Path(json.loads(_file(target).read_text(encoding="utf-8"))["draft"])]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _ignores_this_machine() -> bool:
    """Whether nothing that was found out on this machine counts, and nothing is to be noted: so it is for our tests."""
    return os.environ.get("POLYDRAFT_PROFILE") == "none"


def _file(target: str) -> Path:
    path = Path(target)
    name = str(path.resolve()) if path.exists() else target
    return cache_root() / "trained" / f"{digest_of(name)}.json"
