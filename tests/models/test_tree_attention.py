"""Tree attention by Triton's interpreter is masked attention; the kernels themselves run in tests/gpu."""

import pytest
import torch

import interpreted as interpreter
from models.attention_cases import Case, by_blocks, largest_error
from polydraft.backends.triton import attention as module
from polydraft.backends.triton.attention import AttentionPlan, attend_tree, obstacle, plan_attention
from polydraft.models.attention import tree_attention

interpreter.turn_on()

CPU = torch.device("cpu")
WHY_NOT = obstacle(CPU, torch.float32)
interpreted = pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}; pip install triton, and no GPU, for this test")

CASES = [
    Case(lengths=(100, 13), size=5, group=3),
    Case(lengths=(0, 150, 64), size=13, earlier=7, key_heads=1, group=8, channels=80, dtype=torch.float16),
    Case(lengths=(129,), size=1, key_heads=2, group=4, channels=96),
    Case(lengths=(1,), size=1, channels=128),
    Case(lengths=(70, 0), size=64, key_heads=1, channels=32),
    Case(lengths=(40,), size=128, key_heads=1, group=3, channels=16),
]


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_masked_attention(case):
    assert largest_error(case, "cpu") < case.tolerance


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_any_number_of_splits_gives_the_same(splits):
    plan = AttentionPlan(block_lines=16, block_keys=16, splits=splits, warps=4, stages=2)
    case = Case(lengths=(90, 3, 47), size=6, group=3, key_heads=1, channels=16)
    assert largest_error(case, "cpu", plan=plan) < case.tolerance


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_a_larger_bucket_changes_nothing():
    case = Case(lengths=(50, 9), size=5, channels=16, room=300)
    assert largest_error(case, "cpu", max_length=300) < case.tolerance


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_rows_may_share_one_mask_and_lengths_may_move_on():
    case = Case(lengths=(20, 33), size=4, group=2, channels=16)
    query, key, value, lengths, visible = case.build("cpu")
    key, value = key.nan_to_num(0.5), value.nan_to_num(0.5)
    shared = visible[:1].expand(2, -1, -1)
    for step in (0, 3):
        got = attend_tree(query, key, value, lengths + step, shared, 0.3, 40)
        expected = tree_attention.reference(query, key, value, lengths + step, shared, 0.3, 0)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@interpreted
def test_slots_may_follow_each_other_with_all_that_they_hold():
    query, key, value, lengths, visible = Case(lengths=(20, 33), size=4, group=2, channels=16).build("cpu")
    expected = attend_tree(query, key, value, lengths, visible, 0.3, 40)
    assert torch.equal(attend_tree(query, *by_blocks(key, value), lengths, visible, 0.3, 40), expected)


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_a_token_that_sees_nothing_gets_zeros():
    case = Case(lengths=(0,), size=3, channels=16)
    query, key, value, lengths, visible = case.build("cpu")
    visible[0, 1] = False
    got = attend_tree(query, key, value, lengths, visible, 0.3, 0)
    assert (got[0, :, 1] == 0).all() and (got[0, :, 2] != 0).any()


def test_the_reference_sees_what_the_tree_and_the_text_show_and_no_more():
    case = Case(lengths=(6, 2), size=3, earlier=2, key_heads=1, channels=4)
    query, key, value, lengths, visible = case.build("cpu")
    key, value = key.nan_to_num(9.0), value.nan_to_num(9.0)
    got = tree_attention.reference(query, key, value, lengths, visible, 1.0, 0)
    for row, length in enumerate(case.lengths):
        for token in range(3):
            places = [length + place for place in range(5) if visible[row, token, place]]
            seen = [*range(length), *places]
            weights = (key[row, 0, seen] @ query[row, 0, token]).softmax(0)
            torch.testing.assert_close(got[row, 0, token], weights @ value[row, 0, seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lines", [1, 13, 64, 192])
@pytest.mark.parametrize("keys", [1, 600, 33_000])
def test_plans_fill_a_gpu_without_splits_that_have_no_keys(dtype, lines, keys):
    plan = plan_attention(1, 32, lines, 128, keys, dtype)
    assert 16 <= plan.block_lines <= 64 and plan.block_lines & (plan.block_lines - 1) == 0
    assert (plan.splits - 1) * plan.block_keys < keys
    if keys > 8 * plan.block_keys:
        assert plan.splits * 32 * -(-lines // plan.block_lines) >= 0.9 * 132
    crowded = plan_attention(64, 32, lines, 128, keys, dtype)
    assert crowded.splits == 1, "many rows fill the GPU by themselves"


def test_large_heads_take_fewer_keys_at_a_time():
    sizes = {channels: plan_attention(1, 8, 64, channels, 600, torch.bfloat16).block_keys for channels in (64, 128, 256)}
    assert sizes == {64: 64, 128: 64, 256: 32}


def test_obstacles_are_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert obstacle(CPU) == "Triton is not installed"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    assert obstacle(CPU, torch.float64) == "tree attention does not compute in float64"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert obstacle(CPU) == "the device is cpu, not a GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert obstacle(CPU, torch.float32) is None and "bfloat16" in (obstacle(CPU) or "")


@interpreted
@pytest.mark.slow  # a covering few run by default: tests/backends
def test_windows_cut_committed_text_only():
    case = Case(lengths=(100, 13), size=5, group=3, channels=16)
    query, key, value, lengths, visible = case.build("cpu")
    key, value = key.nan_to_num(0.5), value.nan_to_num(0.5)
    starts = torch.tensor([[80, 81, 81, 82, 90], [0, 3, 4, 13, 12]])
    mask = torch.zeros(2, 5, key.shape[2], dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        for token in range(5):
            mask[row, token, starts[row, token] : length] = True
            mask[row, token, length : length + 5] = visible[row, token]
    grouped = [states.repeat_interleave(3, dim=1) for states in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *grouped, attn_mask=mask[:, None], scale=0.25)
    got = attend_tree(query, key, value, lengths, visible, 0.25, 100, starts)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
