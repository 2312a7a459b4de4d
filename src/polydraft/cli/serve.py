"""`polydraft serve`."""

import logging
import signal
from typing import Any

import click

from polydraft.cli.options import GroupedCommand, Loading, loading_options, options_of, prepare, taken
from polydraft.described import options_in
from polydraft.errors import UsageError
from polydraft.serve.options import ReplicaOptions, ServeOptions


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
    settings.read_keys()  # refuses a file that cannot be used before anything takes time
    try:
        from polydraft.models.placement import TENSOR_PARALLEL, is_follower
        from polydraft.serve.running import listen, server_of
        from polydraft.serve.service import Service
    except ImportError as error:
        raise UsageError(f"{error}; install what a server needs: pip install 'polydraft[serve]'") from None
    loading = Loading(**options)
    if replicas.ray and loading.device_map == TENSOR_PARALLEL:
        raise UsageError("--device-map tp and --ray cannot be combined; leave one out")
    if loading.device_map == TENSOR_PARALLEL and is_follower():
        for name in (signal.SIGTERM, signal.SIGINT):  # the first process says when to leave
            signal.signal(name, signal.SIG_IGN)
        Service(loading.decoder(batch=settings.slots), settings).scheduler.follow()
        return
    listening = listen(settings)
    if replicas.ray:
        listening.close()  # it was free: Ray's own processes listen
        _serve_by_ray(loading, settings, replicas)
        return
    try:
        service = Service(loading.decoder(batch=settings.slots), settings)
        logging.getLogger("polydraft").setLevel(logging.INFO)
        announce = lambda address: click.echo(f"serving {service.model} at {address}", err=True)  # noqa: E731
        server_of(service, listening, announce).run_until_left()
    finally:
        listening.close()


def _serve_by_ray(loading: Loading, settings: ServeOptions, replicas: ReplicaOptions) -> None:
    try:
        from polydraft.serve.replicas import run_replicas
    except ImportError as error:
        raise UsageError(f"{error}; install what replicas need: pip install 'polydraft[ray]'") from None
    given = loading.for_others("replicas")
    if settings.port == 0:
        raise UsageError("--port 0 and --ray cannot be combined; choose a port")
    given |= {one.name: getattr(settings, one.name) for one in options_in(ServeOptions)}
    given |= {one.name: getattr(replicas, one.name) for one in options_in(ReplicaOptions)}
    prepare(loading.threads)
    run_replicas(given, settings, replicas, lambda address: click.echo(f"serving {loading.target} at {address}", err=True))
