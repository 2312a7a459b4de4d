"""Trees and logits on which kernels follow what all nodes emit, on any device; and what torch's operations make of them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from polydraft import operations
from polydraft.devices import values_hidden
from polydraft.sampling import NO_TOKEN, SamplingParams, Warper
from polydraft.trees import DraftTree, parse_tree
from polydraft.verify import TargetDistributions, Verdict
from polydraft.verify.node import follow_tokens, greedy_verdict

TOKENS = 4
"""So few that siblings are often equal, and that paths are long."""


@contextmanager
def torch_alone() -> Iterator[None]:
    """Let torch's operations do it, as on a device that the host may not look at."""
    with operations.using(), values_hidden():
        yield


def same(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts are equal in every entry, down to those that nobody reads."""
    assert {value.dtype for value in [*vars(one).values(), *vars(other).values()]} == {torch.int64}
    return all(torch.equal(*pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True))


def static_tree(tree: str, rows: int, seed: int, device: str = "cpu") -> DraftTree:
    """Return trees of one shape, whose tables are one view for all rows; some nodes are missing."""
    topology, generator = parse_tree(tree), torch.Generator().manual_seed(seed)
    tokens_BN = torch.randint(NO_TOKEN, TOKENS, (rows, topology.num_nodes), generator=generator)
    return DraftTree.from_topology(topology, tokens_BN.to(device), (), torch.zeros(topology.num_nodes).long().to(device))


def root_of(rows: int, device: str = "cpu") -> DraftTree:
    """Return trees of which only the root is there."""
    tokens_BN, rows_N = torch.zeros(rows, 1).long().to(device), torch.zeros(1).long().to(device)
    return DraftTree.from_topology(parse_tree("[]"), tokens_BN, (), rows_N)


def random_tree(rows: int, nodes: int, width: int, seed: int, *, further: bool = False, device: str = "cpu") -> DraftTree:
    """Return a tree of its own for each row; with further children, those are any later nodes, some of them drawn ones."""
    generator = torch.Generator().manual_seed(seed)
    table_BNK, depths_BN = torch.zeros(rows, nodes, width).long(), torch.zeros(rows, nodes).long()
    extra_BNK = torch.zeros(rows, nodes, 3).long()
    for row in range(rows):
        for node in range(1, nodes):
            free = [one for one in range(node) if table_BNK[row, one, -1] == 0]
            parent = free[int(torch.randint(max(len(free) - 4, 0), len(free), (), generator=generator))]
            place = int((table_BNK[row, parent] > 0).sum())
            table_BNK[row, parent, place], depths_BN[row, node] = node, depths_BN[row, parent] + 1
            extra_BNK[row, parent, int(torch.randint(3, (), generator=generator))] = node
    tokens_BN = torch.randint(NO_TOKEN, TOKENS, (rows, nodes), generator=generator)
    tree = DraftTree(
        tokens_BN,
        depths_BN,
        torch.eye(nodes, dtype=torch.bool).expand(rows, -1, -1),
        table_BNK,
        int(depths_BN.max()) + seed % 2,  # trees by load say that they are deeper than they are
        extra_table_BNK=_later(extra_BNK) if further else None,
    )
    moved = {key: value.to(device) for key, value in vars(tree).items() if isinstance(value, Tensor)}
    return dataclasses.replace(tree, **moved)


def _later(extra_BNK: Tensor) -> Tensor:
    """Let each node also have its successor's children, never an earlier node."""
    return torch.cat([extra_BNK[:, 1:], torch.zeros_like(extra_BNK[:, :1])], dim=1)


@cache
def trees(device: str = "cpu") -> tuple[DraftTree, ...]:
    """Return trees of all kinds: static, random, chains, roots alone, wide ones, some with further children.

    They are made once: nobody may write into them.
    """
    return tuple(_trees(device))


def _trees(device: str) -> Iterator[DraftTree]:
    for seed, tree in enumerate(["3x2x1", "chain:6", "5", "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"]):
        yield static_tree(tree, 3, seed, device)
    for seed, (nodes, width) in enumerate([(1, 1), (2, 1), (17, 3), (40, 5), (12, 9), (33, 33)]):
        for further in (False, True):
            yield random_tree(3, nodes, width, seed, further=further, device=device)
    cut = random_tree(3, 9, 3, 8, device=device)
    yield dataclasses.replace(cut, tokens_BN=torch.cat([cut.tokens_BN] * 2, dim=1)[:, :9])  # not in one piece
    yield dataclasses.replace(random_tree(3, 17, 1, 3, device=device), depth=2)  # with nodes that nobody gets to


def emitted(draft: DraftTree, seed: int) -> Tensor:
    """Return a token for each node, often one of its children's; for some of them none."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BN = torch.randint(NO_TOKEN, TOKENS, tuple(draft.tokens_BN.shape), generator=generator).to(draft.tokens_BN.device)
    likely_BN = (torch.rand(tuple(draft.tokens_BN.shape), generator=generator) < 0.9).to(draft.tokens_BN.device)
    return draft.all_followers()[1].amax(-1).where(likely_BN, tokens_BN)


def different_verdicts(device: str = "cpu") -> int:
    """Count the trees on which kernels and torch's operations follow tokens otherwise."""
    wrong, lengths = 0, set[int]()
    for seed, draft in enumerate(trees(device)):
        tokens_BN = emitted(draft, seed)
        with torch_alone():
            expected = follow_tokens(draft, tokens_BN)
        wrong += not same(follow_tokens(draft, tokens_BN), expected)
        lengths |= {*expected.accepted_B.tolist()}
    assert len(lengths) > 4  # there is something to get wrong
    return wrong


def awkward_logits(size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return rows with ties, both zeros, infinities and what is not a number, at the ends of parts and elsewhere."""
    logits_RV = torch.randn(16, size, generator=torch.Generator().manual_seed(1))
    last, middle = size - 1, size // 2
    logits_RV[0, [middle, last]] = 9.0  # equal, in different parts if there are several
    logits_RV[1, [1, 2]] = 9.0
    logits_RV[2] = -1.0
    logits_RV[3, last] = 9.0
    logits_RV[4], logits_RV[4, 3], logits_RV[4, 5] = -2.0, -0.0, 0.0
    logits_RV[5], logits_RV[5, 3], logits_RV[5, 5] = -2.0, 0.0, -0.0
    logits_RV[6, last] = torch.nan
    logits_RV[7, 0], logits_RV[7, middle] = torch.nan, torch.inf
    logits_RV[8] = torch.nan
    logits_RV[9] = -torch.nan
    logits_RV[10, middle] = torch.inf
    logits_RV[11] = -torch.inf
    logits_RV[12] = -torch.inf
    logits_RV[12, last] = -6e4
    logits_RV[13] = -logits_RV[13].abs() - 1e4
    logits_RV[14], logits_RV[14, middle] = -1e-38, -1e-39
    return logits_RV.to(dtype).to(device)


def distributions_of(logits_BNV: Tensor, params: SamplingParams) -> TargetDistributions:
    """Return what walks ask, for logits that are given."""
    warper = Warper(params, logits_BNV.shape[-1], [[1, 2]] * len(logits_BNV), logits_BNV.device)
    return TargetDistributions(logits_BNV, lambda logits: logits, warper, whole=True)


def different_tokens(size: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Count the awkward logits of which kernels take another one than `Warper.likeliest` does."""
    logits_RV = awkward_logits(size, dtype, device)
    distributions, root = distributions_of(logits_RV[:, None], SamplingParams(temperature=0)), root_of(len(logits_RV), device)
    on_cpu = Warper(SamplingParams(temperature=0), size, [[1]] * len(logits_RV), torch.device("cpu"))
    expected_R = on_cpu.likeliest(logits_RV[:, None].cpu(), torch.zeros(len(logits_RV), 1, 0).long(), 0)[:, 0].to(device)
    assert expected_R.tolist().count(NO_TOKEN) >= 6 and len({*expected_R.tolist()}) > 6
    return int((greedy_verdict(root, distributions).tokens_BD[:, 0] != expected_R).sum())
