"""Verification of one whole path.

References
----------
.. [1] Sun et al. 2024, arXiv:2403.10444 (block verification of a chain).
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes import Scheme
from polydraft.schemes.arrays import (
    Array,
    as_tensor,
    backwards,
    library,
    no_less,
    no_more,
    quietly,
    ranks,
    small,
    take,
)
from polydraft.trees import DraftTree
from polydraft.walks.path import Path, PathFinder, worth_a_look
from polydraft.walks.target_law import TargetLaw
from polydraft.walks.walk import LEAST_WEIGHT, WALKS, Fault, Verdict, Walk


@WALKS.register("block")
class BlockWalk(Walk):
    """Pick one path down to a leaf, then accept as long a beginning of it as the whole of it allows.

    At each node the scheme picks one child without accepting it, so the path is a chain whose tokens follow the picked
    children's laws r, and block verification [1] applies. Below, p is the target's law after the first i tokens of the path,
    x the next token:

    - a₀ = 1, and a ← min(1, a p(x)/r(x)) for each token: how far the path may be believed.
    - sᵢ = Σ(aᵢ p − r)₊: what the target has in excess there.
    - From the path's end upwards, stop at depth i with chance hᵢ = sᵢ/(sᵢ + 1 − aᵢ); the token after it comes from
      (aᵢ p − r)₊.

    Where a path ends nothing is picked, r = 0: then sᵢ = aᵢ = hᵢ, and the token comes from p itself. Below its end a = 0, so
    paths of all lengths go through the same formulas. A path ends at a leaf, or where a is too small to be worth a look at
    what comes below.

    Guarantee: given a path down to depth i, the walk keeps i or more of its tokens and goes on as y with chance aᵢ p(y); by
    induction from the end of the path, and a₀ = 1. Which node a path takes, and whether it ends there, may depend on all
    that was drawn above: trees of any shape are exact, repeated children among them.

    Deviations: of [1] only the abstract was at hand, the formulas are derived anew. The stopping depth is drawn at once from
    its law, with one random number instead of one a depth.
    """

    name = "block"

    def __init__(self, least_weight: float = LEAST_WEIGHT) -> None:
        self.least_weight = least_weight

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Only schemes that pick before they accept have a path's law."""
        return scheme.select_uniforms is not None

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough to pick a child a level; one for where to stop and one for the token there."""
        assert scheme.select_uniforms is not None
        return scheme.select_uniforms * depth + 2

    @quietly
    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Pick the paths of all rows, then draw once where each stops and once what follows."""
        path = PathFinder(scheme, draft, target_law, uniforms_BU, self.least_weight).path()
        weight_BD, going_BL = _weights(path, self.least_weight)
        excess_BLX = _excess(path, weight_BD, going_BL)
        # After the last law that was looked at nothing is picked either: the excess there is the target's whole law.
        levels, concatenate = going_BL.shape[1], library(weight_BD).concatenate
        mass_BD = concatenate([small(excess_BLX.sum(-1)), weight_BD[:, levels:]], 1)
        stop_B1 = small(draw_one(as_tensor(_stop_law(weight_BD, mass_BD)), uniforms_BU[:, -2]))[:, None]
        accepted_B1 = no_less(stop_B1, 0)
        token_B1 = small(draw_one(path.weights_after(accepted_B1, weight_BD, excess_BLX), uniforms_BU[:, -1]))[:, None]
        places_D = ranks(draft.depth + 1, accepted_B1)
        path_BD = take(path.nodes_BD, library(accepted_B1).minimum(places_D, accepted_B1))
        # Without a fault so far there is something to draw, unless it is that last law which is not a number.
        fault_B1, where = _first_fault(path.fault_BL, going_BL), library(accepted_B1).where
        unknown_B1 = (fault_B1 == Fault.NONE.value) & ((stop_B1 == NO_TOKEN) | (token_B1 == NO_TOKEN))
        below_BD = concatenate([path.nodes_BD[:, 1:], 0 * accepted_B1], 1)
        tokens_BD = where(places_D == accepted_B1, token_B1, take(small(draft.tokens_BN), below_BD))
        return Verdict(
            path_BD=as_tensor(path_BD),
            accepted_B=as_tensor(accepted_B1)[:, 0],
            tokens_BD=as_tensor(tokens_BD),
            offered_B=as_tensor(accepted_B1 + take(path.has_children_BD, accepted_B1))[:, 0],
            fault_B=as_tensor(where(unknown_B1, Fault.TARGET.value, fault_B1))[:, 0],
        )


def _weights(path: Path, least_weight: float) -> tuple[Array, Array]:
    """Return a at each node, 0 below a path's end, and at which nodes the path goes on."""
    weights = [library(path.ratio_BL).ones_like(path.ratio_BL[:, :1])]
    for level in range(path.ratio_BL.shape[1]):
        weights.append(_next_weight(weights[-1], path.ratio_BL[:, level : level + 1]))
    concatenate, where = library(path.ratio_BL).concatenate, library(path.ratio_BL).where
    weight_BD = concatenate(weights, 1)
    going_BL = (path.open_BL & worth_a_look(weight_BD[:, :-1], least_weight)).cumprod(-1)
    return concatenate([weights[0], where(going_BL > 0, weight_BD[:, 1:], 0.0)], 1), going_BL


def _next_weight(weight_B1: Array, ratio_B1: Array) -> Array:
    """Return min(1, a p(x)/r(x))."""
    return no_more(weight_B1 * ratio_B1, 1.0)


def _excess(path: Path, weight_BD: Array, going_BL: Array) -> Tensor:
    """Return (a p − r)₊ at each node, what may be emitted in place of the picked child; at a path's end r is 0."""
    share_BL1 = as_tensor(weight_BD[:, :-1] / path.mass_BL)[..., None]
    return torch.addcmul(path.target_BLX * share_BL1, path.law_BLX, as_tensor(going_BL)[..., None], value=-1).clamp_(min=0)


def _stop_law(weight_BD: Array, mass_BD: Array) -> Array:
    """Return the chance of stopping at each depth: hᵢ = sᵢ/(sᵢ + 1 − aᵢ), times 1 − hⱼ of all deeper ones, tried before.

    Where p = r and a = 1, h is 0/0 and the depth is reached by rounding only: there is nothing to emit there, so h = 0.
    """
    rest_BD = mass_BD + (1 - weight_BD)
    chance_BD = library(rest_BD).where(rest_BD != 0, mass_BD / rest_BD, 0.0)
    passed_BD = backwards(backwards(1 - chance_BD).cumprod(1))
    return library(rest_BD).concatenate([chance_BD[:, :-1] * passed_BD[:, 1:], chance_BD[:, -1:]], 1)


def _first_fault(fault_BL: Array, going_BL: Array) -> Array:
    """Return the `Fault` of the first law on the path that is not a number, `[B, 1]`."""
    # A law was looked at where the path had not ended before; where it is not a number, the path ends.
    arrived_BL = library(going_BL).concatenate([0 * going_BL[:, :1] + 1, going_BL[:, :-1]], 1)
    return library(going_BL).amax(fault_BL * arrived_BL, -1, keepdims=True)
