"""Dynamic trees at temperature 0 grown by kernels and by torch's operations, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polydraft import operations
from polydraft.backends.triton import interpreting
from polydraft.draft import DistributionSource
from polydraft.draft.candidates import best
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.sampling import NO_TOKEN, PartialVocabulary, RowParams, SamplingParams
from polydraft.trees import Block, DraftTree, DynamicShape

GREEDY = SamplingParams(temperature=0)


class Given(DistributionSource):
    """A source that gives known logits level by level, and notes what it is asked."""

    def __init__(self, logits: Sequence[Tensor], vocabulary: PartialVocabulary | None, lead: int) -> None:
        super().__init__(logits[0].device, vocabulary)
        self.lead, self.given, self.asked, self.level = lead, logits, list[dict[str, Any]](), 0

    def root(self, tail_B2: Tensor) -> Tensor:
        self.asked, self.level, self.width, self.rows = [], 0, 1, len(tail_B2)
        return tail_B2[:, 1:, None]

    def next(self, tokens_BW: Tensor) -> Tensor:
        """Go on to the next level."""
        self.level += 1
        return tokens_BW[..., None]

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        # Whatever goes through the draft in place of a token that is missing must be somebody's child and see itself.
        real_BW, width = tokens_BW != NO_TOKEN, tokens_BW.shape[1]
        assert block.visible_BTU.dtype == torch.bool and block.levels == (width,)
        assert (parents >= 0).all() and (parents < self.width).all()
        assert torch.equal(block.visible_BTU[:, :, block.start :].cpu(), torch.eye(width).bool().expand(self.rows, -1, -1))
        places = {"depths": block.depths_BT.tolist(), "visible": (block.visible_BTU & real_BW[..., None]).tolist()}
        parents_BW = parents.where(real_BW, 0)
        self.asked.append({"tokens": tokens_BW.tolist(), "parents": parents_BW.tolist(), "start": block.start, **places})
        self.width = width
        return self.next(tokens_BW)

    def logits(self, features_BWF: Tensor) -> Tensor:
        return self.given[self.level][:, : features_BWF.shape[1]]


@dataclass(frozen=True)
class Growth:
    """A tree that is grown from the logits of all its levels."""

    shape: DynamicShape
    columns: int
    """Of the logits."""
    size: int
    """Tokens of the target."""
    known: bool
    """Whether the columns are part of the tokens, and not the first of them."""
    rows: int = 2
    params: SamplingParams = GREEDY
    temperature: float | None = None
    """Of the distributions that rank candidates."""
    lead: int = 0
    device: str = "cpu"

    def logits(self, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """Return logits of all levels, of which half precision makes many equal."""
        generator, size = torch.Generator().manual_seed(seed), (self.rows, self.shape.beam, self.columns)
        return [
            (3 * torch.randn(size, generator=generator)).to(dtype).to(self.device) for _ in range(self.shape.depth)
        ]  # fmt: skip

    def builder(self, logits: Sequence[Tensor]) -> FixedBuilder:
        """Return what grows the tree."""
        device = torch.device(self.device)
        known_D = torch.randperm(self.size, generator=torch.Generator().manual_seed(1))[: self.columns].sort().values
        vocabulary = PartialVocabulary(known_D.to(device), self.size) if self.known else None
        params = RowParams.of(self.params, self.rows)
        source = Given(logits, vocabulary, self.lead)
        builder = FixedBuilder(source, self.shape, params, self.size, draft_temperature=self.temperature)
        builder.begin([[1]] * self.rows, range(self.rows), params)
        return builder

    def grown(self, logits: Sequence[Tensor], by_kernels: bool) -> dict[str, Any]:
        """Return all that a round's tree and the draft are told."""
        with pytest.MonkeyPatch.context() as patch, operations.using(*["triton"] * by_kernels), interpreting(by_kernels):
            # Of equal probabilities kernels take the first; elsewhere that is left open.
            patch.setattr("polydraft.draft.candidates.largest", best)
            builder = self.builder(logits)
            tail_B2 = torch.arange(2 * self.rows, device=self.device).view(-1, 2) + 5
            return told(builder, builder.build(tail_B2, torch.zeros(self.rows, 0, device=self.device)))


def told(builder: FixedBuilder, draft: DraftTree) -> dict[str, Any]:
    """Return a tree and what goes with it as lists."""
    tokens_BN = draft.tokens_BN
    nodes_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device).expand_as(tokens_BN)
    tables = {name: value.tolist() for name, value in vars(draft).items() if isinstance(value, Tensor)}
    rest = {"depth": draft.depth, "reach": draft.reach, "places": builder.places_of(nodes_BN).tolist()}
    return {**tables, **rest, "asked": builder.source.asked}


def check_grown(case: Growth, logits: Sequence[Tensor]) -> dict[str, Any]:
    """Compare both ways; return what was told."""
    found, expected = (case.grown(logits, by_kernels) for by_kernels in (True, False))
    check_tables(found)
    assert different(found, expected) == []
    return found


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of what two ways tell differently."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if found[name] != value]


def check_tables(tree: dict[str, Any]) -> None:
    """Hold a tree's tables against each other: every node but those left out is somebody's child, once, further down."""
    for row, table in enumerate(tree["child_table_BNK"]):
        tokens, depths, ancestors = (tree[name][row] for name in ("tokens_BN", "depths_BN", "ancestors_BNN"))
        pairs = [(parent, child) for parent, children in enumerate(table) for child in children if child]
        assert sorted(child for _, child in pairs) == [node for node, depth in enumerate(depths) if depth]
        assert [token == NO_TOKEN for token in tokens] == [depth == 0 and node > 0 for node, depth in enumerate(depths)]
        assert depths[1 : 1 + len(pairs)] == sorted(depths[1 : 1 + len(pairs)]) and not any(depths[1 + len(pairs) :])
        for parent, child in pairs:
            assert parent < child and depths[child] == depths[parent] + 1
            assert [node for node, seen in enumerate(ancestors[child]) if seen and node != child] == [
                node for node, seen in enumerate(ancestors[parent]) if seen
            ]
        for children in table:
            own = [tokens[child] for child in children if child]
            assert len(set(own)) == len(own) and children[len(own) :] == [0] * (len(children) - len(own))
