"""Each kernel against plain torch; used on a CPU (interpreted) and on a GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.backends.triton import interpreting
from polydraft.backends.triton.head import FusedHead
from polydraft.backends.triton.layers import add_norm, gate, linear, rotate_store, vector_product
from polydraft.models.block_slots import place
from polydraft.models.cache import SlotCache
from polydraft.models.heads.feature_head import FeatureHead, HeadShape, TapNorm
from polydraft.models.heads.head_context import keep_entries, take_roots
from polydraft.models.storage import move_up
from polydraft.sampling import NO_TOKEN
from polydraft.trees import Block, SlicedMask, causal_block, parse_tree

EAGLE3 = {"joins": False, "reads_last": False, "normed_output": False}
FORMS = {
    "ours": {},
    "EAGLE-3": EAGLE3,
    "EAGLE-3, Qwen2": {**EAGLE3, "normed_residual": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "EAGLE-3, Qwen3": {**EAGLE3, "query_key_norm": True, "normed_output": True, "tap_norm": TapNorm.EACH},
    "other turns": {**EAGLE3, "rope_frequencies": (1.0, 0.3, 0.2, 0.1), "rope_gain": 1.1},
}
PLACES = {
    "a level": {},
    "limits": {"max_positions": 12, "num_tokens": 40, "window": 4},
    "a window": {"window": 3},
    "many": {"size": 150, "window": 100},
    "places by values": {"scattered": True},
}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def numbers(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check_add_norm(device: str, dtype: torch.dtype, channels: int, added: bool) -> None:
    hidden, delta = (numbers(2, 3, channels, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = numbers(channels, device=device, dtype=dtype, seed=2)
    wide = torch.zeros(2, 3, 2 * channels, device=device, dtype=dtype)
    total, normed = add_norm(hidden, delta if added else None, weight, 1e-5, wide[..., channels:])
    expected = hidden + delta if added else hidden
    torch.testing.assert_close(total, expected, **tolerance(dtype))
    norm = functional.rms_norm(expected.float(), (channels,), weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(normed, norm, **tolerance(dtype))
    assert not wide[..., :channels].any(), "only its own columns are written"
    parts = numbers(3, 2, 3, channels, device=device, dtype=torch.float32, seed=3)
    product = (parts[0] + parts[1] + parts[2]).to(dtype)
    alone, normed_alone = add_norm(None, parts, weight, 1e-5)
    assert torch.equal(alone, product) and torch.equal(normed_alone, add_norm(product, None, weight, 1e-5)[1])
    assert torch.equal(add_norm(hidden, parts, weight, 1e-5)[0], add_norm(hidden, product, weight, 1e-5)[0])


def check_rotate_store(device: str, dtype: torch.dtype, queries: int, keys: int, channels: int) -> None:
    batch, size, slots = 2, 3, 10
    projected = numbers(batch, size, (queries + 2 * keys) * channels, device=device, dtype=dtype, seed=0)
    angles = numbers(batch, size, channels // 2, device="cpu", dtype=torch.float32, seed=1).repeat(1, 1, 2)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    key, value = (torch.zeros(batch, keys, slots, channels, device=device, dtype=dtype) for _ in range(2))
    places = torch.tensor([[1, 4, 2], [9, 0, 5]], device=device)
    query = rotate_store(projected, cos, sin, places, key, value)
    other_key, other_value = (torch.zeros(5, *store.shape[1:], device=device, dtype=dtype) for store in (key, value))
    rows = torch.tensor([4, 1], device=device)
    again = rotate_store(projected, cos, sin, places, other_key, other_value, rows)
    assert torch.equal(again, query) and torch.equal(other_key[rows], key) and torch.equal(other_value[rows], value)
    assert not other_key[[0, 2, 3]].any() and not other_value[[0, 2, 3]].any(), "other rows are left alone"
    heads = projected.view(batch, size, -1, channels)
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
    torch.testing.assert_close(query, turned[:, :, :queries].transpose(1, 2), **tolerance(dtype))
    for row in range(batch):
        for token in range(size):
            slot = int(places[row, token])
            torch.testing.assert_close(key[row, :, slot], turned[row, token, queries : queries + keys], **tolerance(dtype))
            torch.testing.assert_close(value[row, :, slot], heads[row, token, queries + keys :], **tolerance(dtype))
    positions = torch.tensor([[5, 0, 3], [2, 2, 6]], device=device)
    tables = numbers(2, 7, channels, device=device, dtype=dtype, seed=3)
    found, expected = (torch.zeros_like(key) for _ in range(2))
    chosen, table = (tables[0][positions], tables[1][positions]), torch.cat([*tables], dim=-1).chunk(2, dim=-1)
    looked_up = rotate_store(projected, *table, places, found, value, positions_BT=positions)
    assert torch.equal(looked_up, rotate_store(projected, *chosen, places, expected, value)) and torch.equal(found, expected)
    parts = numbers(3, *projected.shape, device=device, dtype=torch.float32, seed=4)
    (of_parts, whole), product = (torch.zeros_like(key) for _ in range(2)), (parts[0] + parts[1] + parts[2]).to(dtype)
    found, expected = (
        rotate_store(one, cos, sin, places, store, value.clone()) for one, store in ((parts, of_parts), (product, whole))
    )
    assert torch.equal(found, expected) and torch.equal(of_parts, whole), "parts are added in order, and rounded once"
    written = torch.zeros(batch, slots, dtype=torch.bool, device=device).scatter_(1, places, True)
    assert not key.transpose(1, 2)[~written].any() and not value.transpose(1, 2)[~written].any()


def check_gate(device: str, dtype: torch.dtype, channels: int) -> None:
    both = numbers(2, 3, 2 * channels, device=device, dtype=dtype, seed=0)
    first, second = both.chunk(2, dim=-1)
    torch.testing.assert_close(gate(both), functional.silu(first) * second, **tolerance(dtype))


def check_vector_product(device: str, dtype: torch.dtype, rows: int, channels: int, biased: bool) -> None:
    vector = numbers(1, 1, channels, device=device, dtype=dtype, seed=0)
    weight = numbers(rows, channels, device=device, dtype=dtype, seed=1) / channels**0.5
    bias = numbers(rows, device=device, dtype=dtype, seed=2) if biased else None
    expected = functional.linear(vector.double(), weight.double(), None if bias is None else bias.double())
    for product in (vector_product, linear):
        torch.testing.assert_close(product(vector, weight, bias).double(), expected, **tolerance(dtype))


def head_of(device: str, dtype: torch.dtype, form: dict) -> FeatureHead:
    shape = HeadShape(hidden_size=32, taps=(1, 2), num_heads=4, num_key_heads=2, head_size=8, mlp_size=24, window=40, **form)
    torch.manual_seed(0)
    head = FeatureHead(shape, *torch.randn(2, 16, 32)).requires_grad_(False)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))  # norms and biases that are not all alike
    head.native = False
    return head.to(device, dtype)


def check_head(device: str, dtype: torch.dtype, form: dict) -> None:
    """A head's pass, level by level: each token follows the output of its parent."""
    head, rows = head_of(device, dtype, form), 2
    mask, place = SlicedMask.of(parse_tree("2x1"), torch.device(device)), torch.device(device)
    tokens = torch.tensor([[11, 12, 13, 14, 15], [3, 2, NO_TOKEN, 4, 5]], device=device)
    before, above = (numbers(rows, size, 32, device=device, dtype=dtype, seed=size) for size in (3, 1))
    by_row = torch.tensor([[0, 1], [1, 0]], device=device)
    found = []
    for kernels in (None, FusedHead(head)):
        context, outputs = head.start(rows, 16), above
        context.fast = None
        context.read(tokens[:, :3].clamp(min=0), before, causal_block(rows, 3, place))
        context.rewind([3, 2])
        context.fast, context.span, passed = kernels, 16, []
        for first, stop, parents in ((0, 1, None), (1, 3, torch.tensor([0, 0], device=device)), (3, 5, by_row)):
            outputs = context.read(tokens[:, first:stop], outputs, mask.level(first, stop).expand(rows), parents)
            passed.append(outputs)
        found.append(torch.cat(passed, dim=1))
    # Small differences of one level go through the next ones.
    rough = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-1, "atol": 1e-1}
    torch.testing.assert_close(found[1], found[0], **rough)


