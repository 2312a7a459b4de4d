"""Products and attention of one order, in Triton's interpreter: what they compute. That bits agree is a GPU's to show."""

import pytest
import torch

import interpreted
from families import FAMILIES
from models.attention_cases import by_blocks
from models.invariant_cases import TreeCase, products
from polydraft.backends.triton import invariant as _invariant
from polydraft.backends.triton import power_of_two
from polydraft.backends.triton.invariant import AttendPlan, plan_attend, plan_product, splits_of
from polydraft.backends.triton.layers import FusedBody
from polydraft.errors import UsageError
from polydraft.models.bodies import lean_body
from polydraft.models.hf import HFModel
from polydraft.models.inflated import SHAPES, BigShape, InflatedModel
from polydraft.trees import SlicedMask, parse_tree

needs_triton = pytest.mark.skipif(not interpreted.turn_on(), reason="pip install triton, and no GPU, for this test")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize(
    ("rows", "outputs", "channels"), [(1, 48, 64), (5, 33, 77), (3, 40, 1100), (130, 40, 1100), (70, 100, 64)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_products(rows, outputs, channels, biased):
    found, expected = products("cpu", torch.float32, rows, outputs, channels, biased)
    torch.testing.assert_close(found.double(), expected, **CLOSE)


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("at_once", [False, True], ids=["splits apart", "at once"])
@pytest.mark.parametrize("length", [0, 5, 29])
def test_attention_in_a_tree_alone_and_in_a_prompt(length, at_once, monkeypatch):
    monkeypatch.setattr(_invariant, "MULTIPROCESSORS", 1 if at_once else 10**6)
    monkeypatch.setattr(_invariant, "_SPLIT_KEYS", 32)
    case = TreeCase(
        length=length, key_heads=1, tree="2x1x1x1", group=3 if length == 5 else 1, channels=26 if length == 5 else 32
    )
    expected = case.expected("cpu")
    ways = (case.in_a_tree("cpu")[0], case.in_a_tree("cpu", batch=2, max_length=case.length + 4)[1], case.alone("cpu", size=3))
    for found in ways:
        torch.testing.assert_close(found.double(), expected, **CLOSE)


@needs_triton
@pytest.mark.parametrize("at_once", [False, True], ids=["splits apart", "at once"])
def test_slots_may_follow_each_other_with_all_that_they_hold(at_once, monkeypatch):
    monkeypatch.setattr(_invariant, "MULTIPROCESSORS", 1 if at_once else 10**6)
    monkeypatch.setattr(_invariant, "_SPLIT_KEYS", 32)
    case = TreeCase(length=37, key_heads=2, group=2, channels=16)
    query, key, value = (tensor.repeat(2, 1, 1, 1) for tensor in case.build("cpu")[2:])
    found = [
        _invariant.invariant_attention(query, *stored, case.sight("cpu", 2), case.scale)
        for stored in ((key, value), by_blocks(key, value))
    ]
    assert torch.equal(*found)


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("window", [3, 20])
def test_windows_cut_text_and_tree_alike(window, monkeypatch):
    monkeypatch.setattr(_invariant, "_SPLIT_KEYS", 32)
    case = TreeCase(length=29, key_heads=1, tree="2x1x1x1", window=window)
    torch.testing.assert_close(case.in_a_tree("cpu")[0], case.alone("cpu"), **CLOSE)


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("at_once", [False, True], ids=["splits apart", "at once"])
@pytest.mark.parametrize(("length", "group"), [(0, 1), (15, 4), (29, 3), (31, 9)])
def test_tails_of_several_groups_and_splits(length, group, at_once, monkeypatch):
    monkeypatch.setattr(_invariant, "MULTIPROCESSORS", 1 if at_once else 10**6)
    monkeypatch.setattr(_invariant, "_SPLIT_KEYS", 32)
    case = TreeCase(length=length, key_heads=1, tree="chain:37", group=group, channels=16)
    torch.testing.assert_close(case.in_a_tree("cpu")[0].double(), case.expected("cpu"), **CLOSE)


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("max_positions", [10**6, 31, 20])
@pytest.mark.parametrize(("length", "tree"), [(0, "2x2x1"), (16, "2x2x1"), (29, "2x2x1"), (29, "chain:20")])
def test_tails_are_the_slots_of_paths(length, tree, max_positions, window):
    case = TreeCase(length=length, tree=tree, window=window)
    sight, ancestors = case.sight("cpu", batch=2, max_positions=max_positions), case.build("cpu")[1]
    assert sight.tails_BTX.shape[2] % 16 == 0 and sight.tails_BTX[0].equal(sight.tails_BTX[1])
    for node, (tail, last) in enumerate(zip(sight.tails_BTX[0].tolist(), sight.positions_BT[0].tolist(), strict=True)):
        start = 0 if window is None else max(last - window + 1, 0)
        slots = [*range(length), *(length + ancestors[node].nonzero()[:, 0]).tolist()]
        for position, slot in enumerate(tail, start=length // 16 * 16):
            if not start <= position <= last:
                assert slot == -1, "not seen"
            elif position == max_positions - 1:
                assert slot in slots[position:], "several of a path are there"
            else:
                assert slot == slots[position]


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_what_is_past_the_last_position_leaves_others_alone():
    case = TreeCase(length=13, key_heads=1, tree="2x1x1x1")
    whole, limited = case.in_a_tree("cpu")[0], case.in_a_tree("cpu", max_positions=16)[0]
    inside = case.build("cpu")[0] < 3
    assert limited.isfinite().all() and limited[inside].equal(whole[inside]) and not inside.all()


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("at_once", [False, True], ids=["splits apart", "at once"])
@pytest.mark.parametrize("lines", [16, 32, 64])
def test_every_plan_computes_the_same(lines, at_once, monkeypatch):
    monkeypatch.setattr(_invariant, "_SPLIT_KEYS", 64)
    case = TreeCase(length=85, key_heads=1, tree="3x2x1", group=3, channels=16)
    for keys in (16, 64):
        found = case.in_a_tree("cpu", plan=AttendPlan(lines, keys, at_once=at_once))[0]
        torch.testing.assert_close(found.double(), case.expected("cpu"), **CLOSE)


def test_few_multiprocessors_are_without_work_if_there_is_any():
    def sizes(batch, heads, lines, splits, dtype=torch.bfloat16):
        plan = plan_attend(batch, heads, lines, splits, 128, dtype, 227 * 2**10)
        return plan.lines, plan.at_once

    assert sizes(1, 32, 28, 2) == sizes(1, 3, 72, 2) == sizes(1, 32, 1, 8) == (16, False)
    assert sizes(1, 32, 64, 3) == (32, False), "192 programs, where 64 lines would be 96"
    assert sizes(1, 32, 64, 2) == (32, False), "128 programs are enough"
    assert sizes(1, 32, 64, 8) == sizes(4, 32, 64, 2) == (64, False)
    assert sizes(16, 32, 28, 2) == (32, True) and sizes(5, 32, 64, 2) == (64, True), "enough without splits"
    assert sizes(5, 32, 64, 2, torch.float32) == (32, True)


@pytest.mark.parametrize("room", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [64, 80, 128, 256])
def test_keys_and_values_under_way_have_room(channels, dtype, room):
    for lines in (16, 64):
        plan = plan_attend(1, 8, lines, 2, channels, dtype, room * 2**10)
        assert plan.stages == 2 if dtype == torch.float32 else plan.stages == 3
        under_way = 2 * plan.keys * (plan.stages - 1) + plan.lines
        assert under_way * power_of_two(channels) * dtype.itemsize <= room * 2**10
    assert plan_attend(1, 8, 64, 2, 512, dtype, 99 * 2**10).stages == 2, "where three do not fit"
    assert plan_attend(1, 8, 16, 2, 64, torch.bfloat16, room * 2**10) == AttendPlan(16, 128, at_once=False, stages=3)


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_a_body_computes_what_the_usual_one_does(tiny, monkeypatch):
    model = tiny("llama")
    block = SlicedMask.of(parse_tree("2x1"), torch.device("cpu")).level(0, 5).expand(2)
    found = []
    for fused in (None, FusedBody(lean_body(model.hf_model), invariant=True)):
        monkeypatch.setattr(model, "fast", fused)
        with torch.no_grad():
            context = model.start(2, 32)
            context.prefill([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [3, 4]])
            found.append(context.extend(torch.tensor([[11, 12, 13, 14, 15]] * 2), block))
            context.commit(torch.tensor([[0, 1, 3], [0, 2, 4]]), torch.tensor([3, 2]))
            context.settle([20, 4])
            one = SlicedMask.of(parse_tree("none"), torch.device("cpu")).level(0, 1).expand(2)
            found.append(model.head(context.extend(torch.tensor([[9], [8]]), one)))
    for usual, invariant in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(invariant, usual, rtol=1e-4, atol=1e-4)


class FirstOfItsKind:
    """Replays what came first of a kind, as a capture does: whatever differs later must be in the inputs or in tensors."""

    def __init__(self):
        self.functions, self.calls = {}, 0

    def run(self, kind, function, *inputs):
        self.calls += 1
        return self.functions.setdefault(kind, function)(*inputs), True


@needs_triton
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "inflated"])  # one has a window, one shows fewer features
def test_captured_passes_read_prompts_into_any_row(tiny, monkeypatch, family, registered):
    model = tiny("llama" if family == "inflated" else family)
    if family == "inflated":
        shape = BigShape(hidden_size=80, num_layers=4, num_heads=6, num_key_heads=6, head_size=16, mlp_size=100)
        registered(SHAPES, "wider", shape)
        model = InflatedModel(model, "wider", native=False)
    monkeypatch.setattr("polydraft.models.hf_context.READING_SIZES", (4, 8))
    monkeypatch.setattr("polydraft.models.hf_context._MOST_TOGETHER", 8)
    fused = FusedBody(lean_body(model.hf_model), invariant=True)
    parts = [
        [list(range(3, 9)), [], []],
        [[], [], list(range(20, 25))],
        [[], [9, 8], []],
        [[4] * 7, [], [7, 7, 7]],
        [[], [5] * 9, []],
        [[6, 6, 6], [], [8, 8]],
    ]
    found, graphs = [], FirstOfItsKind()
    for lent in (None, graphs):
        monkeypatch.setattr(model, "fast", None if lent is None else fused)
        with torch.no_grad():
            context = model.start(3, 64)
            context.prefill([[1, 2], [3, 4], [5, 6, 7]])
            context.graphs = lent
            seen = []

            def observe(rows, starts, counts, features, seen=seen):
                seen.append((rows, starts, counts, features.clone()))

            for texts in parts:
                context.prefill(texts, observe)
            one = SlicedMask.of(parse_tree("none"), torch.device("cpu")).level(0, 1).expand(3)
            found.append((seen, model.head(context.extend(torch.tensor([[9], [8], [7]]), one)), context.lengths))
    assert graphs.calls == 6, "nine tokens are too many, and two texts of four are read together"
    assert [kind[1:3] for kind in graphs.functions] == [(1, 8), (1, 4), (2, 4)], "sizes are rounded up"
    assert found[0][2] == found[1][2] == [18, 13, 13]
    for plain, replayed in zip(found[0][0], found[1][0], strict=True):
        assert plain[:3] == replayed[:3]
        torch.testing.assert_close(replayed[3], plain[3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)


def test_where_channels_are_cut_depends_on_the_weight_alone():
    for outputs, channels in ((4096, 11008), (12288, 4096), (576, 1536), (49152, 576)):
        tiles = {plan_product(rows, outputs, channels, torch.bfloat16) for rows in (1, 5, 16, 64, 100, 512)}
        assert len(tiles) > 1, "tiles follow the rows"
        assert splits_of(outputs, channels) == {4096: 2, 576: 4}.get(outputs, 1)
        assert all(128 % tile.channels == 0 for tile in tiles), "a split is a number of tiles"


def test_a_model_that_cannot_be_invariant_says_so():
    with pytest.raises(UsageError, match="cannot be invariant: the kernels for that run on GPUs, not on cpu"):
        HFModel(FAMILIES.get("llama").build(), invariant=True)
    assert not HFModel(FAMILIES.get("llama").build()).invariant
