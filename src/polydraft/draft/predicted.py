"""Predicted outputs beside any other drafter, for requests that say what text they expect.

Guarantee: candidates depend only on the past and the request, so they are verified like n-grams, and together with them.
"""

import dataclasses

from polydraft.draft.drafter import Drafter, Plain
from polydraft.draft.gram_options import GramTreeOptions, RiderOptions
from polydraft.draft.grams import GramTree
from polydraft.draft.policy import FAIR
from polydraft.draft.speedup import Costs
from polydraft.draft.tree_drafter import Combination, TreeDrafter
from polydraft.errors import UsageError
from polydraft.ngrams.prediction import PREDICTION, PredictionCache

PLACES = 64
"""Most candidates of a round, each with a place in the target's cache: a correct prediction goes on for long. Each round
decides how many pay."""
_BELIEF = dataclasses.replace(FAIR, typical=((9, 1, 7.0), (17, 1, 12.0), (33, 1, 20.0)), most_rate=2.0)
"""Predictions are mostly right: callers predict what they expect."""


def with_prediction(drafter: Drafter, costs: Costs | None = None) -> Drafter:
    """Return a drafter that also proposes what requests predict.

    Parameters
    ----------
    drafter : Drafter
        A tree drafter, n-grams, both, or none.
    costs : Costs, optional
        What passes cost on a CPU; measured when first needed, if not given.

    Raises
    ------
    UsageError
        If the drafter verifies in its own way.
    """
    match drafter:
        case GramTree(predicts=True) | Combination(grams=GramTree(predicts=True)):
            return drafter
        case Combination(tree=tree):
            return Combination(tree, _predicting(drafter.grams, costs))
        case TreeDrafter():
            return Combination(drafter, _predicting(None, costs or drafter.costs))
        case GramTree(lossless=True):
            return _predicting(drafter, costs)
        case Plain():
            return _predicting(None, costs)
    raise UsageError(f"drafter {drafter.name!r} cannot follow a prediction; leave the prediction out")


def _predicting(grams: GramTree | None, costs: Costs | None) -> GramTree:
    """Return an n-gram drafter that looks into the prediction before all other caches."""
    if grams is None:
        grams = GramTree(PREDICTION, (), GramTreeOptions(riders=RiderOptions(branches=0)), costs=costs)
    options = dataclasses.replace(grams.options, nodes=max(grams.options.nodes or 0, PLACES), depth=PLACES)
    caches = (PredictionCache(), *grams.caches)
    return GramTree(grams.name, caches, options, pauses=True, costs=costs or grams.costs, belief=_BELIEF, added=True)
