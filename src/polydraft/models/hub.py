"""Names on the Hugging Face hub, and what to do about them where there is no network."""

import os
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from polydraft.errors import UsageError


def hub_options(name: str) -> dict[str, Any]:
    """Return how `from_pretrained` shall look for a model: where the hub's address is unknown, among what is on disk only.

    The hub's client would try again and again, for half a minute, before it says that a name cannot be had.
    """
    from huggingface_hub import constants, is_offline_mode

    if os.path.isdir(name) or is_offline_mode() or urllib.request.getproxies():  # a proxy knows its own addresses
        return {}
    address = urlsplit(constants.ENDPOINT)
    try:
        # By number: not every machine has a list of services to look "https" up in.
        socket.getaddrinfo(address.hostname, address.port or (80 if address.scheme == "http" else 443))
    except OSError:
        return {"local_files_only": True}
    return {}


def check_name(kind: str, name: str, allowed: str) -> None:
    """Refuse what cannot be the name of a model before a hub is asked for it."""
    if not name.strip():
        raise UsageError(f"empty {kind} name; allowed: {allowed}")
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):  # surely a path
        raise UsageError(f"cannot load {kind} {name!r}: there is no such folder; allowed: {allowed}")
