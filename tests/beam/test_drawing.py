"""What becomes of a step's draws."""

from polydraft.beam import BeamOptions
from polydraft.beam.drawing import close_draws
from polydraft.beam.node import Beam, Node

SCORES = (-3.0, -1.0, -4.0, -2.0)


def drawn() -> list[Beam]:
    root = Node(0)
    return [Beam(root.child(token), score) for token, score in enumerate(SCORES)]


def closed(draws: str, ends) -> tuple[list[float], list[float]]:
    running, ended = close_draws(drawn(), BeamOptions(mode="sample", beams=2, draws=draws), ends)
    return [beam.score for beam in running], [beam.score for beam in ended]


def test_as_hugging_face_draws_the_best_go_on_and_the_first_drawn_finish() -> None:
    assert closed("hf", lambda node: False) == ([-1.0, -2.0], [])
    assert closed("hf", lambda node: node.token == 0) == ([-1.0, -2.0], [-3.0])
    assert closed("hf", lambda node: node.token == 3) == ([-1.0, -3.0], [])  # drawn too late to finish
    assert closed("hf", lambda node: True) == ([], [-3.0, -1.0])  # at the length limit: the first two, not the best two


def test_otherwise_every_draw_goes_on_or_finishes() -> None:
    assert closed("distinct", lambda node: node.token in (1, 3)) == ([-3.0, -4.0], [-1.0, -2.0])
