"""Texts that end alike lend each other the target's distribution: fewer passes, and nothing else changes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from covering import covering, keeping
from polydraft.beam import BeamDecoder
from polydraft.beam._distribution import Continuations, DistributionMaker, averaged, no_continuations
from polydraft.beam._node import Node
from polydraft.beam._predictions import TwinIndex
from polydraft.beam._sample import RandomChance, SampleRun
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
    twins, root = TwinIndex([1, 2, 3, 4]), Node(4)
    near, far, other = root.child(7).child(8).child(9), root.child(6).child(9), root.child(7).child(8).child(5)
    twins.add([far, near, other])
    assert list(twins.of(root.child(5).child(7).child(8).child(9))) == [(near, 3)]
    assert list(twins.of(root.child(5).child(6).child(9))) == [(far, 2), (near, 1)]
    assert list(twins.of(root.child(2))) == []


def test_endings_reach_into_the_prompt():
    for prompt, shared in (([8], 1), ([7, 8], 2), ([3, 7, 8], 3), ([2, 3, 7, 8], 4), ([1, 2, 3, 7, 8], 4)):
        twins, root = TwinIndex(prompt), Node(8)
        twins.add([root])
        assert list(twins.of(root.child(2).child(3).child(7).child(8))) == [(root, shared)]


def test_later_twins_take_the_place_of_earlier_ones_and_the_oldest_go():
    twins, root = TwinIndex([0], most=4), Node(0)
    first, second = root.child(1).child(5), root.child(1).child(5).child(1).child(5)
    twins.add([first])
    twins.add([second])
    assert list(twins.of(root.child(9).child(5))) == [(second, 1)]
    assert len(twins) == 4 and first not in [twin for token in (0, 1, 5) for twin, _ in twins.of(root.child(9).child(token))]


def test_an_average_is_one_of_the_rows_that_have_another_distribution():
    one = Continuations(np.array([0, 0, 1]), np.array([2, 5, 2]), np.log([0.5, 0.5, 1.0]), np.log([0.4, 0.6, 1.0]), 2, 8)
    other = Continuations(np.array([0, 0]), np.array([0, 5]), np.log([0.25, 0.75]), np.log([0.1, 0.9]), 1, 8)
    mean = averaged(one, other, [0])
    assert mean.rows_X.tolist() == [0, 0, 0, 1] and mean.tokens_X.tolist() == [0, 2, 5, 2]
    assert np.exp(mean.scores_X) == pytest.approx([0.125, 0.25, 0.625, 1.0])


def test_an_average_of_distributions_that_foresee_nothing_foresees_nothing():
    assert not len(averaged(no_continuations(2, 8), no_continuations(1, 8), [1]).tokens_X)


class Counted(TwinIndex):
    """An index that counts how often it found something, or finds nothing."""

    def __init__(self, prompt, blind=False):
        super().__init__(prompt)
        self.found, self._blind = 0, blind

    def of(self, node):
        """Count, and return, what the class below finds."""
        twins = [] if self._blind else list(super().of(node))
        self.found += bool(twins)
        return twins


WRONG_DISTRIBUTIONS = {"stand in": dict(trusted=1, short=False), "hint": dict(trusted=9, short=True)}


@pytest.mark.parametrize(("draws", "use", "twins"), covering(["iid", "distinct"], WRONG_DISTRIBUTIONS, [False, True]))
def test_whole_runs_keep_their_distribution_whatever_a_twin_says(monkeypatch, use, draws, twins):
    """By enumeration, with twins that share one token where the distribution looks at three."""
    monkeypatch.setattr(DistributionMaker, "is_short", WRONG_DISTRIBUTIONS[use]["short"])
    vocabulary = 2 if draws == "iid" else 3  # distinct drafts must not be all there is
    target = TabularModel.random(vocabulary, 3, seed=0)
    draft = target.mixed_with(TabularModel.random(vocabulary, 3, seed=100), 0.5)
    kept = parts(target, draft, 3, draws=draws, verification="layers", beams=1, draft_width=2, draft_depth=1, twins=twins)
    counted = Counted(PROMPT)

    def program(chance):
        run = SampleRun(kept, chance)
        run.draft.trusted, run.draft.twins = WRONG_DISTRIBUTIONS[use]["trusted"], Counted(PROMPT)
        texts = finish(run)
        counted.found += run.draft.twins.found
        return texts

    got = enumerate_outcomes(program)
    distribution = beam_sampling_distribution(table_rows(target, PROMPT), width=1, steps=3, draws=draws)
    assert total_variation(got, distribution) < 1e-6
    assert counted.found


def decoded(mode, target, draft, seed, twins_of=None, **options):
    """Return the texts of a run, and its passes; `twins_of(prompt)` makes its twins."""
    params = SamplingParams() if mode == "search" else SamplingParams(top_k=6)
    kept = parts(target, draft, 24, (11,), beams=3, draft_width=6, draft_depth=2, **options)
    kept = replace(kept, params=params, prompt=[seed, 3])
    run = SearchRun(kept) if mode == "search" else CoupledRun(kept, torch.Generator().manual_seed(seed))
    if twins_of is not None:
        run.draft.twins = twins_of(kept.prompt)
    return finish(run), run.stats.passes


MODES = {"search": {}, "distinct": {"draws": "distinct"}, "hf": {"draws": "hf"}}


@pytest.mark.parametrize("mode", keeping(MODES, "search", "hf"))
def test_twins_spare_passes_and_change_no_text(mode):
    """The target looks at one token only, so that a twin is always right; the draft knows nothing."""
    target, draft = TabularModel.random(12, 1, seed=5, sharpness=3.0), TabularModel.random(12, 1, seed=6)
    plain = [decoded(mode, target, None, seed, **MODES[mode]) for seed in range(3)]
    drafted = [decoded(mode, target, draft, seed, **MODES[mode]) for seed in range(3)]
    alone = [decoded(mode, target, None, seed, twins=True, **MODES[mode]) for seed in range(3)]
    blind = partial(Counted, blind=True)
    without = [decoded(mode, target, draft, seed, blind, **MODES[mode]) for seed in range(3)]
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
        kept = replace(kept, params=SamplingParams(**distribution), prompt=prompt, stops=stops)
        run = CoupledRun(kept, torch.Generator().manual_seed(seed))
        results.append(finish(run))
    assert results[0] == results[1]


def test_what_is_remembered_is_bounded():
    """Distributions, endings and assembled texts stay few however long the text is."""
    target = TabularModel.random(12, 2, seed=5, sharpness=3.0)
    kept = parts(target, None, 60, (11,), beams=3, draft_width=6, draft_depth=2, draws="distinct", twins=True)
    kept = replace(kept, params=SamplingParams(top_k=6), stops=Words(*"abcdefghijkl").stops("lllll"))
    run = CoupledRun(kept, torch.Generator().manual_seed(1))
    run.target.most_kept, run.draft.twins = 20, TwinIndex(PROMPT, most=50)
    while not run.done:
        run.step()
        assert len(run.draft.twins) <= 50
        assert len(run.target) <= 20 + 3 + 64  # those of the last pass come on top
        assert run.done or len(run.ends.stops) <= 3 + len(run.pool.best)
    assert run.length > 30


@pytest.mark.parametrize("options", [{"width_threshold": 0.6}, {"width_threshold": 0.6, "min_width": 2}, {"one_cache": True}])
def test_layers_of_any_width_go_without_a_draft(options):
    """Rows of which nothing is foreseen, and forests that end at once, do no harm."""
    target = TabularModel.random(12, 1, seed=5, sharpness=3.0)
    passes = 0
    for seed in range(4):
        kept = parts(target, None, 20, (11,), beams=3, draft_width=6, draft_depth=2, draws="iid", twins=True, **options)
        run = SampleRun(kept, RandomChance(torch.Generator().manual_seed(seed)))
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
