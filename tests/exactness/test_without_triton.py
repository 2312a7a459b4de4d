"""GPUs on which Triton does not work: one warning, and torch's operations in place of our kernels."""

import logging
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from polydraft.backends import triton as kernels
from polydraft.backends.triton.attention import obstacle

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let a GPU seem to be there, and Triton too."""
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels.triton_obstacle.cache_clear()
    yield monkeypatch
    kernels.triton_obstacle.cache_clear()


def test_a_triton_that_cannot_compile_is_told_once(a_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def failing(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore of it")

    a_gpu.setattr(kernels, "_launch_one", failing)
    with caplog.at_level(logging.WARNING, "polydraft"):
        assert kernels.triton_obstacle(GPU) and kernels.triton_obstacle(GPU)
    assert "Failed to find C compiler" in str(obstacle(GPU)) and tried == [GPU]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "without our GPU kernels" in line and "Failed to find C compiler" in line and "more of it" not in line


@pytest.mark.parametrize("compiled", [False, True])
def test_one_that_can_is_used_and_users_are_told_what_they_wait_for(
    compiled: bool, a_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a_gpu.setattr(kernels, "_launch_one", lambda device: compiled)
    a_gpu.setattr(kernels, "_new", set())
    with caplog.at_level(logging.INFO, "polydraft"):
        assert kernels.triton_obstacle(GPU) is None and kernels.triton_obstacle(GPU) is None and obstacle(GPU) is None
    assert [record.getMessage()[:9] for record in caplog.records] == ["compiling"] * compiled
    assert kernels.are_new(GPU) == compiled


@pytest.mark.parametrize(("told", "seconds", "compiled"), [
    (True, 1.5, False),  # found in the cache, however long a busy machine took
    (False, 0.01, True),
    (None, 0.01, False),  # an old Triton
    (None, 1.5, True),
])  # fmt: skip
def test_whether_a_kernel_was_compiled_is_for_triton_to_say(
    told: bool | None, seconds: float, compiled: bool, a_gpu: pytest.MonkeyPatch
) -> None:
    compilation = SimpleNamespace() if told is None else SimpleNamespace(listener=None)
    a_gpu.setitem(sys.modules, "triton.knobs", SimpleNamespace(compilation=compilation))
    a_gpu.setattr(torch.cuda, "device", lambda device: nullcontext())
    a_gpu.setattr(torch, "zeros", lambda *_, **__: None)
    now = iter([0.0, seconds])
    a_gpu.setattr(kernels.time, "perf_counter", lambda: next(now))

    def launch(touched: object) -> None:
        if told is not None:
            compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=told)

    a_gpu.setattr(pytest.importorskip("polydraft.backends.triton.keys"), "touch", {(1,): launch})
    assert kernels._launch_one(GPU) == compiled
    assert getattr(compilation, "listener", None) is None


def test_an_old_gpu_is_not_tried(a_gpu: pytest.MonkeyPatch) -> None:
    a_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    a_gpu.setattr(kernels, "_launch_one", pytest.fail)
    assert kernels.triton_obstacle(GPU) and "7.5 is below 8.0" in str(obstacle(GPU))
