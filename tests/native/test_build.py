"""Compilers that are not there, fail or hang, caches that are damaged or cannot be written: one line, and the slow way."""

import hashlib
import logging
import os
import platform
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from families import FAMILIES
from polydraft.backends.native import build, compiler, describe, kernels
from polydraft.backends.native.arguments import Weight, multiply, quantised
from polydraft.devices import cpu_features
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel
from polydraft.models.quantised import quantise

REAL, ORIGIN = build.kernels(), build._STATE.origin
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache, and a process that has not looked yet."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    build.forget()
    yield
    build.forget()
    with build._STATE.lock:
        build._STATE.tried, build._STATE.found, build._STATE.origin = True, REAL, ORIGIN


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A compiler that has the real library up its sleeve, and counts how often it is asked."""
    if REAL is None:
        pytest.skip("no C compiler here")
    real = tmp_path / "real.so"
    real.write_bytes(real_content()[:-DIGEST])
    text = f'echo x >> {tmp_path}/asked\n{LAST}case "$*" in *" -c "*) touch "$last";; *) cp {real} "$last";; esac\n'
    monkeypatch.setenv("CC", script(tmp_path / "quick", text))
    return tmp_path / "asked"


@cache
def real_content():
    """The real library, its digest at its end."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(REAL._name)  # where it was built for good
        if not kept.exists():
            kept, way = Path(folder) / "real.so", build._ways()[0]
            compiler.compile_kernels(compiler.find_compiler(), way.compiling, way.linking, kept)
        return kept.read_bytes()


DIGEST = 32
LAST = "for last; do :; done\n"
"""The last argument is where to write."""


def asked(file):
    return len(file.read_text().splitlines()) // 3 if file.exists() else 0  # two sources, and linking


def built(tmp_path):
    return list((tmp_path / "cache" / "native").glob("*.so"))


def refused(caplog, words):
    """No kernels; one line says why, once; and a model runs all the same."""
    with caplog.at_level(logging.INFO, "polydraft"):
        assert kernels() is None and kernels() is None
        model = HFModel(FAMILIES.get("llama").build())
    assert len(caplog.records) == 1 and words in caplog.text and "\n" not in caplog.records[0].getMessage()
    assert model.fast is None
    with pytest.raises(UsageError, match="int8 needs native kernels"):
        quantise(FAMILIES.get("llama").build())


def test_no_compiler(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(caplog, "there is no C compiler; install gcc or clang")


def test_a_compiler_that_is_not_there(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler -pipe")
    refused(caplog, "a C compiler that was not found, 'no-such-compiler -pipe'")


def test_a_compiler_that_fails(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "bad", "echo 'x.c:1: error: no such thing' >&2; exit 1\n"))
    refused(caplog, "error: no such thing")
    assert not built(tmp_path)


def test_a_compiler_that_hangs(monkeypatch, caplog, tmp_path):
    """It ends, and so does what it has started."""
    monkeypatch.setattr(compiler, "SECONDS", 0.3)
    monkeypatch.setenv("CC", script(tmp_path / "slow", f"sleep 60 & echo $! > {tmp_path}/child; wait\n"))
    start = time.monotonic()
    refused(caplog, "was not done after")
    assert time.monotonic() - start < 20
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/status")
    deadline = time.monotonic() + 5
    while child.exists() and "Z" not in child.read_text().split("State:")[1][:3] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "Z" in child.read_text().split("State:")[1][:3]


def test_a_compiler_that_makes_nothing_of_use(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "odd", 'for last; do :; done; echo nonsense > "$last"\n'))
    refused(caplog, "cannot be loaded")
    assert not built(tmp_path)


@pytest.mark.skipif(REAL is None, reason="no C compiler here")
def test_wrong_numbers_are_noticed(monkeypatch, caplog, tmp_path):
    source = tmp_path / "wrong.c"
    names = ["pass", "memory", "product", "product_memory", "instructions"]
    names += ["pick", "pick_memory", "end", "draw", "draw_memory", "largest", "perturb", "largest_perturbed"]
    source.write_text("".join(f"long polydraft_{name}(void) {{ return 0; }}\n" for name in names))
    wrong = tmp_path / "wrong.so"
    subprocess.run([*compiler.find_compiler(), "-shared", "-fPIC", "-o", wrong, source], check=True, timeout=60)
    text = f'{LAST}case "$*" in *" -c "*) touch "$last";; *) cp {wrong} "$last";; esac\n'
    monkeypatch.setenv("CC", script(tmp_path / "quick", text))
    refused(caplog, "computes wrong numbers (float32")
    assert not built(tmp_path)


