"""The Ray cluster of `serve --ray` and `batch --ray`: the one this machine belongs to, or a new one on it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from polydraft.errors import FailureError


@contextmanager
def cluster_with_room(kind: str, count: int, *, cpus: float, gpus: float) -> Iterator[None]:
    """Join or start a cluster with room for `count` processes, which options call `kind`; leave it after the block."""
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=True, logging_level=logging.WARNING, include_dashboard=False)
    try:
        free = ray.available_resources()
        for name, each in (("CPU", cpus), ("GPU", gpus)):
            if each * count > free.get(name, 0) + 1e-6:
                raise FailureError(
                    f"the cluster has {free.get(name, 0):g} {name}s free, but {count} {kind}s need {each * count:g}; use "
                    f"fewer, or --{kind}-{name.lower()}s"
                )
        yield
    finally:
        if started:
            ray.shutdown()
