"""Everything that the GPU kernels are launched with, compiled for GPUs that are not there; a script of its own.

Run in the folder of tests as ``python -m models.kernel_launches {shapes,trees} CAPABILITY DTYPE``, without Triton's
interpreter, which replaces the compiler for a whole process. Each launch becomes a line of JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from families import FAMILIES
from models.attention_cases import Case
from polydraft.backends import triton as backend
from polydraft.backends.triton import interpreting
from polydraft.backends.triton import invariant as _invariant
from polydraft.backends.triton import keys as _keys
from polydraft.backends.triton.attention import AttentionPlan, attend_tree
from polydraft.backends.triton.drawing import MOST_CHILDREN
from polydraft.backends.triton.head import Entries, FusedHead
from polydraft.backends.triton.invariant import Sight, invariant_attention, invariant_parts, sight_of
from polydraft.backends.triton.layers import FusedBody, TreeView, add_norm, gate, rotate_store, vector_product
from polydraft.devices import values_hidden
from polydraft.draft import DistributionSource
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.draft.static_builder import plant_columns, plant_largest
from polydraft.engine.outcome import conclude
from polydraft.models import FeatureHead
from polydraft.models.block_slots import place
from polydraft.models.bodies import lean_body
from polydraft.models.cache import SlotCache
from polydraft.models.heads.feature_head import HeadShape, TapNorm
from polydraft.models.heads.head_context import keep_entries, take_roots
from polydraft.models.storage import move_up
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams
from polydraft.sampling.gumbel import perturbed
from polydraft.sampling.row_numbers import RowNumbers
from polydraft.sampling.truncation import largest_kept
from polydraft.sampling.warper import softened
from polydraft.trees import DraftTree, DynamicShape, SlicedMask, parse_tree, union
from polydraft.verify.node import follow_largest, follow_tokens


class AbsentGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Compile what a launch would run, as Triton itself specialises it, and say what became of it."""
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    report = {
        "kernel": kernel.__name__,
        "specialisation": compiled.hash,
        "shared": compiled.metadata.shared,
        "target": next(line for line in compiled.asm["ptx"].splitlines() if line.startswith(".target")),
        "bytes": len(compiled.asm["cubin"]),
    }
    sys.stdout.write(json.dumps(report) + "\n")


def _view(batch_size: int, size: int) -> TreeView:
    return TreeView(
        torch.zeros(batch_size, size, dtype=torch.long),
        torch.zeros(batch_size, dtype=torch.long),
        torch.ones(1, size, size, dtype=torch.bool).expand(batch_size, -1, -1),
        max_length=400,
        starts_BT=torch.zeros(batch_size, size, dtype=torch.long),
    )


