"""Tokens in trees, in batches, in prompts and alone, for tests of invariance on the CPU (interpreted) and on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.backends.triton.invariant import (
    AttendPlan,
    Sight,
    invariant_attention,
    invariant_linear,
    invariant_parts,
    sight_of,
)
from polydraft.models.attention import tree_attention
from polydraft.trees import parse_tree


def numbers(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def products(device: str, dtype: torch.dtype, rows: int, outputs: int, channels: int, biased: bool) -> tuple[Tensor, Tensor]:
    """Return the products of some rows, and what torch computes in float64; parts must add up to the same bits."""
    inputs = numbers(1, rows, channels, device=device, dtype=dtype, seed=0)
    weight = numbers(outputs, channels, device=device, dtype=dtype, seed=1) / channels**0.5
    bias = numbers(outputs, device=device, dtype=dtype, seed=2) if biased else None
    found = invariant_linear(inputs, weight, bias)
    first, *others = invariant_parts(inputs, weight, bias)
    for part in others:
        first = first + part
    assert first.to(dtype).allclose(found, rtol=1e-5, atol=1e-5) if device == "cpu" else first.to(dtype).equal(found)
    return found, functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())


@dataclass(frozen=True, kw_only=True)
class TreeCase:
    """A tree behind a text, with random queries, keys and values."""

    length: int
    tree: str = "2x2x1"
    key_heads: int = 2
    group: int = 1
    channels: int = 32
    window: int | None = None
    dtype: torch.dtype = torch.float32

    def build(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return depths and ancestors of the nodes; queries of the nodes; keys and values of the text and the nodes."""
        tables = parse_tree(self.tree).tables(torch.device(device))
        slots, nodes = self.length + len(tables.depths_N), len(tables.depths_N)
        query = numbers(1, nodes, self.key_heads * self.group, self.channels, device=device, dtype=self.dtype, seed=3)
        key, value = (
            numbers(1, self.key_heads, slots + 7, self.channels, device=device, dtype=self.dtype, seed=seed) for seed in (4, 5)
        )
        key[:, :, slots:], value[:, :, slots:] = torch.nan, torch.nan
        return tables.depths_N, tables.ancestors_NN, query.transpose(1, 2), key, value

    def starts(self, positions: Tensor) -> Tensor | None:
        return None if self.window is None else (positions - self.window + 1).clamp(min=0)

    @property
    def scale(self) -> float:
        return self.channels**-0.5

    def sight(self, device: str, batch: int = 1, max_length: int | None = None, max_positions: int = 10**6) -> Sight:
        """Return what the nodes see, as many rows of them as asked for, in a model of so many positions."""
        tables = parse_tree(self.tree).tables(torch.device(device))
        lengths = torch.full((batch,), self.length, device=device)
        positions = (self.length + tables.depths_N).clamp(max=max_positions - 1).expand(batch, -1).contiguous()
        slot_positions = torch.cat([torch.arange(self.length, device=device), positions[0], positions.new_zeros(7)])
        return sight_of(
            lengths,
            self.length if max_length is None else max_length,
            self.starts(positions),
            positions,
            tables.ancestors_NN.expand(batch, -1, -1),
            slot_positions.repeat(batch, 1),
        )

    def in_a_tree(self, device: str, batch: int = 1, plan: AttendPlan | None = None, **sight: int) -> Tensor:
        """Attend from all nodes at once, in each row of a batch; return them as `[B, N, H, C]`."""
        query, key, value = (tensor.repeat(batch, 1, 1, 1) for tensor in self.build(device)[2:])
        return invariant_attention(query, key, value, self.sight(device, batch, **sight), self.scale, plan).transpose(1, 2)

    def alone(self, device: str, size: int = 1) -> Tensor:
        """Attend from each node to its own path as plain text, as the last of `size` tokens; return `[N, H, C]`."""
        depths, ancestors, query, key, value = self.build(device)
        found = []
        for node, depth in enumerate(depths.tolist()):
            slots = [*range(self.length), *(self.length + ancestors[node].nonzero()[:, 0]).tolist()]
            stop = self.length + depth + 1
            room = [*slots, -1, -1]  # what is behind the text must not matter
            here = min(size, stop)
            lengths, positions = (
                torch.tensor([stop - here], device=device),
                torch.arange(stop - here, stop, device=device)[None],
            )
            queries = query[:, :, node : node + 1].expand(-1, -1, here, -1)
            sight = Sight(lengths, stop - here, self.starts(positions))
            found.append(invariant_attention(queries, key[:, :, room], value[:, :, room], sight, self.scale)[0, :, -1])
        return torch.stack(found)

    def expected(self, device: str) -> Tensor:
        """Return masked attention in float64 over the same numbers, `[N, H, C]`."""
        _, ancestors, query, key, value = self.build(device)
        assert self.window is None
        exact = [tensor.double().nan_to_num(0.0) for tensor in (query, key, value)]
        lengths = torch.tensor([self.length], device=device)
        return tree_attention.reference(*exact, lengths, ancestors[None], self.scale, self.length)[0].transpose(0, 1)
