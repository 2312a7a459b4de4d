"""Formulas for the largest possible acceptance, the acceptance of schemes, and the speed-up that acceptance brings.

`*_optimum` is the most that any exact verifier can accept for one way of drawing drafts, and `acceptance` is what a scheme
accepts. Both take tensors of probabilities over a full vocabulary, one row per position, except `linear_program_optimum`,
`subset_optimum` and `product_optimum`, which are for tiny vocabularies. `speedup` and `fastest_tree` turn acceptance into time.
"""

from polydraft.draft.speedup import Costs, cost_curve, speedup, tree_tokens
from polydraft.lab.theory.acceptance import RowAcceptance, acceptance, naive_acceptance
from polydraft.lab.theory.lp import DraftDistribution, linear_program_optimum, product_optimum, subset_optimum
from polydraft.lab.theory.optimum import (
    conditional_poisson_optimum,
    greedy_optimum,
    hybrid_optimum,
    top_optimum,
    with_replacement_optimum,
    without_replacement_optimum,
)
from polydraft.lab.theory.speed import (
    RatedTree,
    chain_tokens,
    fastest_tree,
    improvement_factor,
    largest_tree,
    token_acceptance,
)

__all__ = [
    "Costs",
    "DraftDistribution",
    "RatedTree",
    "RowAcceptance",
    "acceptance",
    "chain_tokens",
    "conditional_poisson_optimum",
    "cost_curve",
    "fastest_tree",
    "greedy_optimum",
    "hybrid_optimum",
    "improvement_factor",
    "largest_tree",
    "linear_program_optimum",
    "naive_acceptance",
    "product_optimum",
    "speedup",
    "subset_optimum",
    "token_acceptance",
    "top_optimum",
    "tree_tokens",
    "with_replacement_optimum",
    "without_replacement_optimum",
]
