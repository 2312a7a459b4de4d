"""Walks as they run, on many random drawings."""

import torch
from torch import Tensor

from polydraft.sampling import draw_one
from polydraft.verify import Scheme, Verdict, Walk

from .enumeration import Batch


def sample_walk(walk: Walk, scheme: Scheme, batch: Batch, rows: int, seed: int) -> tuple[Tensor, Verdict]:
    """Draw trees for the batch's first case and run the walk; return whole texts, completed by the target, and the verdict."""
    topology, generator = batch.topology, torch.Generator().manual_seed(seed)

    def uniforms(count: int) -> Tensor:
        return torch.rand(rows, count, generator=generator, dtype=torch.float64)

    case_R = torch.zeros(rows, dtype=torch.long)
    tokens_RN = torch.zeros(rows, topology.num_nodes, dtype=torch.long)
    for node, children in enumerate(topology.children):
        if children:
            draft_RV = batch.node_distributions(batch.draft_CXV, case_R, tokens_RN, node)
            tokens_RN[:, list(children)] = scheme.draw(draft_RV.float(), uniforms(len(children)))
    draft = batch.draft(case_R, tokens_RN, torch.float32)
    target_distribution = batch.target_distribution(case_R, tokens_RN, torch.float32)
    verdict = walk.run(scheme, draft, target_distribution, uniforms(walk.uniforms(scheme, topology.depth)))
    texts_RD = verdict.tokens_BD.clone()
    for place in range(1, topology.depth + 1):
        distribution_RV = batch.target_CXV[case_R, batch.number(texts_RD[:, :place])]
        completed_R = draw_one(distribution_RV, uniforms(1)[:, 0])
        texts_RD[:, place] = torch.where(place > verdict.accepted_B, completed_R, texts_RD[:, place])
    return texts_RD, verdict
