"""One layer of draft beams becomes beams of the target's distribution, exactly; every tempting mistake is caught."""

import itertools

import numpy as np
import pytest

from polydraft.beam import BeamOptions
from polydraft.beam import _sample as sample_module
from polydraft.beam._node import Beam, Node
from polydraft.beam._run import close_draws
from polydraft.beam._sample import acceptance_chances, count_distribution, dynamic_width, verify_layer

from .enumeration import enumerate_outcomes, total_variation
from .reference import drawings

PAIRS = 4
TOLERANCE = 1e-9
SCORES = (-3.0, -1.0, -4.0, -2.0)


def distributions(seed):
    """Ordinary pairs of distributions, and the awkward ones: equal, with zeros, without common support."""
    rng = np.random.default_rng(seed)
    target, draft = rng.dirichlet(np.ones(PAIRS)), rng.dirichlet(np.ones(PAIRS))
    if seed == 1:
        draft = target
    if seed == 2:
        target[0], draft[3] = 0.0, 0.0
        target, draft = target / target.sum(), draft / draft.sum()
    if seed == 3:
        target, draft = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.0, 0.0, 0.3, 0.7])
    if seed == 4:
        target = np.array([0.0, 1.0, 0.0, 0.0])
    return target, draft


def wanted(target, width, distinct):
    """The distribution of `width` draws in order, independent or without replacement."""
    return dict(drawings(target, width, not distinct))


def one_layer(target, draft, draft_width, width, distinct, verify=verify_layer, drawn_distinct=None):
    def program(chance):
        drafts = chance.draw(draft, draft_width, distinct=distinct if drawn_distinct is None else drawn_distinct)
        return tuple(verify(target, draft, drafts, width, chance, distinct=distinct).outputs)

    return enumerate_outcomes(program)


