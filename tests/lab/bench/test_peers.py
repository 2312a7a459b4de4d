import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.lab.bench import _peers
from polydraft.lab.bench.method import Bench, MethodSpec
from polydraft.lab.bench.session import BenchOptions, BenchSession
from polydraft.sampling import SamplingParams


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    """Prompts of growing length: each would outgrow a cache made for the one before it."""
    path = tmp_path / "prompts.jsonl"
    prompts = [{"id": f"p{count}", "category": "a", "prompt": "so " * count} for count in (1, 4, 7)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def measure(tiny: str, prompt_file: str, out: Path, *methods: str, **options) -> dict:
    chosen = BenchOptions(methods=methods, source=prompt_file, target=tiny, draft="none", max_new_tokens=8, **options)
    return BenchSession(chosen).run(out, resume=False, command=[], progress=lambda _: None)["methods"]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.slow
def test_compiled_generation_compiles_once_for_all_lengths(
    tiny: str, prompt_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None, temperature: float
) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(_peers, "_BACKEND", count)
    figures = measure(tiny, prompt_file, tmp_path / "out", "ar", "hf", "hf-compiled", temperature=temperature)["hf-compiled"]
    assert figures["status"] == "ok", figures["error"]
    assert figures["prompts"] == 3 and figures["tokens_per_pass"] == 1 and len(graphs) == 1
    if temperature == 0:
        assert figures["identical"] + figures["near_tie_differences"] == 3


# By default nothing is traced, which takes seconds: the compiler fails before it is given anything.
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_a_compiler_the_other_methods_go_on(
    tiny: str, prompt_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, traced: bool
) -> None:
    def fail(*_: object, **options: object):
        raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')")

    if traced:
        request.getfixturevalue("fresh_compiler")
        monkeypatch.setattr(_peers, "_BACKEND", fail)
    else:
        monkeypatch.setattr(torch, "compile", fail)
    figures = measure(tiny, prompt_file, tmp_path / "out", "hf-compiled", "ar")
    assert figures["ar"]["status"] == "ok" and figures["ar"]["prompts"] == 3
    assert (
        figures["hf-compiled"]["error"] == "method 'hf-compiled' needs a C++ compiler and found none; install one, such as g++"
    )


@pytest.mark.slow
def test_compiled_generation_with_the_real_compiler(tiny: str, prompt_file: str, tmp_path: Path, fresh_compiler: None) -> None:
    figures = measure(tiny, prompt_file, tmp_path / "out", "ar", "hf-compiled")["hf-compiled"]
    assert figures["status"] == "ok", figures["error"]
    assert figures["identical"] + figures["near_tie_differences"] == 3


class FakeLlama:
    """Stands for `llama_cpp.Llama`: yields its prompt back, then the end of the text."""

    def __init__(self, path: str, **options: object) -> None:
        self.path, self.options, self.calls = path, options, []

    def reset(self) -> None:
        self.calls.append("reset")

    def set_seed(self, seed: int) -> None:
        self.calls.append(("seed", seed))

    def generate(self, tokens: list[int], **distribution: object) -> Iterator[int]:
        self.calls.append(distribution)
        yield from tokens
        yield 99
        yield from [1] * 100


def llama_bench(temperature: float) -> Bench:
    target = SimpleNamespace(model=SimpleNamespace(name="smollm2"), eos_token_ids=(99,))
    return Bench(target=target, draft=None, params=SamplingParams(temperature=temperature), max_new_tokens=4, longest_prompt=30)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_llama_cpp_is_asked_for_the_plain_distribution(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    made: list[FakeLlama] = []

    def build(path: str, **options: object) -> FakeLlama:
        made.append(FakeLlama(path, **options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=build))
    monkeypatch.setattr(_peers, "weights_file", lambda: Path("model.gguf"))
    method = _peers.llama_cpp(MethodSpec.parse("llama.cpp"), llama_bench(temperature))
    assert [token.token_id for token in method.generate([5, 6], 3)] == [5, 6, 99], "ends with the end of the text"
    assert [token.target_pass for token in method.generate([5, 6, 7, 8, 9], 2**32 - 1)] == [0, 1, 2, 3], "ends at the limit"
    threads = torch.get_num_threads()
    assert made[0].options == {"n_ctx": 34, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    distribution = {
        "temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    assert made[0].calls == ["reset", ("seed", 3), distribution, "reset", ("seed", 0), distribution], (
        "the highest seed would draw one"
    )
    assert not method.comparable


def test_llama_cpp_is_refused_where_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(_peers, "weights_file", lambda: Path("model.gguf"))
    with pytest.raises(UsageError, match="pip install llama-cpp-python") as caught:
        _peers.llama_cpp(MethodSpec.parse("llama.cpp"), llama_bench(0.0))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(_peers, "weights_file", lambda: None)
    with pytest.raises(UsageError, match="--target smollm2 and GGUF files"):
        _peers.llama_cpp(MethodSpec.parse("llama.cpp"), llama_bench(0.0))
