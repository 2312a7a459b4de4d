"""Options of a server, described and checked once. This module does not import torch."""

import stat
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args

from polydraft.errors import UsageError, check_ranges, shown

_FORMATS = Literal["text", "json"]


def is_local(host: str) -> bool:
    """Whether a host name or address is local; a name may have capitals, and end in a dot."""
    name = host.lower().removesuffix(".")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """Return an address, with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Server."""

    host: str = "127.0.0.1"
    """Address to listen on; unless it is local, --api-keys or --open is required."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_keys: Path | None = None
    """File with one API key per line; every request must then send one of them."""
    open: bool = False
    """Accept requests from other machines without API keys."""
    model_name: str | None = None
    """Model name that clients ask for  [default: the target's name]."""
    model_alias: tuple[str, ...] = ()
    """Another name that clients may ask for; may be given several times."""
    slots: int = 8
    """Texts to generate at the same time."""
    other_slots: int | None = None
    """More slots, for texts with a grammar, prediction or own tree, or without drafts  [default: as many as --slots]."""
    own_trees: bool = True
    """Let requests choose their own trees, and reserve memory for these."""
    slot_tokens: int | None = None
    """Most tokens per text, including its prompt  [default: as many as the model reads and memory allows, at most 16384]."""
    cache_gb: float | None = None
    """Gigabytes that all texts share and take as they grow; when they run out, new texts wait, and the youngest are stopped,
    to be read again later  [default: a quarter of the free memory, at most 4; on a GPU, each slot reserves --slot-tokens]."""
    prefix_gb: float | None = None
    """Gigabytes for beginnings that texts share, such as system prompts and conversations; 0 keeps none  [default: an eighth of
    the free memory, at most 1; a quarter on a GPU]."""
    share_prefixes: bool = False
    """Let requests with different API keys share beginnings; the speed of answers then reveals what others have sent."""
    max_queue: int = 64
    """Most texts waiting for a slot; further requests are refused with status 429."""
    max_choices: int = 16
    """Most texts per request."""
    max_body_bytes: int = 2**20
    """Largest request, in bytes."""
    chunk_tokens: int = 256
    """Most prompt tokens to read between two rounds."""
    stall_seconds: float = 0.1
    """Longest time to read prompts between two rounds of running texts; it is never less than one round."""
    request_seconds: float = 600.0
    """Longest time from the arrival of a request to the end of its answer."""
    client_seconds: float = 30.0
    """Longest time a client may take to send its request, or may leave its answer unread."""
    drain_seconds: float = 60.0
    """Time for running answers to finish after SIGTERM."""
    cors: tuple[str, ...] = ()
    """Origin of web pages that may send requests, such as https://example.org; may be given several times."""
    warm_up: bool | None = None
    """Capture and time rounds for texts of usual lengths before accepting requests  [default: on a GPU only]."""
    log_format: _FORMATS = "text"
    """Format of the log: lines of text, or a JSON object per line."""
    log_texts: bool = False
    """Log prompts and answers, not only their sizes."""

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not is_local(self.host) and self.api_keys is None and not self.open:
            raise UsageError(
                f"--host {self.host} lets other machines in without a key; give --api-keys FILE, or --open if you want that"
            )
        if self.log_format not in get_args(_FORMATS):
            raise UsageError(f"--log-format {shown(self.log_format)} is unknown; allowed: {', '.join(get_args(_FORMATS))}")
        for origin in self.cors:
            if not origin.startswith(("http://", "https://")) or origin.rstrip("/") != origin:
                raise UsageError(
                    f"--cors {shown(origin)} is not the origin of a web page; allowed: http(s)://HOST[:PORT] without a path"
                )

    def read_keys(self) -> list[str]:
        """Read the API keys; an empty list without --api-keys."""
        if self.api_keys is None:
            return []
        try:
            lines = self.api_keys.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"cannot read --api-keys {self.api_keys} ({reason}); give a file with one key per line") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise UsageError(f"--api-keys {self.api_keys} holds no keys; write one per line")
        for key in found:
            if not key.isascii() or len(key) < _SHORTEST_KEY:
                raise UsageError(
                    f"--api-keys {self.api_keys} holds an unusable key; allowed: {_SHORTEST_KEY} or more ASCII characters"
                )
        return found

    def key_file_warning(self) -> str | None:
        """Return a warning if other users may change or read the file of API keys; it may be on purpose."""
        if self.api_keys is None:
            return None
        mode = self.api_keys.stat().st_mode
        risks = {"change": mode & (stat.S_IWGRP | stat.S_IWOTH), "read": mode & stat.S_IROTH}
        found = " and ".join(verb for verb, risk in risks.items() if risk)
        return f"others may {found} --api-keys {self.api_keys}; keep it to yourself: chmod 600" if found else None


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Replicas."""

    ray: bool = False
    """Serve with Ray Serve replicas, on this machine's Ray cluster or on this machine alone."""
    replicas: int = 1
    """With --ray: number of processes, each with its own copy of the model; with --max-replicas, the lowest number."""
    max_replicas: int | None = None
    """With --ray: most replicas; their number follows the running and waiting texts  [default: as many as --replicas]."""
    replica_cpus: float = 1.0
    """With --ray: CPUs per replica, which computes with as many threads."""
    replica_gpus: float = 0.0
    """With --ray: GPUs per replica."""

    def __post_init__(self) -> None:
        check_ranges(self, (("replicas", 1, 10**4), ("replica_cpus", 0.01, 10**4), ("replica_gpus", 0, 10**3)))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}; raise it")
        if not self.ray and any(getattr(self, one.name) != one.default for one in fields(self)):
            raise UsageError("--replicas and other replica options work only with --ray; add it, or leave them out")


_SHORTEST_KEY = 8
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65535),
    ("slots", 1, 1024),
    ("other_slots", 1, 1024),
    ("slot_tokens", 16, 2**20),
    ("cache_gb", 0.001, 10**4),
    ("prefix_gb", 0, 10**4),
    ("max_queue", 0, 10**6),
    ("max_choices", 1, 1024),
    ("max_body_bytes", 1024, 2**30),
    ("chunk_tokens", 8, 2**20),
    ("stall_seconds", 0.001, 10**6),
    ("request_seconds", 0.01, 10**6),
    ("client_seconds", 0.01, 10**6),
    ("drain_seconds", 0, 10**6),
)
