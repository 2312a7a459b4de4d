"""Servers on Ray for tests, as real processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

CHAT = "/v1/chat/completions"
NAME = "ray::ServeReplica:polydraft:polydraft-replica"


@dataclass
class Cluster:
    """A server on Ray, and who asks it."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]
    """Lines on its standard error."""

    def ask(self, text: str, **options: object) -> httpx.Response:
        return httpx.post(self.url + CHAT, json={**asked(text), **options}, timeout=60)

    def count(self, figure: str) -> dict[str, float]:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(rf'^polydraft:{figure}{{replica="(\w+)"}} (\S+)$', page, re.M)
        return {replica: float(value) for replica, value in found}

    def replicas(self) -> list[int]:
        """Return the processes that compute, those of this cluster alone."""
        listed = subprocess.run(["ps", "-e", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
        return [int(line.split()[0]) for line in listed.splitlines() if line.split(None, 1)[1].startswith(NAME)]


def asked(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20}


def model_options(folder: str) -> dict[str, str]:
    """Options of a small model and its draft, by name."""
    return {"target": folder, "draft": "early-exit:1", "tree": "3x2x1", "dtype": "float32"}


@contextmanager
def running(folder: str, *size: str) -> Iterator[Cluster]:
    """Serve a model on Ray; the last of its streams ends when the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = [word for name, value in model_options(folder).items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "polydraft", "serve", "--ray", "--replica-cpus", "0.5", "--port", str(port), *size, *model]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as one:
        said: list[str] = []
        for line in one.stderr or ():
            said.append(line)
            if found := re.search(r"serving \S+ at (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=lambda: said.extend(one.stderr or ()), daemon=True).start()  # it says more than a pipe holds
        made = Cluster(one, found[1], said)
        yield made
        body = {**asked("last words"), "max_tokens": 400, "logit_bias": {"256": -100}, "stream": True}
        with httpx.stream("POST", made.url + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            one.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert one.wait(60) == 0
