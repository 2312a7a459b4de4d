"""Whole runs of beam sampling follow the distribution of beam sampling, with and without drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from covering import covering
from polydraft.beam._distribution import Continuations
from polydraft.beam._node import Beam, Node
from polydraft.beam._run import BeamRequest
from polydraft.beam._sample import RandomChance, SampleRun, _Universe
from polydraft.beam._search import CoupledRun, SearchRun, SharedNoise, largest
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import BeamOptions
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams

from .enumeration import enumerate_outcomes, total_variation
from .reference import beam_sampling_distribution, table_rows
from .test_layer import wanted

PROMPT = [1, 0]
FALSE_ALARM = 1e-4


def pair(vocabulary, seed=0, share=0.5):
    target = TabularModel.random(vocabulary, 2, seed=seed)
    return target, target.mixed_with(TabularModel.random(vocabulary, 2, seed=seed + 100), share)


def finish(run):
    while not run.done:
        run.step()
    return tuple(tuple(one.node.tokens()) for one in run.results())


def parts(target, draft, steps, ends=(), **options):
    return BeamRequest(
        target=target,
        draft=draft,
        prompt=PROMPT,
        params=SamplingParams(),
        options=BeamOptions(mode="sample", early_stopping="never", num_return_sequences=options["beams"], **options),
        eos_token_ids=frozenset(ends),
        max_new_tokens=steps,
    )


EXACT = {
    "one beam, two layers": dict(vocabulary=2, steps=3, beams=1, draft_width=2, draft_depth=2),
    "one beam, its end": dict(vocabulary=3, steps=2, beams=1, draft_width=2, draft_depth=1, ends=(2,)),
    "two beams": dict(vocabulary=2, steps=2, beams=2, draft_width=3, draft_depth=1),
    "no draft": dict(vocabulary=3, steps=2, beams=2, draft=False, ends=(2,)),
}


def enumerated(case, draws):
    options = dict(EXACT[case])
    vocabulary, steps, ends = options.pop("vocabulary"), options.pop("steps"), options.pop("ends", ())
    target, draft = pair(vocabulary)
    draft = draft if options.pop("draft", True) else None
    kept = parts(target, draft, steps, ends, draws=draws, verification="layers", **options)
    got = enumerate_outcomes(lambda chance: finish(SampleRun(kept, chance)))
    rows = table_rows(target, PROMPT)
    return got, beam_sampling_distribution(rows, width=options["beams"], steps=steps, draws=draws, ends=ends)


# Two layers of distinct drafts are enumerated by default in test_stops.
LONG = [("one beam, two layers", "iid"), ("one beam, two layers", "distinct"), ("two beams", "iid"), ("no draft", "iid")]
RUNS = [
    pytest.param(case, draws, marks=[pytest.mark.slow] if (case, draws) in LONG else [])
    for case in EXACT
    for draws in ("iid", "distinct")
] + [("one beam, its end", "hf")]


@pytest.mark.parametrize(("case", "draws"), RUNS)
def test_the_distribution_of_whole_runs_by_enumeration(case, draws):
    got, expected = enumerated(case, draws)
    assert sum(got.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(got, expected) < 1e-6  # the engine's log-softmax is in single precision


def sampled_p_value(make_run, expected, samples):
    texts = list(expected)
    places = {text: place for place, text in enumerate(texts)}
    counts = np.zeros(len(texts))
    for seed in range(samples):
        counts[places[finish(make_run(torch.Generator().manual_seed(seed)))]] += 1
    return chi_square_p_value(counts, np.array([expected[text] for text in texts]))


def deep_case(draws):
    """Three steps and two layers, so that second layers have orphans."""
    target, draft = pair(3, seed=5)
    kept = parts(target, draft, 3, draws=draws, verification="layers", beams=2, draft_width=4, draft_depth=2)
    return kept, beam_sampling_distribution(table_rows(target, PROMPT), width=2, steps=3, draws=draws)


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["iid", "distinct"])
def test_many_runs_with_two_layers_of_drafts(draws):
    kept, expected = deep_case(draws)
    p_value = sampled_p_value(lambda generator: SampleRun(kept, RandomChance(generator)), expected, 4000)
    assert p_value > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["distinct", "hf"])
def test_many_coupled_runs(draws):
    target, draft = pair(5, seed=5)
    kept = parts(target, draft, 2, (4,), draws=draws, beams=2, draft_width=4, draft_depth=2)
    expected = beam_sampling_distribution(table_rows(target, PROMPT), width=2, steps=2, draws=draws, ends=(4,))
    assert sampled_p_value(lambda generator: CoupledRun(kept, generator), expected, 4000) > FALSE_ALARM


@pytest.mark.parametrize("draws", [pytest.param("iid", marks=pytest.mark.slow), "distinct"])
def test_orphans_whose_mass_stays_in_the_distribution_show_in_runs(monkeypatch, draws):
    """The enumeration can fail: the draft's distribution is that of all its beams, not of the surviving ones."""
    right = _Universe.spread

    def wrong(universe, places_X, probs_X):
        return (0.6 if places_X is universe.draft_U else 1.0) * right(universe, places_X, probs_X)

    monkeypatch.setattr(_Universe, "spread", wrong)
    got, expected = enumerated("one beam, two layers", draws)
    assert total_variation(got, expected) > 1e-3


