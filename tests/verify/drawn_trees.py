"""Trees drawn from distributions of all kinds, with random numbers to verify them by."""

import dataclasses

import torch
from torch import Tensor

from polydraft.sampling import PartialVocabulary
from polydraft.trees import DraftTree, parse_tree
from polydraft.verify import BlockWalk, Scheme
from polydraft.verify.walk import TargetDistribution

from .cases import batch_of
from .enumeration import _DistributionsEverywhere


def moved(draft: DraftTree, device: str) -> DraftTree:
    """Return trees on another device."""
    tensors = {key: value.to(device) for key, value in vars(draft).items() if isinstance(value, Tensor)}
    known = draft.vocabulary
    return dataclasses.replace(
        draft,
        **tensors,
        distributions=tuple(distribution.to(device) for distribution in draft.distributions),
        vocabulary=known and PartialVocabulary(known.tokens_D.to(device), known.size),
    )


def small_trees(
    tree: str, rows: int, scheme: Scheme, seed: int, cases: int = 2, device: str = "cpu"
) -> tuple[DraftTree, _DistributionsEverywhere, Tensor]:
    """Draw small trees from ordinary and awkward distributions: zeros, distributions of one token, equal pairs."""
    batch = batch_of(tree, 4, cases)
    case_S, tokens_SN, _ = batch.drawings(scheme)
    generator = torch.Generator().manual_seed(seed)
    pick_R = torch.randint(len(case_S), (rows,), generator=generator)
    numbers = BlockWalk().uniforms(scheme, batch.topology.depth)
    uniforms_BU = torch.rand(rows, numbers, generator=generator, dtype=torch.float64)
    draft = batch.draft(case_S[pick_R], tokens_SN[pick_R], torch.float32)
    distributions = _DistributionsEverywhere(batch, case_S[pick_R], tokens_SN[pick_R])
    distributions.distribution_RNV = distributions.distribution_RNV.float().to(device)
    return moved(draft, device), distributions, uniforms_BU.to(device)


def distributions(generator: torch.Generator, *shape: int, alike: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Distributions of all kinds: flat, peaked, with zeros, of one token."""
    logits = torch.randn(*shape, generator=generator) * 3
    if alike is not None:
        logits = 0.5 * logits + alike
    kind = int(torch.randint(4, (1,), generator=generator))
    if kind == 1:
        logits = torch.where(torch.rand(*shape, generator=generator) < 0.6, -torch.inf, logits)
        logits[..., 0] = 0.0
    elif kind == 2:
        logits = logits * 8
    return logits.softmax(-1), logits.clamp(min=-50)


def drawn_trees(
    seed: int, scheme: Scheme, tree: str, vocabulary: PartialVocabulary | None, batch: int, vocab_size: int
) -> tuple[DraftTree, Tensor, Tensor]:
    """A tree drawn from random distributions, the target's distributions at its nodes, and random numbers."""
    generator, topology = torch.Generator().manual_seed(seed), parse_tree(tree)
    size = vocab_size if vocabulary is None else len(vocabulary.tokens_D)
    target_BNV, logits_BNV = distributions(generator, batch, topology.num_nodes, vocab_size)
    tokens_BN = torch.randint(vocab_size, (batch, topology.num_nodes), generator=generator)
    levels, distribution_rows_N = [], torch.zeros(topology.num_nodes, dtype=torch.long)
    for draws in topology.draws:
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        alike = logits_BNV[:, drawing] if vocabulary is None else logits_BNV[:, drawing][..., vocabulary.tokens_D]
        distribution_BGD = distributions(generator, batch, len(drawing), size, alike=alike if seed % 2 else None)[0]
        levels.append(distribution_BGD)
        distribution_rows_N[drawing] = torch.arange(len(drawing))
        for group in draws:
            for node, children in zip(group.nodes, group.children, strict=True):
                uniforms = torch.rand(batch, len(children), generator=generator, dtype=torch.float64)
                drawn = scheme.draw(distribution_BGD[:, drawing.index(node)], uniforms)
                tokens_BN[:, list(children)] = drawn if vocabulary is None else vocabulary.tokens(drawn)
    draft = DraftTree.from_topology(topology, tokens_BN, tuple(levels), distribution_rows_N, vocabulary)
    if seed % 3 == 0:  # a node without children where others have some
        draft = dataclasses.replace(draft, child_table_BNK=draft.child_table_BNK.clone())
        draft.child_table_BNK[0, 1] = 0
    uniforms_BU = torch.rand(batch, BlockWalk().uniforms(scheme, draft.depth), generator=generator, dtype=torch.float64)
    return draft, target_BNV, uniforms_BU


def distribution_of(target_BNV: Tensor) -> TargetDistribution:
    """Return the distributions of all nodes as walks ask for them."""
    return lambda node_B, path_BP: target_BNV[torch.arange(len(node_B)), node_B]
