"""The kernels in C: those that came with the package if it has the best for this CPU, else compiled on first use.

What the system's C compiler makes is kept in the cache folder. Both are checked before they are used. Whatever goes wrong on
the way (no compiler, one that fails or hangs, a cache that cannot be written or was damaged, code for another CPU) ends in
`None` and one line in the log; models then run as they do without these kernels.
"""

import ctypes
import logging
import os
import platform
import shutil
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from polydraft.backends.native.arguments import declare, self_check
from polydraft.backends.native.compiler import (
    FOLDER,
    OPENMP,
    ObstacleError,
    Variant,
    compile_kernels,
    find_compiler,
    mark_of_sources,
    runnable,
    whole,
)
from polydraft.backends.native.verification import declare_verification
from polydraft.devices import cpu_features
from polydraft.output import cache_root, written_whole

_LOGGER = logging.getLogger("polydraft")
SWITCH = "POLYDRAFT_NATIVE"
"""Environment variable: 0 turns the kernels off; `compile` ignores those that came with the package."""


@dataclass(frozen=True)
class _Threading:
    """One way to have threads."""

    compiling: tuple[str, ...]
    linking: tuple[str, ...]
    shared: str | None = None
    """A library that must be visible to all first: torch's own threads. Two sets of them would spin against each other."""


class _State:
    """What this process knows: nothing yet, or the library, or that there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.found: ctypes.CDLL | None = None
        self.origin = ""


_STATE = _State()


def kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, building them if need be, or None where they cannot be had or are switched off."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    with _STATE.lock:
        if not _STATE.tried:
            try:
                _STATE.found, _STATE.origin = _loaded()
            except ObstacleError as obstacle:
                _STATE.origin = f"none: {obstacle}"
                _LOGGER.info("models run without native kernels, several times slower on a CPU: %s", obstacle)
            _STATE.tried = True
        return _STATE.found


def loaded() -> ctypes.CDLL | None:
    """Return the compiled kernels if somebody has asked for them already: for small things that are not worth a compiler."""
    return None if os.environ.get(SWITCH, "1") == "0" else _STATE.found


def forget() -> None:
    """Let the next call of `kernels` look again, for tests and for who has installed a compiler meanwhile."""
    with _STATE.lock:
        _STATE.tried, _STATE.found = False, None


def describe() -> str:
    """Say where the kernels come from and which instructions they use, or why there are none."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"none: {SWITCH} is 0"
    library = kernels()
    return _STATE.origin if library is None else f"{_STATE.origin}: {library.polydraft_instructions().decode()}"


def _loaded() -> tuple[ctypes.CDLL, str]:
    """Return the best kernels that can be had, and where they come from.

    Those that came with the package are compiled with the same flags, for the same instructions. The best of them for this CPU
    may be missing; then compiling them here comes before lesser ones.
    """
    variants = [] if os.environ.get(SWITCH) == "compile" else runnable(platform.machine(), cpu_features())
    obstacles = []
    for attempt in [*variants[:1], None, *variants[1:]]:
        try:
            return (_compiled(), "compiled here") if attempt is None else (_prebuilt(attempt), f"prebuilt {attempt.name}")
        except ObstacleError as obstacle:
            obstacles.append(str(obstacle))
    raise ObstacleError(", and ".join(obstacles[:2]))


def _prebuilt(variant: Variant) -> ctypes.CDLL:
    """Load what came with the package."""
    file = variant.file(FOLDER / "prebuilt")
    if not whole(file):
        raise ObstacleError(f"the package has no {variant.name} code" if not file.exists() else f"{file} is damaged")
    obstacle = ObstacleError()
    for threads in (*_torchs_threads(), "libgomp.so.1"):
        try:
            return _opened(file, threads)
        except ObstacleError as found:
            obstacle = found
    raise obstacle


def _compiled() -> ctypes.CDLL:
    """Load the kernels from the cache, or build them; threads in the best way that works."""
    command = find_compiler()
    obstacle = ObstacleError("no way to build them worked")
    for way in _ways():
        file = cache_root() / "native" / f"{_key(command, way)}.so"
        try:
            if whole(file):
                with suppress(ObstacleError):  # damaged all the same, or built by something that has changed: build anew, once
                    return _opened(file, way.shared)
            return _built(command, way, file)
        except ObstacleError as found:
            obstacle = found
    raise obstacle


def _torchs_threads() -> list[str]:
    """Return the library of torch's threads, if it is the one that compiled code asks for."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line}
    except OSError:
        mapped = set()
    # Other packages may bring one as well; the one beside torch is torch's.
    home = str(Path(torch.__file__).parent)
    return sorted(mapped, key=lambda path: (not path.startswith(home), path))[:1]


def _ways() -> list[_Threading]:
    """Return ways to have threads, best first: those of torch, the compiler's own, none."""
    native = ("-march=native",)
    threaded = (*native, OPENMP)
    ways = [_Threading(threaded, (), path) for path in _torchs_threads()]
    return [*ways, _Threading(threaded, (OPENMP,)), _Threading(native, ())]


def _key(command: list[str], way: _Threading) -> str:
    """Return a mark of all that decides what the compiled code is and whether this CPU can run it."""
    words = [platform.system(), platform.machine(), cpu_features(), *way.compiling, *way.linking, *command]
    executable = shutil.which(command[0])
    with suppress(OSError):
        status = os.stat(executable or command[0])
        words.append(f"{status.st_size} {status.st_mtime_ns}")  # asking for its version would cost a start of it
    return mark_of_sources(*words)


def _built(command: list[str], way: _Threading, file: Path) -> ctypes.CDLL:
    """Compile, try, and keep; where the cache cannot be written to, for this process only."""
    with tempfile.TemporaryDirectory(prefix="polydraft-") as folder:
        built = Path(folder) / file.name
        compile_kernels(command, way.compiling, way.linking, built)
        library = _opened(built, way.shared)  # stays open when its name is gone
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(file) as partial:
                shutil.copy(built, partial)
        except OSError as error:
            where = f"{file.parent} ({error.strerror})"
            _LOGGER.info("native kernels are built again at every start: cannot write to %s; set POLYDRAFT_CACHE", where)
        return library


def _opened(file: Path, threads: str | None) -> ctypes.CDLL:
    """Load a library, after that of its threads, and see that it computes what it should."""
    try:
        if threads is not None:
            ctypes.CDLL(threads, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file))
        declare(library)
        declare_verification(library)
    except (OSError, AttributeError) as error:
        raise ObstacleError(f"compiled code cannot be loaded ({str(error)[:160]})") from None
    if wrong := self_check(library, torch.get_num_threads()):
        raise ObstacleError(f"compiled code computes wrong numbers ({wrong})")
    return library