def test_shared_noise_draws_without_replacement():
    probs = np.array([0.5, 0.2, 0.2, 0.07, 0.03])
    rows, tokens = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])
    continuations = Continuations(rows, tokens, np.log(probs), np.log(probs), 2, 3)
    distribution = wanted(probs, 2, True)
    places = {pair: place for place, pair in enumerate(distribution)}
    counts = np.zeros(len(distribution))
    for seed in range(6000):
        root = Node(7)
        beams = [Beam(root.child(3), 0.0), Beam(root.child(4), 0.0)]
        noisy = SharedNoise(torch.Generator().manual_seed(seed)).perturbed(continuations, beams)
        counts[places[tuple(int(entry) for entry in np.argsort(-noisy)[:2])]] += 1
    assert chi_square_p_value(counts, np.array(list(distribution.values()))) > FALSE_ALARM


@pytest.mark.parametrize("draws", ["distinct", "hf"])
def test_cold_coupled_runs_find_what_search_finds(draws):
    """At a temperature so low that no weight is a number any more, drawing is searching."""
    target, _ = pair(12, seed=3)
    found = []
    for kind, params in ((CoupledRun, SamplingParams(temperature=1e-4)), (SearchRun, SamplingParams())):
        kept = replace(parts(target, None, 9, (11,), draws=draws, beams=2), params=params)
        chance = [torch.Generator().manual_seed(1)] if kind is CoupledRun else []
        found.append(finish(kind(kept, *chance))[0])
    assert found[0] == found[1]


# Where texts can gain by going on, a beam outside the forest always matters.
DISTRIBUTIONS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.6),
    "bias": SamplingParams(logit_bias={3: 2.0}),
}


def differing_seeds(draws, params):
    """Run with and without a draft; return the seeds whose texts differ, and how many passes the draft spared."""
    target, draft = pair(12, seed=3)
    passes = {True: 0, False: 0}
    differing = []
    for seed in range(8):
        results = {}
        for with_draft in (True, False):
            options = dict(draws=draws, beams=3, draft_width=6, draft_depth=3)
            kept = replace(parts(target, draft if with_draft else None, 9, (11,), **options), params=params)
            run = CoupledRun(kept, torch.Generator().manual_seed(seed))
            results[with_draft] = finish(run)
            passes[with_draft] += run.stats.passes
        differing += [seed] * (results[True] != results[False])
    return differing, passes[False] / passes[True]


@pytest.mark.parametrize(("draws", "name"), covering(["distinct", "hf"], DISTRIBUTIONS))
def test_coupled_runs_give_the_texts_of_runs_without_a_draft(draws, name):
    differing, gain = differing_seeds(draws, DISTRIBUTIONS[name])
    assert not differing and gain > 1.05


def test_beams_outside_the_forest_that_are_passed_over_show(monkeypatch):
    monkeypatch.setattr(SharedNoise, "highest", lambda noise, beam: -np.inf)
    differing, _ = differing_seeds("distinct", SamplingParams())
    assert differing


