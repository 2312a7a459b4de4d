"""Texts that end alike lend each other the target's distribution: fewer passes, and nothing else changes."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from covering import covering, keeping
from polydraft.beam import BeamDecoder
from polydraft.beam import _run as run_module
from polydraft.beam._distribution import Continuations, DistributionMaker, averaged, nothing_foreseen
from polydraft.beam._layer import RandomChance
from polydraft.beam._node import Node, Twins
from polydraft.beam._sample import SampleRun
from polydraft.beam._search import CoupledRun, SearchRun
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

from .enumeration import enumerate_outcomes, total_variation
from .reference import beam_sampling_distribution, table_rows
from .test_runs import PROMPT, finish, parts
from .test_stops import Words


def test_twins_share_their_last_tokens_the_longest_first():
    twins, root = Twins([1, 2, 3, 4]), Node(4)
    near, far, other = root.child(7).child(8).child(9), root.child(6).child(9), root.child(7).child(8).child(5)
    twins.note([far, near, other])
    assert list(twins.of(root.child(5).child(7).child(8).child(9))) == [(near, 3)]
    assert list(twins.of(root.child(5).child(6).child(9))) == [(far, 2), (near, 1)]
    assert list(twins.of(root.child(2))) == []


def test_endings_reach_into_the_prompt():
    for prompt, shared in (([8], 1), ([7, 8], 2), ([3, 7, 8], 3), ([2, 3, 7, 8], 4), ([1, 2, 3, 7, 8], 4)):
        twins, root = Twins(prompt), Node(8)
        twins.note([root])
        assert list(twins.of(root.child(2).child(3).child(7).child(8))) == [(root, shared)]


def test_later_twins_take_the_place_of_earlier_ones_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr("polydraft.beam._node._MOST_ENDINGS", 4)
    twins, root = Twins([0]), Node(0)
    first, second = root.child(1).child(5), root.child(1).child(5).child(1).child(5)
    twins.note([first])
    twins.note([second])
    assert list(twins.of(root.child(9).child(5))) == [(second, 1)]
    assert len(twins._latest) == 4 and first not in twins._latest.values()


def test_an_average_is_one_of_the_rows_that_have_another_distribution():
    one = Continuations(np.array([0, 0, 1]), np.array([2, 5, 2]), np.log([0.5, 0.5, 1.0]), np.log([0.4, 0.6, 1.0]), 2, 8)
    other = Continuations(np.array([0, 0]), np.array([0, 5]), np.log([0.25, 0.75]), np.log([0.1, 0.9]), 1, 8)
    mean = averaged(one, other, [0])
    assert mean.rows_X.tolist() == [0, 0, 0, 1] and mean.tokens_X.tolist() == [0, 2, 5, 2]
    assert np.exp(mean.scores_X) == pytest.approx([0.125, 0.25, 0.625, 1.0])


def test_an_average_of_distributions_that_foresee_nothing_foresees_nothing():
    assert not len(averaged(nothing_foreseen(2, 8), nothing_foreseen(1, 8), [1]).tokens_X)


class Counted(Twins):
    """Twins that count what they found."""

    found: ClassVar[int] = 0

    def of(self, node):
        """Count, and return, what the class below finds."""
        twins = list(super().of(node))
        Counted.found += bool(twins)
        return twins


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(run_module, "Twins", Counted)
    Counted.found = 0
    return Counted


WRONG_DISTRIBUTIONS = {"stand in": dict(trusted=1, short=False), "hint": dict(trusted=9, short=True)}


@pytest.mark.parametrize(("draws", "use", "twins"), covering(["iid", "distinct"], WRONG_DISTRIBUTIONS, [False, True]))
def test_whole_runs_keep_their_distribution_whatever_a_twin_says(monkeypatch, counted, use, draws, twins):
    """By enumeration, with twins that share one token where the distribution looks at three."""
    monkeypatch.setattr(run_module, "TRUSTED", WRONG_DISTRIBUTIONS[use]["trusted"])
    monkeypatch.setattr(DistributionMaker, "is_short", WRONG_DISTRIBUTIONS[use]["short"])
    vocabulary = 2 if draws == "iid" else 3  # distinct drafts must not be all there is
    target = TabularModel.random(vocabulary, 3, seed=0)
    draft = target.mixed_with(TabularModel.random(vocabulary, 3, seed=100), 0.5)
    kept = parts(target, draft, 3, draws=draws, verification="layers", beams=1, draft_width=2, draft_depth=1, twins=twins)
    got = enumerate_outcomes(lambda chance: finish(SampleRun(chance=chance, **kept)))
    distribution = beam_sampling_distribution(table_rows(target, PROMPT), width=1, steps=3, draws=draws)
    assert total_variation(got, distribution) < 1e-6
    assert counted.found


def decoded(mode, target, draft, seed, **options):
    """Return the texts of a run, and its passes."""
    params = SamplingParams() if mode == "search" else SamplingParams(top_k=6)
    kept = parts(target, draft, 24, (11,), beams=3, draft_width=6, draft_depth=2, **options)
    kept |= {"params": params, "prompt": [seed, 3]}
    run = SearchRun(**kept) if mode == "search" else CoupledRun(generator=torch.Generator().manual_seed(seed), **kept)
    return finish(run), run.stats.passes


MODES = {"search": {}, "distinct": {"draws": "distinct"}, "hf": {"draws": "hf"}}


@pytest.mark.parametrize("mode", keeping(MODES, "search", "hf"))
def test_twins_spare_passes_and_change_no_text(monkeypatch, counted, mode):
    """The target looks at one token only, so that a twin is always right; the draft knows nothing."""
    target, draft = TabularModel.random(12, 1, seed=5, sharpness=3.0), TabularModel.random(12, 1, seed=6)
    plain = [decoded(mode, target, None, seed, **MODES[mode]) for seed in range(3)]
    drafted = [decoded(mode, target, draft, seed, **MODES[mode]) for seed in range(3)]
    alone = [decoded(mode, target, None, seed, twins=True, **MODES[mode]) for seed in range(3)]
    assert counted.found
    monkeypatch.setattr(Twins, "of", lambda twins, node: [])
    without = [decoded(mode, target, draft, seed, **MODES[mode]) for seed in range(3)]
    assert [texts for texts, _ in plain] == [texts for texts, _ in drafted] == [texts for texts, _ in alone]
    assert sum(passes for _, passes in drafted) < 0.9 * sum(passes for _, passes in without)
    assert sum(passes for _, passes in alone) < 0.9 * sum(passes for _, passes in plain)


@pytest.mark.parametrize("seed", keeping(range(6), 1, 2, 3))  # both distributions, none to two ends
def test_twins_alone_change_no_text_whatever_ends_and_bends_it(seed):
    """Penalties, biases, stop strings, several ends, short prompts: all with and without twins."""
    rng = np.random.default_rng(seed)
    target = TabularModel.random(12, 2, seed=seed, sharpness=3.0)
    distribution = {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}} if seed % 2 else {"top_k": 5, "temperature": 0.8}
    prompt = [int(token) for token in rng.integers(0, 12, 1 + seed % 4)]
    results = []
    for twins in (False, True):
        kept = parts(
            target, None, 16, (11, 10)[: seed % 3], beams=3, draft_width=6, draft_depth=2, draws="distinct", twins=twins
        )
        stops = Words(*"abcdefghijkl").stops("cd", "f")
        kept |= {"params": SamplingParams(**distribution), "prompt": prompt, "stops": stops}
        run = CoupledRun(generator=torch.Generator().manual_seed(seed), **kept)
        results.append(finish(run))
    assert results[0] == results[1]


def test_what_is_remembered_is_bounded(monkeypatch):
    """Distributions, endings and assembled texts stay few however long the text is."""
    monkeypatch.setattr(run_module, "_MOST_DISTRIBUTIONS", 20)
    monkeypatch.setattr("polydraft.beam._node._MOST_ENDINGS", 50)
    target = TabularModel.random(12, 2, seed=5, sharpness=3.0)
    kept = parts(target, None, 60, (11,), beams=3, draft_width=6, draft_depth=2, draws="distinct", twins=True)
    kept |= {"params": SamplingParams(top_k=6), "stops": Words(*"abcdefghijkl").stops("lllll")}
    run = CoupledRun(generator=torch.Generator().manual_seed(1), **kept)
    while not run.done:
        run.step()
        assert len(run._twins._latest) <= 50
        assert len(run._distributions) <= 20 + 3 + 64  # those of the last pass come on top
        assert run.done or len(run.stops._assemblers) <= 3 + len(run.pool.best)
    assert run.length > 30


@pytest.mark.parametrize("options", [{"width_threshold": 0.6}, {"width_threshold": 0.6, "min_width": 2}, {"one_cache": True}])
def test_layers_of_any_width_go_without_a_draft(options):
    """Rows of which nothing is foreseen, and forests that end at once, do no harm."""
    target = TabularModel.random(12, 1, seed=5, sharpness=3.0)
    passes = 0
    for seed in range(4):
        kept = parts(target, None, 20, (11,), beams=3, draft_width=6, draft_depth=2, draws="iid", twins=True, **options)
        run = SampleRun(chance=RandomChance(torch.Generator().manual_seed(seed)), **kept)
        texts = finish(run)
        assert all(0 < len(text) <= 20 for text in texts)
        passes += run.stats.passes / len(run.pass_of_step)
    assert passes < 0.9 * 4


def test_a_draft_that_is_there_is_left_out(monkeypatch):
    target, draft = TabularModel.random(12, 1, seed=5), TabularModel.random(12, 1, seed=6)
    beams = BeamDecoder(Decoder(target, TreeDrafter(draft, parse_tree("1"))))
    expected = beams.search([1, 2], beams=2, max_new_tokens=24).best.token_ids
    monkeypatch.setattr(draft, "head", lambda features: pytest.fail("the draft was asked"))
    result = beams.search([1, 2], beams=2, max_new_tokens=24, twins=True)
    assert result.settings["draft"] == "twins" and result.best.token_ids == expected
    # What twins foresaw is told apart from what the target added.
    assert 0 < result.stats.drafted_tokens == result.best.sources.count("twins")