@pytest.mark.parametrize("distinct", [False, True], ids=["iid", "distinct"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("draft_width", "width"), [(3, 2), (2, 1), (3, 1), (3, 3), (1, 2)])
def test_outputs_follow_the_targets_distribution(seed, draft_width, width, distinct):
    target, draft = distributions(seed)
    got = one_layer(target, draft, draft_width, width, distinct)
    assert total_variation(got, wanted(target, width, distinct)) < TOLERANCE


# -- a second layer, whose draws below rejected parents are orphans --


def second_layer(seed, distinct, orphans="dropped, distribution normed"):
    """Drafts over the children of two parents; the second parent was rejected."""
    rng = np.random.default_rng(seed)
    tokens, joint = 3, rng.dirichlet(np.ones(6))
    target = rng.dirichlet(np.ones(tokens))
    draft = joint[:tokens] / joint[:tokens].sum() if "normed" in orphans else joint[:tokens]

    def program(chance):
        drafts = [entry for entry in chance.draw(joint, 3, distinct=distinct) if entry < tokens]
        return tuple(verify_layer(target, draft, drafts, 2, chance, distinct=distinct).outputs)

    return total_variation(enumerate_outcomes(program), wanted(target, 2, distinct))


@pytest.mark.parametrize("distinct", [False, True], ids=["iid", "distinct"])
@pytest.mark.parametrize("seed", range(4))
def test_orphans_are_left_out_and_the_distribution_is_normed(seed, distinct):
    assert second_layer(seed, distinct) < TOLERANCE


@pytest.mark.parametrize("distinct", [False, True], ids=["iid", "distinct"])
def test_leaving_orphans_out_without_norming_is_caught(distinct):
    assert second_layer(0, distinct, orphans="dropped") > 1e-3


# -- mutants --


def upside_down(target, draft, drafts, width, chance, *, distinct):
    """The ratio as printed in Algorithm 1: q over p'."""

    class Turned:
        def accepts(self, one, other):
            return chance.accepts(other, one)

        draw = staticmethod(chance.draw)

    return verify_layer(target, draft, drafts, width, Turned(), distinct=distinct)


def residual_not_normed(monkeypatch):
    monkeypatch.setattr(sample_module, "_residual", lambda target, draft: np.maximum(target - draft, 0.0))


def residual_of_the_draft(monkeypatch):
    monkeypatch.setattr(sample_module, "_residual", lambda target, draft: target)


def residual_subtracted_twice(monkeypatch):
    once = sample_module._residual
    monkeypatch.setattr(sample_module, "_residual", lambda target, draft: once(once(target, draft), draft))


def draft_keeps_what_was_drawn(monkeypatch):
    """Draws without replacement verified with the first distribution: the authors' code."""
    without = sample_module._without

    def kept(probs, entry):
        return probs if probs[entry] == kept.draft[entry] else without(probs, entry)

    kept.draft = distributions(0)[1]
    monkeypatch.setattr(sample_module, "_without", kept)


def removed_but_not_normed(monkeypatch):
    def without(probs, entry):
        left = probs.copy()
        left[entry] = 0.0
        return left

    monkeypatch.setattr(sample_module, "_without", without)


MUTANTS = {
    "no norm of the residual": (residual_not_normed, (False, True)),
    "no residual": (residual_of_the_draft, (False, True)),
    "residual subtracted twice": (residual_subtracted_twice, (False, True)),
    "draft distribution keeps what was drawn": (draft_keeps_what_was_drawn, (True,)),
    "removed without norming": (removed_but_not_normed, (True,)),
}


@pytest.mark.parametrize(
    ("mutant", "distinct"), [(name, distinct) for name, (_, ways) in MUTANTS.items() for distinct in ways], ids=str
)
def test_mutants_are_caught(monkeypatch, mutant, distinct):
    target, draft = distributions(0)
    MUTANTS[mutant][0](monkeypatch)
    assert total_variation(one_layer(target, draft, 3, 2, distinct), wanted(target, 2, distinct)) > 1e-3


@pytest.mark.parametrize("distinct", [False, True], ids=["iid", "distinct"])
def test_the_printed_ratio_is_caught(distinct):
    target, draft = distributions(0)
    got = one_layer(target, draft, 3, 2, distinct, verify=upside_down)
    assert total_variation(got, wanted(target, 2, distinct)) > 1e-2


@pytest.mark.parametrize("distinct", [False, True], ids=["iid", "distinct"])
def test_drafts_drawn_the_other_way_are_caught(distinct):
    target, draft = distributions(0)
    got = one_layer(target, draft, 3, 2, distinct, drawn_distinct=not distinct)
    assert total_variation(got, wanted(target, 2, distinct)) > 1e-2


def test_a_width_that_looks_at_its_own_drafts_is_caught():
    target, draft = distributions(0)

    def program(chance):
        drafts = chance.draw(draft, 3, distinct=False)
        width = 1 if drafts[0] == 0 else 2
        return verify_layer(target, draft, drafts, width, chance, distinct=False).outputs[0]

    got = enumerate_outcomes(program)
    # The first beam is right whatever the width; that there is a second one tells of the first.
    assert total_variation(got, {entry: chance for entry, chance in enumerate(target)}) < TOLERANCE

    def pairs(chance):
        drafts = chance.draw(draft, 3, distinct=False)
        width = 1 if drafts[0] == 0 else 2
        outputs = verify_layer(target, draft, drafts, width, chance, distinct=False).outputs
        return tuple(outputs) if len(outputs) == 2 else None

    distribution = enumerate_outcomes(pairs)
    distribution.pop(None)
    total = sum(distribution.values())
    assert total_variation({key: value / total for key, value in distribution.items()}, wanted(target, 2, False)) > 1e-2


# -- the width --


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_recursion_counts_acceptances(seed):
    target, draft = distributions(seed)

    def program(chance):
        drafts = chance.draw(draft, 3, distinct=False)
        return len(verify_layer(target, draft, drafts, 5, chance, distinct=False).drafts)

    got, distribution = enumerate_outcomes(program), count_distribution(acceptance_chances(target, draft, 3))
    assert distribution.sum() == pytest.approx(1, abs=1e-12)
    assert total_variation(got, dict(enumerate(distribution))) < TOLERANCE


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_the_width_is_the_largest_that_is_likely_enough(threshold):
    target, draft = distributions(0)
    distribution = count_distribution(acceptance_chances(target, draft, 4))
    width = dynamic_width(target, draft, 4, threshold=threshold, least=1)
    likely = [sum(distribution[at_least:]) >= threshold - 1e-12 for at_least in range(5)]
    assert width == max(1, max(index for index, fits in enumerate(likely) if fits))


def test_the_width_has_its_bounds():
    target, draft = distributions(3)
    assert dynamic_width(target, draft, 4, threshold=0.5, least=2) == 2
    assert dynamic_width(draft, draft, 4, threshold=1.0, least=2) == 4
    assert dynamic_width(target, draft, 0, threshold=0.5, least=3) == 3


def test_enumeration_itself_is_right():
    got = enumerate_outcomes(lambda chance: tuple(chance.draw(np.array([0.2, 0.3, 0.5]), 2, distinct=True)))
    assert total_variation(got, wanted(np.array([0.2, 0.3, 0.5]), 2, True)) < 1e-12
    assert len(got) == len(list(itertools.permutations(range(3), 2)))


# Below: what becomes of a step's draws.


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
