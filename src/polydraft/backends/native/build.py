"""The compiled kernels: built on first use by the system's C compiler, kept in the cache folder, checked before they are used.

Whatever goes wrong on the way (no compiler, one that fails or hangs, a cache that cannot be written or was damaged, code for
another CPU) ends in `None` and one line in the log; models then run as they do without these kernels.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from polydraft.backends.native.arguments import declare, self_check
from polydraft.backends.native.verification import declare_verification
from polydraft.devices import cpu_features
from polydraft.output import cache_root, written_whole

_LOGGER = logging.getLogger("polydraft")
_FOLDER = Path(__file__).parent
_SOURCES, _HEADERS = ("body.c", "verification.c"), ("vectors.h", "products.h", "meeting.h")
# Moving instructions before registers are given out (GCC's habit on Arm) makes the sums of a tile spill.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-schedule-insns", "-fPIC")
_SECONDS = 180.0
"""After which a compiler is taken to hang; it needs 5 on a slow core."""
_DIGEST = 32
SWITCH = "POLYDRAFT_NATIVE"
"""Environment variable: 0 turns the kernels off."""


class _ObstacleError(Exception):
    """Why there are no kernels, in a few words."""


@dataclass(frozen=True)
class _Threading:
    """One way to have threads."""

    compiling: tuple[str, ...]
    linking: tuple[str, ...]
    shared: Path | None = None
    """A library that must be visible to all first: torch's own threads. Two sets of them would spin against each other."""


class _State:
    """What this process knows: nothing yet, or the library, or that there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.found: ctypes.CDLL | None = None


_STATE = _State()


def kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, building them if need be, or None where they cannot be had or are switched off."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    with _STATE.lock:
        if not _STATE.tried:
            try:
                _STATE.found = _loaded()
            except _ObstacleError as obstacle:
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


def _loaded() -> ctypes.CDLL:
    """Load the kernels from the cache, or build them; threads in the best way that works."""
    compiler = _compiler()
    obstacle = _ObstacleError("no way to build them worked")
    for way in _ways():
        file = cache_root() / "native" / f"{_key(compiler, way)}.so"
        try:
            if _whole(file):
                with suppress(_ObstacleError):  # damaged all the same, or built by something that has changed: build anew, once
                    return _opened(file, way)
            return _built(compiler, way, file)
        except _ObstacleError as found:
            obstacle = found
    raise obstacle


def _compiler() -> list[str]:
    """Return the command of the C compiler."""
    chosen = os.environ.get("CC", "").strip()
    for command in [chosen] if chosen else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    what = f"the C compiler that CC names, {chosen!r}, is not there" if chosen else "there is no C compiler"
    raise _ObstacleError(f"{what}; install gcc or clang, or set CC")


def _ways() -> list[_Threading]:
    """Return ways to have threads, best first: those of torch, the compiler's own, none."""
    ways = [_Threading(("-fopenmp",), ("-fopenmp",)), _Threading((), ())]
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line}
    except OSError:
        mapped = set()
    # Other packages may bring one as well; the one beside torch is torch's.
    home = str(Path(torch.__file__).parent)
    found = sorted(mapped, key=lambda path: (not path.startswith(home), path))
    return [_Threading(("-fopenmp",), (), Path(path)) for path in found[:1]] + ways


def _key(compiler: list[str], way: _Threading) -> str:
    """Return a mark of all that decides what the compiled code is and whether this CPU can run it."""
    words = [platform.system(), platform.machine(), cpu_features(), *_FLAGS, *way.compiling, *way.linking, *compiler]
    executable = shutil.which(compiler[0])
    with suppress(OSError):
        status = os.stat(executable or compiler[0])
        words.append(f"{status.st_size} {status.st_mtime_ns}")  # asking for its version would cost a start of it
    digest = hashlib.sha256("\0".join(words).encode())
    for part in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / part).read_bytes())
    return digest.hexdigest()[:24]


def _whole(file: Path) -> bool:
    """Whether a file is what was once written: its last bytes are the digest of the others.

    Loading half a library can kill a process.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _built(compiler: list[str], way: _Threading, file: Path) -> ctypes.CDLL:
    """Compile, try, and keep; where the cache cannot be written to, for this process only."""
    with tempfile.TemporaryDirectory(prefix="polydraft-") as folder:
        built = Path(folder) / file.name
        _compile(compiler, way, built)
        content = built.read_bytes()
        built.write_bytes(content + hashlib.sha256(content).digest())
        library = _opened(built, way)  # stays open when its name is gone
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(file) as partial:
                shutil.copy(built, partial)
        except OSError as error:
            where = f"{file.parent} ({error.strerror})"
            _LOGGER.info("native kernels are built again at every start: cannot write to %s; set POLYDRAFT_CACHE", where)
        return library


def _compile(compiler: list[str], way: _Threading, built: Path) -> None:
    objects = [str(built.with_name(f"{built.name}.{source}.o")) for source in _SOURCES]
    for source, compiled in zip(_SOURCES, objects, strict=True):
        _run([*compiler, *_FLAGS, *way.compiling, "-c", str(_FOLDER / source), "-o", compiled])
    _run([*compiler, "-shared", *objects, *way.linking, "-lm", "-o", str(built)])


def _run(command: list[str]) -> None:
    """Run the compiler, with all that it starts, for as long as is reasonable."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise _ObstacleError(f"the C compiler {command[0]!r} does not start ({error.strerror}); set CC to another") from None
    with process:
        try:
            _, errors = process.communicate(timeout=_SECONDS)
        except BaseException as error:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"the C compiler {command[0]!r} was not ready after {_SECONDS:.0f} s; set CC to another"
                raise _ObstacleError(reason) from None
            raise
    if process.returncode != 0:
        lines = [line for line in errors.decode("utf-8", "replace").splitlines() if "error" in line] or ["no reason given"]
        raise _ObstacleError(f"the C compiler {command[0]!r} fails ({lines[0].strip()[:160]}); set CC to another")


def _opened(file: Path, way: _Threading) -> ctypes.CDLL:
    """Load a library and see that it computes what it should."""
    try:
        if way.shared is not None:
            ctypes.CDLL(str(way.shared), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file))
        declare(library)
        declare_verification(library)
    except (OSError, AttributeError) as error:
        raise _ObstacleError(f"what the C compiler made cannot be loaded ({str(error)[:160]})") from None
    if wrong := self_check(library, torch.get_num_threads()):
        raise _ObstacleError(f"what the C compiler made computes wrong numbers ({wrong})")
    return library
