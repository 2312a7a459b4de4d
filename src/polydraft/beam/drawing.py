"""What becomes of the beams that a step has drawn."""

from collections.abc import Callable, Sequence

from polydraft.beam.node import Beam, Node
from polydraft.beam.options import BeamOptions, Draws


def close_draws(drawn: Sequence[Beam], options: BeamOptions, ends: Callable[[Node], bool]) -> tuple[list[Beam], list[Beam]]:
    """Return the beams that go on and those that have ended, given a step's draws in order."""
    running = [beam for beam in drawn if not ends(beam.node)]
    if options.draws == Draws.HUGGING_FACE:
        # Only the first W draws may end; of what goes on, the W best do.
        return (
            sorted(running, key=lambda beam: -beam.score)[: options.beams],
            [beam for beam in drawn[: options.beams] if ends(beam.node)],
        )
    return running, [beam for beam in drawn if ends(beam.node)]
