"""Loading the C kernels: prebuilt ones if the package has the best variant for this CPU, else compiled on first use.

Compiled kernels are kept in the cache folder. Either kind is checked before use. Whatever goes wrong (no compiler, one that
fails or hangs, a cache that is damaged or not writable, code for another CPU) ends in `None` and one line in the log; models
then run without these kernels.
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
from polydraft.devices import cpu_features
from polydraft.output import cache_root, written_whole

_LOGGER = logging.getLogger("polydraft")
SWITCH = "POLYDRAFT_NATIVE"
"""Environment variable: 0 turns the kernels off; `compile` ignores prebuilt ones."""


@dataclass(frozen=True)
class _Threading:
    """Flags for one implementation of threads."""

    compiling: tuple[str, ...]
    linking: tuple[str, ...]
    shared: str | None = None
    """Library to load first: torch's own thread pool. Two thread pools would spin against each other."""


class _State:
    """The library of this process, if any, and whether it has been looked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.found: ctypes.CDLL | None = None
        self.origin = ""


_STATE = _State()


def kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, building them if necessary; None if that fails or they are switched off."""
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
    """Return the compiled kernels if `kernels` has been called already: for small jobs that are not worth compiling for."""
    return None if os.environ.get(SWITCH, "1") == "0" else _STATE.found


def library() -> ctypes.CDLL:
    """Return the compiled kernels to a form whose `supports` has found them."""
    found = loaded()
    assert found is not None, "supports() comes first"
    return found


def forget() -> None:
    """Make the next call of `kernels` look again: for tests, and after a compiler was installed."""
    with _STATE.lock:
        _STATE.tried, _STATE.found = False, None


def describe() -> str:
    """Say where the kernels come from and which instructions they use, or why there are none."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"none: {SWITCH} is 0"
    found = kernels()
    return _STATE.origin if found is None else f"{_STATE.origin}: {found.polydraft_instructions().decode()}"


def _loaded() -> tuple[ctypes.CDLL, str]:
    """Return the best kernels available, and where they come from.

    Prebuilt kernels have the same flags and instructions as compiled ones. If the best variant for this CPU is missing,
    compiling here comes before lesser variants.
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
    """Load a prebuilt variant."""
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
    """Load the kernels from the cache or build them, with the best threads that work."""
    command = find_compiler()
    obstacle = ObstacleError("no way to build them worked")
    for way in _ways():
        file = cache_root() / "native" / f"{_key(command, way)}.so"
        try:
            if whole(file):
                with suppress(ObstacleError):  # damaged after all, or built by a tool that has changed: build again, once
                    return _opened(file, way.shared)
            return _built(command, way, file)
        except ObstacleError as found:
            obstacle = found
    raise obstacle


def _torchs_threads() -> list[str]:
    """Return the library of torch's thread pool, if it is the one that compiled code needs."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line}
    except OSError:
        mapped = set()
    # Other packages may have loaded one as well; torch's is in torch's own folder.
    home = str(Path(torch.__file__).parent)
    return sorted(mapped, key=lambda path: (not path.startswith(home), path))[:1]


def _ways() -> list[_Threading]:
    """Return implementations of threads, best first: torch's, the compiler's own, none."""
    native = ("-march=native",)
    threaded = (*native, OPENMP)
    ways = [_Threading(threaded, (), path) for path in _torchs_threads()]
    return [*ways, _Threading(threaded, (OPENMP,)), _Threading(native, ())]


def _key(command: list[str], way: _Threading) -> str:
    """Return a hash of everything that determines the compiled code and whether this CPU can run it."""
    words = [platform.system(), platform.machine(), cpu_features(), *way.compiling, *way.linking, *command]
    executable = shutil.which(command[0])
    with suppress(OSError):
        status = os.stat(executable or command[0])
        words.append(f"{status.st_size} {status.st_mtime_ns}")  # cheaper than running it to get its version
    return mark_of_sources(*words)


def _built(command: list[str], way: _Threading, file: Path) -> ctypes.CDLL:
    """Compile and test the kernels, and cache them; if the cache is not writable, use them in this process only."""
    with tempfile.TemporaryDirectory(prefix="polydraft-") as folder:
        built = Path(folder) / file.name
        compile_kernels(command, way.compiling, way.linking, built)
        library = _opened(built, way.shared)  # stays open after the file is deleted
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(file) as partial:
                shutil.copy(built, partial)
        except OSError as error:
            where = f"{file.parent} ({error.strerror})"
            _LOGGER.info("native kernels are built again at every start: cannot write to %s; set POLYDRAFT_CACHE", where)
        return library


def _opened(file: Path, threads: str | None) -> ctypes.CDLL:
    """Load a library, after that of its threads, and check that it computes correctly."""
    try:
        if threads is not None:
            ctypes.CDLL(threads, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file))
        declare(library)
    except (OSError, AttributeError) as error:
        raise ObstacleError(f"compiled code cannot be loaded ({str(error)[:160]})") from None
    if wrong := self_check(library, torch.get_num_threads()):
        raise ObstacleError(f"compiled code computes wrong numbers ({wrong})")
    return library