def whole_models(dtype: torch.dtype) -> None:
    """Pass a tree through a layer of a model and through a feature head, both of the bundled ones' sizes."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    body = lean_body(FAMILIES.get("qwen2").build(num_hidden_layers=1, **sizes).to(dtype))
    assert body is not None
    tokens = torch.zeros(2, 5, dtype=torch.long)
    view = _view(2, 5)
    whole = TreeView(view.slots_BT, view.lengths_B, view.visible_BTU, view.max_length)
    FusedBody(body)(tokens, tokens, whole, SlotCache(1, 512))
    norms = {"taps": (1, 2), "tap_norm": TapNorm.EACH}
    shape = HeadShape(hidden_size=576, num_heads=9, num_key_heads=3, head_size=64, mlp_size=1536, window=512, **norms)
    head = FeatureHead(shape, *torch.zeros(2, 96, 576, dtype=dtype)).to(dtype)
    fused, features = FusedHead(head), torch.zeros(2, 5, 3 * 576, dtype=dtype)
    for parents in (None, tokens[0]):
        fused(Entries(tokens, fused.fused(features), parents), tokens, view, SlotCache(1, 512), 512)


def memories(dtype: torch.dtype) -> None:
    """Place tokens, keep accepted ones, and take a head's entries along."""
    lengths, places = torch.zeros(2, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
    block = SlicedMask.of(parse_tree("4x2"), torch.device("cpu")).level(1, 5).expand(2)
    limits = {"max_positions": 8192, "num_tokens": 49152}
    for window in (None, 512):
        place(
            torch.zeros(2, 4, dtype=torch.long), block, lengths, torch.zeros(2, 512, dtype=torch.long), window=window, **limits
        )
    for layers, heads, channels in ((30, 3, 64), (32, 32, 128), (2, 1, 80)):
        cache = SlotCache(layers, 64)
        cache.keys_LBHSC, cache.values_LBHSC = torch.zeros(2, layers, 2, heads, 64, channels, dtype=dtype)
        moved = cache, lengths, places, torch.zeros(2, 64, dtype=torch.long)
        assert move_up.chosen(*moved) is not None
        move_up(*moved)
    shape = HeadShape(hidden_size=576, num_heads=9, num_key_heads=3, head_size=64, mlp_size=1536, window=512)
    context = FeatureHead(shape, *torch.zeros(2, 96, 576, dtype=dtype)).to(dtype).start(2, 64)
    take_roots(torch.zeros(2, 6, 576, dtype=dtype), lengths, context.lengths_B)
    kept = places.clone(), torch.zeros(2, 6, 1728, dtype=dtype), lengths.clone()
    keep_entries(places, places, lengths, torch.zeros(2, 29, 1728, dtype=dtype), context.lengths_B, kept)


def large_models(dtype: torch.dtype) -> None:
    """Launch with the sizes of models of 7 billion weights, and with heads twice as large."""
    for channels, size in ((128, 64), (256, 64)):
        case = Case(lengths=(3000,), size=size, key_heads=8, group=4, channels=channels, dtype=dtype)
        attend(case)
    empty = partial(torch.empty, dtype=dtype)
    add_norm(empty(1, 64, 4096), empty(1, 64, 4096), empty(4096), 1e-5)
    gate(empty(1, 64, 2 * 11008))
    for rows, channels in ((12288, 4096), (4096, 11008)):
        vector_product(empty(1, 1, channels), empty(rows, channels), empty(rows) if rows == 4096 else None)
    turn(empty, queries=32, keys=8, channels=128)


def odd_models(dtype: torch.dtype) -> None:
    """Launch with sizes that no power of two divides."""
    attend(Case(lengths=(7, 3), size=3, key_heads=1, group=5, channels=26, room=4, dtype=dtype))
    empty = partial(torch.empty, dtype=dtype)
    add_norm(empty(2, 3, 99), None, empty(99), 1e-5, empty(2, 3, 198)[..., 99:])
    gate(empty(2, 3, 2 * 49))
    vector_product(empty(1, 1, 77), empty(5, 77), empty(5))
    turn(empty, queries=5, keys=1, channels=26)


def invariant(dtype: torch.dtype) -> None:
    """Launch what has one order of summation, with the sizes of small, large and odd models."""
    empty = partial(torch.empty, dtype=dtype)
    for outputs, channels in ((960, 576), (576, 1536), (4096, 11008), (12288, 4096), (22016, 4096), (33, 77)):
        for rows in (1, 64, 128, 512):
            invariant_parts(empty(1, rows, channels), empty(outputs, channels), empty(outputs) if outputs == 33 else None)
    for size, batch, channels in ((1, 1, 128), (64, 1, 128), (64, 64, 64), (512, 1, 256), (3, 1, 26)):
        attend_invariantly(empty, batch, size, (32, 8, channels))
    for size, batch, heads in ((64, 1, (32, 32, 128)), (28, 16, (32, 32, 128)), (24, 1, (9, 3, 64)), (64, 1, (8, 8, 256))):
        attend_invariantly(empty, batch, size, heads)
    add_norm(empty(1, 64, 4096), torch.empty(2, 1, 64, 4096), empty(4096), 1e-5)
    add_norm(None, torch.empty(4, 1, 8, 1536), empty(1536), 1e-5)
    rotate_store(torch.empty(4, 1, 8, 16 * 128), *empty(2, 1, 8, 128), torch.zeros(1, 8).long(), *empty(2, 1, 2, 64, 128))


def attend_invariantly(empty: Callable[..., torch.Tensor], batch_size: int, size: int, heads: tuple[int, int, int]) -> None:
    queries, keys, channels = heads
    query, key = empty(batch_size, size, queries, channels).transpose(1, 2), empty(batch_size, keys, 4096, channels)
    lengths = torch.zeros(batch_size, dtype=torch.long)
    sight = Sight(lengths, 3000)
    if 1 < size < 512:
        positions, slots = torch.zeros(batch_size, size, dtype=torch.long), torch.zeros(batch_size, 4096, dtype=torch.long)
        visible = torch.ones(batch_size, size, size, dtype=torch.bool)
        sight = sight_of(lengths, 3000, positions if size == 3 else None, positions, visible, slots)
    invariant_attention(query, key, key, sight, 0.1)


def planting(dtype: torch.dtype) -> None:
    """Plant children in trees of the default shape, with part of a vocabulary and with all of it, and in smaller ones."""
    for tree, size, known in (("4x2x2x1x1", 49152, 16384), ("8x1", 128256, 128256), ("2x1", 50, 50)):
        topology = parse_tree(tree)
        vocabulary = PartialVocabulary(torch.arange(known), size) if known < size else None
        tokens = torch.zeros(1, topology.num_nodes).long()
        children = torch.ones(2, topology.max_children, dtype=torch.long)
        plant_largest(torch.zeros(1, 2, known, dtype=dtype), children, tokens, vocabulary, size)
        plant_columns(children.view(1, -1), children, tokens, vocabulary)
    most = torch.ones(64, MOST_CHILDREN, dtype=torch.long)
    plant_largest(torch.zeros(1, 64, 262144, dtype=dtype), most, most, None, 262144)
    plant_columns(most.view(1, -1), most, most, None)


def probabilities(dtype: torch.dtype) -> None:
    """Turn logits into distributions, of vocabularies that a program can hold and of larger ones."""
    _keys.touch[(1,)](torch.zeros(1, dtype=torch.int32))
    for columns in (50, 24576, 49152, 262144):
        softened(torch.zeros(2, 3, columns, dtype=dtype), None)
        softened(torch.zeros(2, 3, columns, dtype=dtype), torch.ones(2, 1, 1))
    for places, tokens_D in ((1, None), (3, torch.arange(columns))):
        keys_B, positions_BK = torch.ones(2, dtype=torch.long), torch.ones(2, places, dtype=torch.long)
        perturbed(torch.zeros(2, 3, columns, dtype=dtype), keys_B, positions_BK, torch.ones(2), tokens_D)
    for row in (SamplingParams(top_k=20), SamplingParams(top_p=0.9), SamplingParams(top_k=20, top_p=0.8, min_p=0.1)):
        numbers = RowNumbers(2, torch.device("cpu"))
        numbers.write(RowParams.of(row, 2))
        scores, noise = torch.zeros(2, 3, columns), (keys_B, positions_BK, torch.ones(2), None)
        largest_kept(scores, noise, scores, numbers, row.top_k, [])


def greedy_rounds(dtype: torch.dtype) -> None:
    """Verify and conclude rounds at temperature 0: of the usual trees, the largest, and with further children."""
    for tree, size in (("4x2x2x1x1", 49152), ("1023", 262144), ("2x1", 50)):
        topology = parse_tree(tree)
        tokens = torch.zeros(1, topology.num_nodes).long()
        draft = DraftTree.from_topology(topology, tokens, (), torch.zeros(topology.num_nodes).long())
        draft = draft if size > 50 else union(draft, draft)
        verdict = follow_largest(draft, torch.zeros(*draft.tokens_BN.shape, size, dtype=dtype))
        follow_tokens(draft, draft.tokens_BN)
        conclude(draft, verdict, torch.zeros(1, 2).long(), torch.ones(1, dtype=torch.bool))


def dynamic_rounds(dtype: torch.dtype) -> None:
    """Grow dynamic trees at temperature 0: of the usual shape, of the largest that kernels take, and of a small one."""
    shapes = [DynamicShape(nodes=64, depth=6), DynamicShape(nodes=1024, depth=8, beam=16, branch=16)]
    shapes.append(DynamicShape(nodes=3, depth=2, beam=1, branch=1, adaptive=False))
    for shape, size, known in zip(shapes, (49152, 131072, 50), (24576, 131072, 7), strict=True):
        source = DistributionSource(torch.device("cpu"), PartialVocabulary(torch.arange(known), size) if known < size else None)
        builder = FixedBuilder(source, shape, RowParams.of(SamplingParams(temperature=0), 1), size)
        assert builder.form(dtype) is not None
        builder.made_up(dtype)


def attend(case: Case) -> None:
    query, key, value, lengths, visible = case.build("cpu")
    attend_tree(query, key, value, lengths, visible, 0.1, max(case.lengths))


def turn(empty: Callable[..., torch.Tensor], queries: int, keys: int, channels: int) -> None:
    angles, slots = empty(2, 3, channels), torch.zeros(2, 3, dtype=torch.long)
    key, value = (empty(3, 2, keys, 11, channels)[1] for _ in range(2))
    rotate_store(empty(2, 3, (queries + 2 * keys) * channels), angles, angles, slots, key, value)


def trees(dtype: torch.dtype) -> None:
    """Launch for trees of many sizes, and for the levels of one, whose masks are cut out of the whole tree's."""
    shapes = [(size, 0, splits) for size, splits in ((1, 2), (16, 3), (17, 16), (64, 17))] + [(5, 3, 2), (1, 16, 5)]
    mask = SlicedMask.of(parse_tree("5x3x2"), torch.device("cpu"), lead=1)
    levels = [mask.level(first, stop).expand(1) for first, stop in zip((0, *mask.stops[:-1]), mask.stops, strict=True)]
    for size, earlier, splits in shapes:
        launch_level(dtype, torch.ones(1, size, earlier + size, dtype=torch.bool), splits)
    for splits, level in enumerate(levels, start=2):
        launch_level(dtype, level.visible_BTU, splits)


def launch_level(dtype: torch.dtype, visible: torch.Tensor, splits: int) -> None:
    size, places = visible.shape[1:]
    case = Case(lengths=(100,), size=size, earlier=places - size, group=3, dtype=dtype, room=256 - 100 - places)
    query, key, value, lengths, _ = case.build("cpu")
    plan = AttentionPlan(block_lines=16, block_keys=16, splits=splits, warps=4, stages=2)
    attend_tree(query, key, value, lengths, visible, 0.1, 100, plan=plan)
    angles, slots = torch.zeros(2, 1, size, 64, dtype=dtype), torch.zeros(1, size, dtype=torch.long)
    rotate_store(torch.zeros(1, size, 10 * 64, dtype=dtype), *angles, slots, key, value)


def main(what: str, capability: str, dtype: str) -> None:
    driver.set_active(AbsentGPU(int(capability)))
    backend._overlaps = lambda device: int(capability) >= 90
    JITFunction.__getitem__ = lambda kernel, grid: partial(_compile, kernel, grid)
    if int(capability) >= 90:
        _invariant.shared_room = lambda device: 227 * 2**10
    models = [whole_models, large_models, odd_models, invariant, planting, memories, probabilities]
    models += [greedy_rounds, dynamic_rounds]
    with interpreting(), values_hidden():  # tensors are on the CPU, and kernels are to be launched all the same
        for launches in [trees] if what == "trees" else models:
            launches(getattr(torch, dtype))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        main(*sys.argv[1:])
