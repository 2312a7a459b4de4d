"""The C compiler, and the variants of the kernels that a wheel contains, one per kind of CPU.

Imports only the standard library: `hatch_build.py` runs this file when neither polydraft nor torch is installed.
"""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_SOURCES, _HEADERS = ("body.c", "verification.c"), ("vectors.h", "products.h", "barrier.h", "stages.h", "attention.h")
# Scheduling instructions before register allocation (GCC's default on Arm) makes the sums of a tile spill.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-schedule-insns", "-fPIC")
OPENMP = "-fopenmp"
SECONDS = 180.0
"""Time limit for the compiler; it needs 5 s on a slow core."""
_DIGEST = 32


class ObstacleError(Exception):
    """Why there are no kernels."""


@dataclass(frozen=True)
class Variant:
    """Kernels for all CPUs with certain features."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]
    """As /proc/cpuinfo names them."""

    def file(self, folder: Path) -> Path:
        """Return its file in a folder; the name changes with the sources, so that older code is never found."""
        return folder / f"{self.name}-{mark_of_sources(*self.flags)}.so"


def _variants(*rows: tuple[str, str, str]) -> tuple[Variant, ...]:
    """Return an architecture's variants, best first; rows come worst first, and each adds to the features of the last."""
    made: list[Variant] = []
    needed: frozenset[str] = frozenset()
    for name, flags, features in rows:
        needed |= set(features.split())
        made.insert(0, Variant(name, tuple(f"-m{flag}" for flag in flags.split()), needed))
    return tuple(made)


VARIANTS = {
    "aarch64": _variants(
        ("neon", "arch=armv8-a", "asimd"),
        ("dotprod", "arch=armv8.2-a+dotprod", "atomics crc32 asimdrdm asimddp"),
        ("i8mm", "arch=armv8.2-a+dotprod+i8mm+bf16", "i8mm bf16"),
    ),
    "x86_64": _variants(
        ("sse4", "arch=x86-64-v2", "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"),
        ("avx2", "arch=x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
        ("avx512", "arch=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
        ("avx512-vnni", "arch=x86-64-v4 avx512vnni", "avx512_vnni"),
        # With AMX, which the kernels use only where the system grants it.
        ("avx512-bf16", "arch=x86-64-v4 avx512vnni avx512bf16 amx-tile amx-bf16", "avx512_bf16"),
    ),
}
"""Variants by architecture, best first: one for each instruction set that the sources have code for."""


def runnable(machine: str, cpu_features: str) -> list[Variant]:
    """Return the variants that a CPU can run, best first.

    Parameters
    ----------
    machine : str
        The architecture, as `platform.machine` names it.
    cpu_features : str
        Lines of /proc/cpuinfo; all CPUs listed there must have a variant's features.
    """
    lines = [line.partition(":") for line in cpu_features.splitlines()]
    sets = [set(words.split()) for name, _, words in lines if name.strip() in ("flags", "Features")]
    return [variant for variant in VARIANTS.get(machine, ()) if sets and variant.features <= set.intersection(*sets)]


def find_compiler() -> list[str]:
    """Return the command of the C compiler."""
    chosen = os.environ.get("CC", "").strip()
    for command in [chosen] if chosen else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    what = f"CC names a C compiler that was not found, {chosen!r}" if chosen else "there is no C compiler"
    raise ObstacleError(f"{what}; install gcc or clang, or set CC")


def mark_of_sources(*words: str) -> str:
    """Return a hash of the sources and of everything else that determines the compiled code."""
    digest = hashlib.sha256("\0".join((*_FLAGS, *words)).encode())
    for part in (*_SOURCES, *_HEADERS):
        digest.update((FOLDER / part).read_bytes())
    return digest.hexdigest()[:24]


def compile_kernels(command: list[str], flags: tuple[str, ...], linking: tuple[str, ...], built: Path) -> None:
    """Compile the kernels into a library, with its digest appended."""
    objects = [str(built.with_name(f"{built.name}.{source}.o")) for source in _SOURCES]
    for source, compiled in zip(_SOURCES, objects, strict=True):
        _run([*command, *_FLAGS, *flags, "-c", str(FOLDER / source), "-o", compiled])
    _run([*command, "-shared", *objects, *linking, "-lm", "-o", str(built)])
    content = built.read_bytes()
    built.write_bytes(content + hashlib.sha256(content).digest())


def whole(file: Path) -> bool:
    """Whether a library is complete: its last bytes must be the digest of the others.

    Loading half a library can kill the process.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def prebuild(folder: Path) -> tuple[str, list[Path]]:
    """Compile all variants for the compiler's architecture, as far as it supports them.

    They need no library but the C library; OpenMP's functions come from torch's when they are loaded.

    Returns
    -------
    tuple of str and list of Path
        Platform tag of a wheel that contains them, and their files; no files without a compiler, or with one whose OpenMP is
        not compatible with torch's.
    """
    files: list[Path] = []
    newest = [-1]
    with suppress(ObstacleError), tempfile.TemporaryDirectory(prefix="polydraft-") as scratch:
        command = find_compiler()
        machine = _run([*command, "-dumpmachine"]).partition("-")[0]
        for variant in VARIANTS.get(machine, ()):
            built = variant.file(Path(scratch))
            with suppress(ObstacleError):
                compile_kernels(command, (*variant.flags, OPENMP), ("-s",), built)
                content = built.read_bytes()
                if b"GOMP_parallel" in content:
                    newest += [int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", content)]
                    files.append(Path(shutil.copy(built, folder)))
    if not files:
        return "any", []
    return f"linux_{machine}" if max(newest) < 0 else f"manylinux_2_{max(17, *newest)}_{machine}", files


def _run(command: list[str]) -> str:
    """Run the compiler within the time limit and return what it prints; on a timeout, kill it with all its children."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ObstacleError(f"the C compiler {command[0]!r} does not start ({error.strerror}); set CC to another") from None
    with process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except BaseException as error:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"the C compiler {command[0]!r} was not done after {SECONDS:.0f} s; set CC to another"
                raise ObstacleError(reason) from None
            raise
    if process.returncode != 0:
        lines = [line for line in errors.decode("utf-8", "replace").splitlines() if "error" in line] or ["no reason given"]
        raise ObstacleError(f"the C compiler {command[0]!r} fails ({lines[0].strip()[:160]}); set CC to another")
    return output.decode("utf-8", "replace")
