"""`polydraft serve`."""

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import click

from polydraft.cli.options import GroupedCommand, Loading, loading_options, needing, options_of, prepare, taken
from polydraft.described import options_in
from polydraft.errors import PolydraftError, UsageError
from polydraft.serve.logs import logging_as
from polydraft.serve.options import ReplicaOptions, ServeOptions

_LOGGER = logging.getLogger("polydraft.serve")


@click.command("serve", cls=GroupedCommand)
@options_of(ServeOptions, log_texts={"flag": "--log-texts"})
@options_of(ReplicaOptions)
@loading_options
def command(**options: Any) -> None:
    """Serve the target over the OpenAI API, many texts at a time, with a web page to chat with it.

    Without arguments it serves the bundled model at http://127.0.0.1:8000, to this machine only. After SIGTERM or Ctrl-C,
    running answers may finish; a second Ctrl-C stops at once.
    """
    replicas = taken(ReplicaOptions, options)
    settings = taken(ServeOptions, options)
    shared = options["device_map"] == "tp"
    with ExitStack() as stack:
        stack.enter_context(logging_as(settings.log_format))
        if settings.log_format == "json":
            stack.enter_context(_logging_errors())
        settings.read_keys()  # refuses an unusable file before anything slow starts
        if replicas.ray:
            _check_for_ray(settings, shared)
        # Importing torch is slow, so find out first whether the port is in use. Of tensor-parallel processes only the leader
        # listens, and only modules that import torch know which one that is.
        listening = None if shared else stack.enter_context(_listen(settings))
        _LOGGER.info("loading %s", options["target"])
        loading = Loading(**options)
        if replicas.ray:
            assert listening is not None
            listening.close()  # the port is free; Ray's own processes will listen
            _serve_by_ray(loading, settings, replicas)
        else:
            _serve(loading, settings, listening)


def _listen(settings: ServeOptions) -> socket.socket:
    with needing("a server needs", "serve"):
        from polydraft.serve.server import listen
    return listen(settings)


def _serve(loading: Loading, settings: ServeOptions, listening: socket.socket | None) -> None:
    with needing("a server needs", "serve"):
        from polydraft.models.placement import is_follower
        from polydraft.serve.app import make_app
        from polydraft.serve.server import Server
        from polydraft.serve.service import Service
    if listening is None and is_follower():
        for name in (signal.SIGTERM, signal.SIGINT):  # the leader says when to stop
            signal.signal(name, signal.SIG_IGN)
        Service(loading.decoder(batch=settings.slots), settings).scheduler.follow()
        return
    with listening or _listen(settings) as line:
        service = Service(loading.decoder(batch=settings.slots), settings)
        announce = partial(_LOGGER.info, "serving %s at %s", service.model)
        Server(make_app(service), service, line, announce).serve_until_drained()


def _check_for_ray(settings: ServeOptions, shared: bool) -> None:
    """Refuse what does not work with Ray before anything slow starts."""
    if shared:
        raise UsageError("--device-map tp and --ray cannot be combined; leave one out")
    with needing("replicas need", "ray"):
        import_module("ray")
    if settings.port == 0:
        raise UsageError("--port 0 and --ray cannot be combined; choose a port")


def _serve_by_ray(loading: Loading, settings: ServeOptions, replicas: ReplicaOptions) -> None:
    with needing("replicas need", "ray"):
        from polydraft.serve.replicas import run_replicas
    given = loading.for_others("replicas")
    given |= {one.name: getattr(settings, one.name) for one in options_in(ServeOptions)}
    given |= {one.name: getattr(replicas, one.name) for one in options_in(ReplicaOptions)}
    prepare(loading.threads)
    run_replicas(given, settings, replicas, partial(_LOGGER.info, "serving %s at %s", loading.target))


@contextmanager
def _logging_errors() -> Iterator[None]:
    """Log the error that ends the server, so that it is a JSON line like all others."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, PolydraftError)
        _LOGGER.critical("%s", error if expected else "the server failed unexpectedly", exc_info=None if expected else error)
        raise click.exceptions.Exit(2 if isinstance(error, UsageError) else 1) from None
