"""`polydraft serve`."""

import logging
from typing import Any

import click

from polydraft.cli.options import GroupedCommand, Loading, loading_options, options_of, taken
from polydraft.errors import UsageError
from polydraft.serve.options import ServeOptions


@click.command("serve", cls=GroupedCommand)
@options_of(ServeOptions, log_texts={"flag": "--log-texts"})
@loading_options
def command(**options: Any) -> None:
    """Serve the target by the OpenAI API, many texts at a time, and a page to talk to it.

    Without arguments it serves the bundled model to this machine alone, at http://127.0.0.1:8000. SIGTERM and Ctrl-C let
    running answers end; a second Ctrl-C does not.
    """
    settings = taken(ServeOptions, options)
    settings.read_keys()  # refuses a file that cannot be used before anything takes time
    try:
        from polydraft.serve.running import listen, server_of
        from polydraft.serve.service import Service
    except ImportError as error:
        raise UsageError(f"{error}; install what a server needs: pip install 'polydraft[serve]'") from None
    loading = Loading(**options)
    listening = listen(settings)
    try:
        service = Service(loading.decoder(batch=settings.slots), settings)
        logging.getLogger("polydraft").setLevel(logging.INFO)
        announce = lambda address: click.echo(f"serving {service.model} at {address}", err=True)  # noqa: E731
        server_of(service, listening, announce).run_until_left()
    finally:
        listening.close()
