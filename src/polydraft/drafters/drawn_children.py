"""Dynamic trees of drawn children: how many is decided before they are drawn, which of them get children after."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.drafters.candidates import STEP, Level
from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Scheme
from polydraft.theory import Costs

_UNLISTED = 0.4
"""Of the target's mass off the children, the share that drawing and coupling bring to them all the same, roughly."""
_SIZES = (9, 13, 21, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Widths:
    """One level: so many nodes draw so many children each."""

    nodes: int
    children: int

    @property
    def total(self) -> int:
        """Candidates of the level."""
        return self.nodes * self.children


def schedule(costs: Costs, most: int, depth: int, widest: int) -> tuple[Widths, ...]:
    """Lay out levels for trees of about the size that pays best.

    A drawn child may not be left out again (that would change the law of those that stay), so the size is chosen beforehand:
    the one that a rule of thumb, tokens growing with the logarithm of the size, finds fastest on the cost curve. Children
    stand thick near the root; deep levels, which only rows that are sure of themselves draw, are narrow.
    """
    sizes = [size for size in _SIZES if size <= most] or [most]
    size = max(sizes, key=lambda nodes: (1.2 + 0.33 * torch.tensor(float(nodes)).log2().item()) / costs.of_round(3, nodes))
    room = size - 1
    first = max(min(round(0.4 * room), widest, 8), 1)
    children = 3 if room >= 40 else 2 if room >= 6 else 1
    second = Widths(max(min(round(0.35 * room / children), first), 1), min(children, widest))
    twice = 2 if room >= 16 and widest > 1 else 1
    third = Widths(max(min(round(0.2 * room / twice), second.total), 1), twice)
    levels = [Widths(1, first), second, third]
    levels += [Widths(min(2 if room >= 16 else 1, third.total), 1)] * max(depth - 3, 0)
    kept: list[Widths] = []
    for level in levels[:depth]:
        if sum(one.total for one in kept) + level.total > most - 1:
            break
        kept.append(level)
    return tuple(kept) or (Widths(1, min(most - 1, widest)),)


def drawn_children(scheme: Scheme, widths: Widths, scores_BW: Tensor, probs_BWV: Tensor, uniforms_BU: Tensor) -> Level:
    """Draw the children of W nodes a row; candidates stand parent by parent, in draw order; tokens are columns of the laws."""
    batch_size, nodes, _ = probs_BWV.shape
    count = widths.children
    children_RK = scheme.draw(probs_BWV.flatten(0, 1), uniforms_BU.reshape(batch_size * nodes, count))
    children_BWK = children_RK.view(batch_size, nodes, count)
    children_BWK = torch.where((scores_BW > -torch.inf)[..., None], children_BWK, NO_TOKEN)
    real_BWK = children_BWK != NO_TOKEN
    # A token drawn twice is walked to by its first copy, so only that one can be worth something.
    same_BWKK = children_BWK[..., :, None] == children_BWK[..., None, :]
    counted_BWK = real_BWK & ~same_BWKK.tril(-1).any(-1)
    mass_BWK = probs_BWV.gather(-1, children_BWK.clamp(min=0)) * counted_BWK
    spare_BW1 = _UNLISTED * (1 - mass_BWK.sum(-1, keepdim=True)).clamp(min=0) / counted_BWK.sum(-1, keepdim=True).clamp(min=1)
    chance_BWK = torch.where(counted_BWK, mass_BWK + spare_BW1, 0.0)
    scores_BX = (scores_BW[..., None] + chance_BWK.log() - STEP).flatten(1)
    parents_X = torch.arange(nodes, device=scores_BW.device).repeat_interleave(count)
    return Level(children_BWK.flatten(1), parents_X.expand(batch_size, -1), scores_BX)
