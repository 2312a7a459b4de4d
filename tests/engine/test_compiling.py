"""Threads that compile kernels ahead of the first round: they launch what rounds launch, and no text depends on them."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interpreted
from families import FAMILIES
from fixed_trees import FixedTrees
from polydraft.backends import triton as kernels
from polydraft.backends.triton import compiling
from polydraft.backends.triton.layers import FusedBody
from polydraft.engine import Decoder
from polydraft.models.bodies import lean_body
from polydraft.models.hf import HFModel, early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree
from stand_in import StandIn

INTERPRETED = interpreted.turn_on()
SHAPES = {"static": parse_tree("3x2x1"), "dynamic": DynamicShape(nodes=12, depth=3, adaptive=False), "none": parse_tree("none")}
PROMPT = [5, 6, 7, 8]
LAYERS = {"add_norm", "rotate_store", "gate", "attend"}
"""Kernels of the target's layers."""


@pytest.fixture
def new_gpu(
    monkeypatch: pytest.MonkeyPatch, hide_values: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """Let this machine pass for a GPU that has not met our kernels."""
    monkeypatch.setattr(kernels, "are_new", lambda device: True)
    hide_values()
    caplog.set_level(logging.DEBUG, "polydraft")
    return caplog


def target() -> HFModel:
    return HFModel(FAMILIES.get("llama").build())


def texts(model: Any, shape: str, temperature: float) -> list[list[int]]:
    decoder = Decoder(model, FixedTrees(early_exit(model, 1), SHAPES[shape]), graphs=True, coupled=True)
    sampling = SamplingParams(temperature=temperature)
    results = decoder.generate([PROMPT, PROMPT[:2]], sampling=sampling, max_new_tokens=12, seed=[3, 4])
    return [result.token_ids for result in results]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_text_depends_on_them(
    shape: str,
    temperature: float,
    caches: list[StandIn],
    new_gpu: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, done = target(), Counter[str]()
    for name in ("_pass_through_target", "_draw_and_verify"):
        work = getattr(compiling, name)

        def noted(*given: Any, name: str = name, work: Any = work) -> None:
            work(*given)
            done[name] += 1

        monkeypatch.setattr(compiling, name, noted)
    found = texts(model, shape, temperature)
    assert done == {"_pass_through_target": 1, "_draw_and_verify": 1}, [record.getMessage() for record in new_gpu.records]
    monkeypatch.setattr(kernels, "are_new", lambda device: False)
    assert texts(model, shape, temperature) == found and caches
    assert sum(done.values()) == 2


def test_what_fails_ahead_of_time_is_left_to_the_round(
    caches: list[StandIn], new_gpu: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(compiling, "_pass_through_target", failing)
    assert len(texts(target(), "static", 0.0)[0]) == 12
    assert "no room" in new_gpu.text


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")
@pytest.mark.parametrize(
    ("shape", "temperature", "expected"),
    [
        ("static", 0.8, {"perturb", "largest_of_parts", "follow", *LAYERS}),
        ("dynamic", 0.0, {"rank_and_sum", "grow_level", "choose_candidates", "plant_chosen", "follow", *LAYERS}),
    ],
)
def test_they_launch_what_rounds_do(
    shape: str,
    temperature: float,
    expected: set[str],
    caches: list[StandIn],
    new_gpu: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    interpret: Callable[[bool], None],
) -> None:
    from polydraft.backends.triton import follow_kernels as _follow_kernels
    from polydraft.backends.triton import growth_kernels as _growth_kernels
    from polydraft.backends.triton import gumbel_kernels as _gumbel_kernels
    from polydraft.backends.triton import layer_kernels as layers

    seen: dict[str, set[str]] = {"ahead": set(), "round": set()}
    turns = ["round"]

    class AtOnce:
        """No thread: the interpreter works in one alone."""

        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self._work = partial(target, *args)

        def start(self) -> None:
            turns.append("ahead")
            self._work()
            turns.pop()

        def join(self) -> None:
            pass

    monkeypatch.setattr(compiling, "threading", SimpleNamespace(Thread=AtOnce))
    for module in (_growth_kernels, _follow_kernels, _gumbel_kernels, layers):
        for name in expected & set(vars(module)):
            monkeypatch.setattr(module, name, _Noting(getattr(module, name), lambda name=name: seen[turns[-1]].add(name)))
    interpret(True)
    model = HFModel(FAMILIES.get("llama").build(), native=False)
    model.fast = FusedBody(lean_body(model.hf_model))
    texts(model, shape, temperature)
    assert seen["ahead"] == expected <= seen["round"], new_gpu.text


class _Noting:
    """A kernel that tells of its launches."""

    def __init__(self, kernel: Any, note: Callable[[], None]) -> None:
        self._kernel, self._note = kernel, note

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._note()
        return self._kernel[grid]
