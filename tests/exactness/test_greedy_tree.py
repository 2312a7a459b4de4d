"""Decoders with a tree of its own for one text at temperature 0."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interpreted
from covering import covering
from fixed_trees import FixedTrees
from polydraft.draft import TreeDrafter
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.draft.static_builder import StaticBuilder
from polydraft.engine import Decoder, Generation
from polydraft.errors import UsageError
from polydraft.lab.theory import largest_tree
from polydraft.loading import _resolved
from polydraft.options import LoadOptions
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import DynamicShape, parse_tree
from polydraft.trees.topology import RANK_ACCEPTANCE
from stand_in import StandIn

from .setups import DRAFT, HEAD, RAGGED_PROMPTS, TARGET
from .test_greedy import greedy_text

INTERPRETED = interpreted.turn_on()
GREEDY = SamplingParams(temperature=0)
WIDE, USUAL = parse_tree("best:24x4"), parse_tree("2x1")
WIDES = {"static": WIDE, "dynamic": DynamicShape(nodes=24, depth=4, adaptive=False)}


def decoder_of(model: Any, wide: str = "static", **options: Any) -> Decoder:
    return Decoder(TARGET, FixedTrees(model, USUAL, alone=WIDES[wide]), **options)


def depth_of(result: Generation) -> float:
    return result.stats.path_tokens / result.stats.rounds


@pytest.mark.parametrize("wide", WIDES)
@pytest.mark.parametrize(("model", "graphs"), covering([DRAFT, HEAD], [False, True]))
def test_one_greedy_text_has_the_wide_tree(
    model: Any,
    graphs: bool,
    wide: str,
    caches: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    hide_values: Callable[[], None],
) -> None:
    # As on a GPU: nobody looks at values, and rounds of dynamic trees are captured too.
    hide_values()
    decoder = decoder_of(model, wide, graphs=graphs)
    for prompt in RAGGED_PROMPTS:
        result = decoder.generate(prompt, sampling=GREEDY, max_new_tokens=40)
        assert result.token_ids == greedy_text(TARGET, prompt, 40, GREEDY)
        assert depth_of(result) == WIDE.depth or (wide == "dynamic" and depth_of(result) > USUAL.depth)
    assert bool(caches) == graphs


SLOW: list[Any] = [
    (SamplingParams(temperature=0, repetition_penalty=1.2), True, None),
    (SamplingParams(temperature=0, logit_bias={3: 1.0}), True, None),
    (GREEDY, False, None),
    (GREEDY, True, "recurrent layers"),
    (SamplingParams(), True, None),
]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")
@pytest.mark.parametrize(
    ("params", "kernels", "obstacle"), [(GREEDY, True, None), (replace(GREEDY, top_k=3), True, None), *SLOW]
)
def test_a_gpu_grows_dynamic_trees_where_kernels_do_and_has_the_best_static_tree_elsewhere(
    params: SamplingParams, kernels: bool, obstacle: str | None, interpret: Callable[[bool], None]
) -> None:
    interpret(kernels)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape_obstacle=obstacle, vocab_size=TARGET.vocab_size)
    for drafter in (TreeDrafter(DRAFT, USUAL, alone=WIDES["dynamic"]), TreeDrafter(DRAFT, WIDES["dynamic"])):
        builder = drafter.builder(RowParams((params,)), gpu)
        if (params, kernels, obstacle) not in SLOW:
            assert isinstance(builder, FixedBuilder)
        else:
            usual = params.temperature > 0 and drafter.alone is not None
            assert type(builder) is StaticBuilder and builder.topology == (USUAL if usual else WIDE)


def test_batches_of_a_gpu_have_the_best_static_tree() -> None:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape_obstacle=None, vocab_size=TARGET.vocab_size)
    builder = TreeDrafter(DRAFT, WIDES["dynamic"]).builder(RowParams((GREEDY, GREEDY)), gpu)
    assert type(builder) is StaticBuilder and builder.topology == WIDE


@pytest.mark.parametrize("model", [DRAFT, HEAD], ids=["model", "head"])
def test_batches_and_drawn_texts_have_the_usual_tree_and_its_texts(model: Any) -> None:
    decoder, usual = decoder_of(model), Decoder(TARGET, TreeDrafter(model, USUAL))
    for prompts, sampling, seeds in ((RAGGED_PROMPTS[:1], SamplingParams(), [5]), (RAGGED_PROMPTS[:2], GREEDY, [1, 2])):
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 30, "seed": seeds}
        results, expected = decoder.generate(prompts, **options), usual.generate(prompts, **options)
        assert [one.token_ids for one in results] == [one.token_ids for one in expected]
        assert results[0].stats.drafted_tokens == expected[0].stats.drafted_tokens


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (24, 4), (64, 6), (200, 9)])
def test_the_best_tree_is_theorys(nodes: int, depth: int) -> None:
    assert parse_tree(f"best:{nodes}x{depth}") == largest_tree(RANK_ACCEPTANCE, nodes, max_depth=depth)


@pytest.mark.parametrize("tree", ["best:1x3", "best:2000x3", "best:8x0", "best:8", "4x2/dynamic:8", "x/4x2", "/4x2"])
def test_trees_that_there_are_not_are_refused(tree: str) -> None:
    with pytest.raises(UsageError, match="allowed"):
        LoadOptions(tree=tree)


def test_a_gpu_has_two_trees_unless_something_is_asked_for() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    small, large = (_resolved(LoadOptions(target), gpu, torch.bfloat16) for target in ("smollm2", "inflated:7b"))
    for options, nodes in ((small, 32), (large, 64)):
        assert isinstance(options.alone, DynamicShape) and options.alone.nodes == nodes
        assert options.shape == (None, parse_tree("4x2x1x1x1")) and "/load:" in options.tree
    for options in (LoadOptions(tree="4x2x1"), LoadOptions(walk="node"), LoadOptions(scheme="rrs-wor")):
        assert _resolved(options, gpu, torch.bfloat16).alone is None
    assert _resolved(LoadOptions(), cpu, torch.bfloat16).alone is None
    parallel = _resolved(LoadOptions(device_map="tp"), gpu, torch.bfloat16)
    assert parallel.shape == small.shape and parallel.alone == small.alone and "load:" not in parallel.tree