def test_built_once_and_kept(quick, tmp_path):
    assert kernels() is not None and asked(quick) == 1 and len(built(tmp_path)) == 1
    build.forget()
    assert kernels() is not None and asked(quick) == 1
    assert [file.name for file in (tmp_path / "cache" / "native").iterdir()] == [built(tmp_path)[0].name], "nothing beside it"


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "folder"])
def test_a_damaged_cache_is_built_anew(quick, tmp_path, damage, caplog):
    kernels()
    file = built(tmp_path)[0]
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"cut": content[:middle], "empty": b"", "flipped": flipped}[damage])
    build.forget()
    assert kernels() is not None and asked(quick) == 2
    if damage != "folder":
        build.forget()
        assert kernels() is not None and asked(quick) == 2, "whole again"


def test_what_cannot_be_loaded_is_built_anew(quick, tmp_path):
    """Whole, but made for something else."""
    kernels()
    file = built(tmp_path)[0]
    file.write_bytes(b"not a library" + hashlib.sha256(b"not a library").digest())
    build.forget()
    assert kernels() is not None and asked(quick) == 2 and file.stat().st_size > 1000


def test_another_cpu_has_another_file(quick, tmp_path, monkeypatch):
    kernels()
    monkeypatch.setattr(build, "cpu_features", lambda: "another one")
    build.forget()
    assert kernels() is not None and asked(quick) == 2 and len(built(tmp_path)) == 2


def test_a_cache_that_cannot_be_written(quick, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "polydraft"):
        assert kernels() is not None
    assert len(caplog.records) == 1 and "set POLYDRAFT_CACHE" in caplog.text


def test_what_a_kill_leaves_is_not_used(quick, tmp_path):
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    (folder / ".half.so.0123456789abcdef").write_bytes(b"half")
    assert kernels() is not None and asked(quick) == 1


@pytest.mark.slow
def test_two_processes_at_once(quick, tmp_path):
    code = "from polydraft.backends.native import kernels; assert kernels() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert len(built(tmp_path)) == 1 and compiler.whole(built(tmp_path)[0])


def test_the_switch(quick, monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")
    assert kernels() is None and asked(quick) == 0
    monkeypatch.setenv(build.SWITCH, "1")
    assert kernels() is not None


def test_threads_are_those_of_torch(quick):
    """Two sets of threads would spin against each other."""
    kernels()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line}
    if not mapped:
        pytest.skip("torch has other threads here")
    chosen = build._ways()[0].shared
    assert chosen is not None and Path(chosen).exists()
    own = {path for path in mapped if path.startswith(str(Path(torch.__file__).parent))}
    assert not own or chosen in own, "other packages' threads are not torch's"


ARM = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
X86 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
WIDE = f"{X86} movbe xsave avx f16c abm bmi1 avx2 bmi2 fma"
WIDER = "avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("aarch64", [ARM], ["dotprod", "neon"]),
        ("aarch64", [f"{ARM} i8mm bf16"], ["i8mm", "dotprod", "neon"]),
        ("aarch64", ["fp asimd", f"{ARM} i8mm bf16"], ["neon"]),  # cores that differ
        ("x86_64", ["fpu sse sse2"], []),
        ("x86_64", [X86], ["sse4"]),
        ("x86_64", [WIDE], ["avx2", "sse4"]),
        (
            "x86_64",
            [f"{WIDE} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"],
            ["avx512-vnni", "avx512", "avx2", "sse4"],
        ),
        ("x86_64", [], []),
        ("riscv64", ["rv64imafdc"], []),
    ],
)
def test_variants_follow_the_cpu(machine, features, names):
    lines = "\n".join(f"{'Features' if machine == 'aarch64' else 'flags'}\t: {words}" for words in features)
    assert [variant.name for variant in compiler.runnable(machine, f"CPU part\t: 0xd0c\n{lines}")] == names


def test_code_of_other_sources_has_another_name(tmp_path):
    files = {variant.file(tmp_path).name for group in compiler.VARIANTS.values() for variant in group}
    assert len(files) == sum(map(len, compiler.VARIANTS.values())), "flags are part of it"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in compiler.FOLDER.glob("*.[ch]"):
        shutil.copy(file, copy)
    shutil.copy(compiler.__file__, copy)
    (copy / "barrier.h").write_text("/* changed */" + (copy / "barrier.h").read_text())
    variant = runpy.run_path(str(copy / "compiler.py"))["VARIANTS"]["aarch64"][0]
    assert variant.file(tmp_path).name not in files and variant.name == "i8mm"


