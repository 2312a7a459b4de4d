"""What the draft thinks the next layers of beams will be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polydraft.beam.law import Continuations
from polydraft.beam.node import Beam, Node

Choose = Callable[[Continuations, list[Beam]], list[int]]
"""`(continuations, parents) -> entries`: which continuations become draft beams, in order."""


@dataclass(frozen=True, eq=False)
class ForestLayer:
    """Draft beams of one step, and the law they were drawn from."""

    parents: list[Beam]
    """The unfinished draft beams of the layer before, or the input beams: rows of the law."""
    continuations: Continuations
    drawn: list[int]
    """Entries of it, in draw order."""
    beams: list[Beam]
    """The drawn ones as beams, in the same order."""


def grow_forest(
    beams: Sequence[Beam], depth: int, law: Callable[[list[Node]], Continuations], ends: Callable[[Node], bool], choose: Choose
) -> list[ForestLayer]:
    """Let the draft run `depth` steps of beam decoding from the input beams.

    Notes
    -----
    Input beams start with the target's own scores, which are known, and not with the draft's as in the paper: whatever law
    drafts are drawn from, verification with that law is exact, and this one is nearer to the target's; besides, truncation
    may have ruled out for the draft what the target has said. Finished draft beams have no children. Nor have those after which
    nothing is foreseen; where that is all of them, the forest ends.
    """
    layers: list[ForestLayer] = []
    parents = list(beams)
    for _ in range(depth):
        if not parents:
            break
        nodes = [beam.node for beam in parents]
        continuations = law(nodes)
        totals_X = continuations.totals([beam.score for beam in parents])
        drawn = choose(continuations, parents)
        if not drawn:
            break
        chosen = (values_X[drawn].tolist() for values_X in (continuations.rows_X, continuations.tokens_X, totals_X))
        drafts = [Beam(nodes[row].child(token), total) for row, token, total in zip(*chosen, strict=True)]
        layers.append(ForestLayer(parents, continuations, drawn, drafts))
        parents = [beam for beam in drafts if not ends(beam.node)]
    return layers
