"""Find the files of targets and heads by name, and check that they fit each other before anything is loaded."""

import os
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED, SHIPPED_DRAFTS, bundled_source
from polydraft.models.gguf import gguf_source
from polydraft.models.gguf.architecture import Architecture
from polydraft.models.gguf.header import read_header
from polydraft.models.heads.head_folder import TargetSizes
from polydraft.models.heads.kinds import HEAD_KINDS, HeadKind, kind_of
from polydraft.models.heads.mtp_folder import NAME as MTP
from polydraft.models.heads.mtp_folder import check_mtp, mtp_layers
from polydraft.models.inflated import is_inflated


def hub_options(name: str) -> dict[str, Any]:
    """Return options for `from_pretrained`: local files only, if the hub's address cannot be resolved.

    Otherwise the hub's client retries for half a minute before it gives up.
    """
    from huggingface_hub import constants, is_offline_mode

    if os.path.isdir(name) or is_offline_mode() or urllib.request.getproxies():  # a proxy resolves addresses itself
        return {}
    address = urlsplit(constants.ENDPOINT)
    try:
        # A port number, because not every machine can look up the service "https".
        socket.getaddrinfo(address.hostname, address.port or (80 if address.scheme == "http" else 443))
    except OSError:
        return {"local_files_only": True}
    return {}


def model_source(name: str) -> Path | None:
    """Return the GGUF file that a model is loaded from: the bundled one, or the one that its name refers to, if any."""
    return bundled_source() if name == BUNDLED else gguf_source(name)


def target_sizes(target: str) -> TargetSizes | None:
    """Return the sizes in a target's config, by the target's name; None if the config cannot be read."""
    from transformers import AutoConfig

    source = model_source(target)
    try:
        if source is not None:
            return TargetSizes(name=target, config=Architecture(source, read_header(source)).model.config)
        config = AutoConfig.from_pretrained(target, **hub_options(target))
        return TargetSizes(name=target, config=config.get_text_config(decoder=True))
    except Exception:  # transformers raises anything if it is not a model
        return None


def checkpoint_folder(target: str) -> Path | None:
    """Return the folder with a target's config and the index of its weights; None if there is none or the hub is offline."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if os.path.isdir(target):
        return Path(target)
    if target.count("/") != 1 or is_inflated(target) or gguf_source(target) is not None:  # not a hub name
        return None
    try:
        cached = try_to_load_from_cache(target, "config.json")
        options = {"local_files_only": True} if isinstance(cached, str) else hub_options(target)
        folder = Path(hf_hub_download(target, "config.json", **options)).parent
        if not (folder / "model.safetensors").exists():
            hf_hub_download(target, "model.safetensors.index.json", **options)
        return folder
    except (OSError, ValueError):
        return None


def head_place(name: str, target: str) -> tuple[Path, HeadKind | None]:
    """Return the folder that a draft's name stands for and the kind of head in it, if any.

    The target's own folder counts as a head if it has MTP layers.
    """
    folder = head_folder(name)
    own = os.path.isdir(name) and os.path.isdir(target) and os.path.samefile(name, target) and mtp_layers(folder)[0] > 0
    if name != MTP and not own:
        return folder, kind_of(folder)
    shipped = checkpoint_folder(target)
    if shipped is None:
        raise UsageError(f"draft {name!r}: target {target!r} is not a checkpoint with safetensors; use another draft")
    return shipped, HEAD_KINDS[MTP]


def head_folder(name: str) -> Path:
    """Return the folder that a draft's name stands for if it is a head: shipped, on a hub, or a path."""
    return SHIPPED_DRAFTS.get(name) or (head_on_hub(name) if name != MTP else None) or Path(name)


def head_on_hub(name: str) -> Path | None:
    """Download the head with this hub name and return its folder; None if there is none or it is another kind of model."""
    from huggingface_hub import hf_hub_download, snapshot_download

    if os.path.isdir(name) or not name.strip() or name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        return None
    try:
        options = hub_options(name)
        config = Path(hf_hub_download(name, "config.json", **options))
        if kind_of(config.parent) is None:
            return None
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **options))
    except (OSError, ValueError):  # loading it as a model reports what is wrong
        return None


def check_draft_name(name: str, target: str) -> None:
    """Refuse an incomplete head, or one for another target, before the target is loaded.

    If the target's config cannot be read, nothing is refused: loading the target reports what is wrong.
    """
    if name in SHIPPED_DRAFTS or is_inflated(target):
        return
    folder, kind = head_place(name, target)
    if kind is None or (sizes := target_sizes(target)) is None:
        return
    if name == MTP:
        check_mtp(folder, sizes, name, arriving=not os.path.isdir(target))
    else:
        kind.check(folder, sizes, name)