@pytest.mark.parametrize(
    ("inside", "compiles", "switch", "origin"),
    [
        ("best", False, "1", "prebuilt best"),
        ("best", True, "1", "prebuilt best"),
        ("best", True, "compile", "compiled here"),
        ("worst", True, "1", "compiled here"),
        ("worst", False, "1", "prebuilt worst"),
        ("none", True, "1", "compiled here"),
        ("none", False, "1", "none: the package has no best code, and there is no C compiler; install gcc or clang, or set CC"),
        ("damaged", False, "1", "is damaged, and there is no C compiler"),
    ],
)
def test_what_came_with_the_package(quick, tmp_path, monkeypatch, inside, compiles, switch, origin):
    """Its best code for this CPU; where that is missing, what can be compiled here; then what else came along."""
    variants = compiler.runnable(platform.machine(), cpu_features())
    if len(variants) < 2:
        pytest.skip("one variant here")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv(build.SWITCH, switch)
    if not compiles:
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
    if inside != "none":
        file = variants[-1 if inside == "worst" else 0].file(tmp_path / "prebuilt")
        file.parent.mkdir()
        file.write_bytes(real_content()[: -1 if inside == "damaged" else None])
    said = origin.replace("best", variants[0].name).replace("worst", variants[-1].name)
    assert said in describe()
    assert (kernels() is None) == (inside in ("none", "damaged") and not compiles)
    assert asked(quick) == (origin == "compiled here")


@pytest.mark.slow
def test_prebuilt_code_computes_what_code_compiled_here_does(tmp_path):
    """All that a wheel would hold: what this CPU can run loads beside torch's threads; the best gives the same bits."""
    if REAL is None:
        pytest.skip("no C compiler here")
    tag, files = compiler.prebuild(tmp_path)
    if not files:
        pytest.skip("no prebuilt code for this machine, or by this compiler")
    assert tag.endswith(f"_{platform.machine()}") and all(compiler.whole(file) for file in files)
    generator = torch.Generator().manual_seed(0)
    weight_FX, input_RX = torch.randn(50, 700, generator=generator), torch.randn(9, 700, generator=generator)
    threads = build._torchs_threads() or ["libgomp.so.1"]
    libraries = [
        build._opened(variant.file(tmp_path), threads[0]) for variant in compiler.runnable(platform.machine(), cpu_features())
    ]
    for weight in (Weight(weight_FX), Weight(weight_FX.bfloat16()), quantised(weight_FX)):
        here_RF, best_RF = (multiply(library, weight.matrix(), input_RX, 2) for library in (REAL, libraries[0]))
        assert best_RF.equal(here_RF)


@pytest.mark.slow
def test_matrix_products_of_8_bits_have_the_same_sums(tmp_path):
    """The code for Arm's i8mm, by a CPU that has it or by an emulator, against that for dot products."""
    has = {variant.name for variant in compiler.runnable(platform.machine(), cpu_features())}
    emulator = [] if "i8mm" in has else ["qemu-aarch64", "-cpu", "max"]
    if "dotprod" not in has or REAL is None or (emulator and shutil.which(emulator[0]) is None):
        pytest.skip("needs a compiler, an Arm CPU with dot products, and i8mm or qemu-aarch64")
    outputs = []
    for variant in (variant for variant in compiler.VARIANTS["aarch64"] if variant.name in ("i8mm", "dotprod")):
        program = tmp_path / variant.name
        sources = [f"-I{compiler.FOLDER}", str(Path(__file__).parent / "products.c")]
        subprocess.run([*compiler.find_compiler(), "-O3", *variant.flags, *sources, "-lm", "-o", program], check=True)
        command = [*(emulator if variant.name == "i8mm" else []), str(program)]
        outputs.append(subprocess.run(command, check=True, capture_output=True).stdout)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 30_000


_TILES = """
import torch
from polydraft.backends.native.arguments import multiply, Weight
from polydraft.backends.native import kernels
library = kernels()
library.polydraft_instructions.restype = __import__("ctypes").c_char_p
assert b"AMX" in library.polydraft_instructions()
generator = torch.Generator().manual_seed(0)
for rows, columns in ((50, 64), (7, 96), (33, 40), (128, 576)):
    weight = (torch.randn(rows, columns, generator=generator) / 8).bfloat16()
    inputs = torch.randn(64, columns, generator=generator)
    matrix = Weight(weight).matrix()
    whole = multiply(library, matrix, inputs, 2)
    torch.testing.assert_close(whole, inputs.bfloat16().float() @ weight.float().T, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 15, 16, 17, 40):
        assert multiply(library, matrix, inputs[:count].contiguous(), 1).equal(whole[:count]), (rows, columns, count)
"""


@pytest.mark.slow
def test_matrix_units_multiply_as_everything_else_does(tmp_path):
    """The code for AMX, with its instructions written out in C: bits do not depend on the number of tokens."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("it is for CPUs with AVX-512")
    header = Path(__file__).parent / "emulated_tiles.h"
    environment = {**os.environ, "CC": f"gcc -include {header}", "POLYDRAFT_CACHE": str(tmp_path), build.SWITCH: "compile"}
    done = subprocess.run([sys.executable, "-c", _TILES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