def test_of_equal_totals_the_earlier_are_larger():
    totals_X = np.random.default_rng(0).integers(0, 40, 5000).astype(np.float64)
    for count in (1, 7, 130, 400, 4999, 5000, 6000):
        assert largest(totals_X, count) == np.argsort(-totals_X, kind="stable")[:count].tolist()


def short_runs(seed, packs):
    """Return the texts of a run under top-k, and how often each round brought distributions of the target to the host."""
    target, draft = pair(64, seed=3)
    kept = parts(target, draft, 9, (11, 12), draws="distinct", beams=3, draft_width=6, draft_depth=3)
    workspace = BeamWorkspace(target, draft, graphs=False, packs=packs)
    run = CoupledRun(replace(kept, params=SamplingParams(top_k=8)), torch.Generator().manual_seed(seed), workspace)
    distribution, calls, rounds = run.target.distribution, [], []
    unpacked = distribution.unpacked
    distribution.unpacked = lambda *given: calls.append(1) or unpacked(*given)
    while not run.done:
        calls.clear()
        run.step()
        rounds.append(len(calls))
    assert not any(node.token in (11, 12) for node in run.target.tree.bank.rows), "a text that ended was passed"
    return [one.node.tokens() for one in run.results()], rounds


def test_distributions_that_come_with_the_pass_are_the_same():
    apart, together = ([short_runs(seed, packs) for seed in range(4)] for packs in (False, True))
    assert [texts for texts, _ in together] == [texts for texts, _ in apart]
    assert max(max(rounds) for _, rounds in together) == 1 < max(max(rounds) for _, rounds in apart)


def test_places_of_a_forest_go_to_what_may_win(monkeypatch):
    """Of continuations whose totals are the target's own, no more are drafted than a step can take."""
    target, draft = pair(12, seed=3)
    grown = []
    promising = CoupledRun._promising

    def noted(run, totals_X, continuations, parents, count):
        chosen = promising(run, totals_X, continuations, parents, count)
        passed = [parents[continuations.rows_X[entry]].node in run.target for entry in chosen]
        if parents[0].node.depth == run.length:
            grown.append((sum(passed), len(passed), any(beam.node in run.target for beam in parents)))
        return chosen

    monkeypatch.setattr(CoupledRun, "_promising", noted)
    kept = parts(target, draft, 12, draws="distinct", beams=3, draft_width=8, draft_depth=2)
    finish(CoupledRun(kept, torch.Generator().manual_seed(1)))
    assert max(passed for passed, _, _ in grown) == 3
    assert any(mixed and total == 8 for _, total, mixed in grown)


BOUNDS = [dict(width_threshold=0.6), dict(width_threshold=0.6, min_width=2), dict(one_cache=True)]


@pytest.mark.parametrize(("options", "draws"), covering(BOUNDS, ["iid", "distinct"]))
def test_widths_and_one_cache_keep_to_their_bounds(options, draws):
    target, draft = pair(12, seed=3, share=0.8)
    kept = parts(target, draft, 12, draws=draws, beams=3, draft_width=5, draft_depth=3, **options)
    widths = []
    for seed in range(4):
        run = SampleRun(kept, RandomChance(torch.Generator().manual_seed(seed)))
        while not run.done:
            run.step()
            widths.append(len(run.beams))
        assert len(run.results()[0].node.tokens()) == 12
    going = {width for width in widths if width}
    if "one_cache" in options:
        assert going == {1}
    else:
        assert len(going) > 1 and min(going) >= options.get("min_width", 1) and max(going) <= 5


def test_a_distribution_with_less_support_than_beams():
    logits = torch.full((3, 3), -torch.inf, dtype=torch.float64)
    logits[:, 1] = 0.0
    model = TabularModel(logits)
    for verification in ("layers", "coupled"):
        kept = parts(model, model, 4, draws="distinct", verification=verification, beams=2, draft_width=3)
        generator = torch.Generator().manual_seed(0)
        layers = verification == "layers"
        run = SampleRun(kept, RandomChance(generator)) if layers else CoupledRun(kept, generator)
        assert finish(run) == ((1, 1, 1, 1),)
