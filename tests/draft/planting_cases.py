"""Static trees grown by kernels and by torch's operations, on any device."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from polydraft.backends.triton import interpreting, kernels_run
from polydraft.draft import DistributionSource
from polydraft.draft.static_builder import StaticBuilder
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams
from polydraft.trees import parse_tree
from polydraft.verify import Scheme

GREEDY = SamplingParams(temperature=0)
UNEQUAL = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[1,0,0],[1,0,1]]"


@dataclass(frozen=True)
class Growth:
    """A tree that is grown from the logits of all its nodes."""

    tree: str
    columns: int
    """Of the logits."""
    size: int
    """Tokens of the target."""
    known: bool
    """Whether the columns are part of the tokens, and not the first of them."""
    rows: int = 2
    params: SamplingParams = GREEDY
    scheme: str | Scheme = "auto"
    device: str = "cpu"

    def logits(self, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Return logits of all nodes, of which half precision makes many equal."""
        size = self.rows, parse_tree(self.tree).num_nodes, self.columns
        return (4 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype).to(self.device)

    def tokens(self, logits_BNV: Tensor, by_kernels: bool) -> Tensor:
        """Grow the tree level by level."""
        with pytest.MonkeyPatch.context() as patch, interpreting(by_kernels):
            if not by_kernels:
                patch.setattr("polydraft.backends.triton.triton_obstacle", lambda device: "torch is wanted for comparison")
            # Kernels write what torch found where it draws: a GPU's `topk` has no order of equals, not even twice the same.
            patch.setattr("polydraft.verify.naive.largest", first_of_equals)
            return self._tokens(logits_BNV, by_kernels)

    def builder(self) -> StaticBuilder:
        """Return what grows the tree."""
        topology, device = parse_tree(self.tree), torch.device(self.device)
        known_D = torch.randperm(self.size, generator=torch.Generator().manual_seed(1))[: self.columns].sort().values
        vocabulary = PartialVocabulary(known_D.to(device), self.size) if self.known else None
        params, source = RowParams.of(self.params, self.rows), DistributionSource(device, vocabulary)
        growth = StaticBuilder(source, topology, params, self.size, scheme=self.scheme)
        growth.begin([[1]] * self.rows, range(self.rows), params)
        return growth

    def _tokens(self, logits_BNV: Tensor, by_kernels: bool) -> Tensor:
        growth, device = self.builder(), torch.device(self.device)
        numbers = torch.rand(self.rows, growth.num_uniforms, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        tokens_BN = growth.plant(torch.zeros(self.rows, dtype=torch.long, device=device))
        assert kernels_run(tokens_BN) == by_kernels
        for level in growth.plan.levels:
            drawing = torch.arange(level.first, level.stop, device=device)[level.drawing]
            growth.draw(level, logits_BNV[:, drawing], tokens_BN, numbers.to(device))
        return tokens_BN


def first_of_equals(weights_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do what `largest` does, in the order that it has by compiled code and not everywhere."""
    value_RV, token_RV = weights_RV.sort(dim=-1, descending=True, stable=True)
    return value_RV[:, :count], token_RV[:, :count]


def check_grown(case: Growth, logits_BNV: Tensor) -> Tensor:
    """Compare both ways; return the tokens."""
    found_BN, expected_BN = (case.tokens(logits_BNV, by_kernels) for by_kernels in (True, False))
    assert found_BN.tolist() == expected_BN.tolist()
    return found_BN
