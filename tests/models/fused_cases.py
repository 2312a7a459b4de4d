"""Each kernel against plain torch; used on a CPU (interpreted) and on a GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models._fused import add_norm, gate, linear, rotate_store, vector_product


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