def check_fused_features(device: str, dtype: torch.dtype, form: dict) -> None:
    head = head_of(device, dtype, form)
    read = 32 * (3 if head.shape.reads_last else 2)
    features = numbers(2, 5, read + 32 * (not head.shape.reads_last), device=device, dtype=dtype, seed=1)
    for some in (features, features[:, 1:4]):
        expected = head.fused(some)
        found = FusedHead(head).fused(some)
        assert (found is None) == (head.shape.tap_norm == TapNorm.NONE)
        found = expected if found is None else found
        assert found.shape == expected.shape == (*some.shape[:2], 32)
        torch.testing.assert_close(found, expected, **tolerance(dtype))


def check_place(
    device: str, *, size: int = 5, scattered: bool = False, max_positions=None, num_tokens=None, window=None
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(NO_TOKEN, 60, (3, 2 * size), generator=generator).to(device)[:, size:]
    depths = torch.randint(0, 4, (size,), generator=generator).to(device).expand(3, -1)
    places = torch.stack([torch.randperm(size + 2, generator=generator)[:size] for _ in range(3)]).to(device)
    visible = torch.ones(3, size, size + 2, dtype=torch.bool, device=device)
    lengths = torch.tensor([9, 0, 17, 5], device=device)[1:]
    limits, found = {"max_positions": max_positions, "num_tokens": num_tokens, "window": window}, []
    for kernels in (None, True):  # torch's operations are those of a CPU without the interpreter
        where = device if kernels else "cpu"
        there = Block(2, depths.to(where), visible.to(where), places_BT=places.to(where) if scattered else None)
        slot_positions = torch.full((3, 200), -5, device=where)
        with interpreting(bool(kernels) and device == "cpu"):
            placed = place(tokens.to(where), there, lengths.to(where), slot_positions, **limits)
        values = [placed.tokens_BT, placed.positions_BT, placed.slots_BT, placed.starts_BT, slot_positions]
        found.append([None if value is None else value.cpu() for value in values])
    for one, two in zip(*found, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)
    assert found[1][0].min() >= 0 and (num_tokens is None or found[1][0].max() < num_tokens)


def check_move_up(device: str, dtype: torch.dtype, layers: int, rows: int, heads: int, channels: int) -> None:
    lengths = torch.tensor([4, 0, 7], device=device)[:rows]
    # Places that others are moved to, a path that repeats its last node, one that stays.
    places = torch.tensor([[0, 3, 1, 5], [0, 2, 4, 4], [0, 1, 2, 3]], device=device)[:rows]
    found = []
    for on in (False, True):
        cache = SlotCache(layers, 16)
        cache.keys_LBHSC, cache.values_LBHSC = (
            numbers(layers, rows, heads, 16, channels, device=device, dtype=dtype, seed=seed) for seed in (0, 1)
        )
        slot_positions = torch.full((rows, 16), -1, device=device)
        target = lengths[:, None] + torch.arange(4, device=device)
        with interpreting(device == "cpu"):
            if on:
                assert move_up.chosen(cache, lengths, places, slot_positions) is not None
                move_up(cache, lengths, places, slot_positions)
            else:
                cache.move(lengths[:, None] + places, target)
                slot_positions.scatter_(1, target, target)
        found.append((cache.keys_LBHSC, cache.values_LBHSC, slot_positions))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def check_entries(device: str, dtype: torch.dtype) -> None:
    """What a head's memory does before and after a tree, against torch's operations on a CPU."""
    outputs, features = (numbers(3, size, 32 * size, device="cpu", dtype=dtype, seed=size) for size in (4, 6))
    outputs = outputs[..., :32].contiguous()
    fresh, keep = torch.tensor([1, 4, 0]), torch.tensor([3, 0, 4])
    path = torch.tensor([[0, 2, 5, 5], [0, 0, 0, 0], [0, 1, 3, 4]])
    tokens = torch.tensor([[7, 8, 9, NO_TOKEN], [1, 2, 3, 4], [5, 6, 7, 8]])
    found = []
    for kernels in (False, True):
        where = device if kernels else "cpu"
        context = head_of(where, dtype, {}).start(3, 16)
        context.rewind([5, 2, 9])
        kept = torch.zeros_like(tokens).to(where), features.new_zeros(3, 4, 192).to(where), fresh.clone().to(where)
        with interpreting(kernels and device == "cpu"):
            roots = take_roots(outputs.to(where), kept[2], context.lengths_B)
            given = (one.to(where) for one in (tokens, path, keep, features))
            keep_entries(*given, context.lengths_B, kept)
        found.append([part.cpu() for part in (roots, context.lengths_B, *kept)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert found[0][1].tolist() == [6, 5, 10] and found[0][0].shape == (3, 1, 32)
