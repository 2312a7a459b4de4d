"""Drafts as the paper draws them: by the draft model alone, always to the full depth."""

import pytest
import torch

from polydraft.beam import BeamDecoder, BeamOptions
from polydraft.beam._sample import RandomChance, SampleRun
from polydraft.beam._search import SearchRun
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import TabularModel
from polydraft.trees import parse_tree

from .enumeration import enumerate_outcomes, total_variation
from .reference import beam_sampling_distribution, table_rows
from .test_runs import PROMPT, finish, pair, parts


@pytest.mark.parametrize("draws", ["iid", "distinct"])
def test_whole_runs_keep_their_distribution(draws):
    target, draft = pair(2 if draws == "iid" else 3)
    kept = parts(target, draft, 3, draws=draws, verification="layers", beams=1, draft_width=2, draft_depth=1, model_only=True)
    got = enumerate_outcomes(lambda chance: finish(SampleRun(kept, chance)))
    distribution = beam_sampling_distribution(table_rows(target, PROMPT), width=1, steps=3, draws=draws)
    assert total_variation(got, distribution) < 1e-6


def drafted(seed, **options):
    """Return a run's forests, layer by layer: the texts before each layer, and what was foreseen after them."""
    target, draft = TabularModel.random(12, 2, seed=seed, sharpness=3.0), TabularModel.random(12, 2, seed=seed + 50)
    kept = parts(target, draft, 20, draws="iid", beams=2, draft_width=4, draft_depth=3, **options)
    run = SampleRun(kept, RandomChance(torch.Generator().manual_seed(seed)))
    forests, grow = [], run._grow
    run._grow = lambda depth: forests.append(grow(depth)) or forests[-1]
    finish(run)
    return draft, forests


@pytest.mark.parametrize("seed", range(3))
def test_the_model_alone_drafts_to_the_full_depth(seed):
    draft, forests = drafted(seed, model_only=True)
    rows = table_rows(draft, PROMPT)
    for layer in (layer for layers in forests for layer in layers):
        continuations = layer.continuations
        for number, parent in enumerate(layer.parents):
            scores = continuations.scores_X[continuations.rows_X == number]
            assert scores == pytest.approx(rows(tuple(parent.node.tokens())), abs=1e-5), "the draft's own"
    depths = [len(layers) for layers in forests]
    assert set(depths[:-3]) == {3}, "whatever was accepted"
    shallow = [len(layers) for layers in drafted(seed)[1]]
    assert min(shallow[:-3]) < 3, "by default a bad draft is asked for less"


def test_search_finds_the_same_texts():
    target, draft = pair(12)
    options = dict(beams=3, draft_width=6, draft_depth=2)
    texts = {alone: finish(SearchRun(parts(target, draft, 12, model_only=alone, **options))) for alone in (False, True)}
    assert texts[True] == texts[False]


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(UsageError, match="leave one of them out"):
        BeamOptions(twins=True, model_only=True)
    target, draft = pair(12)
    bare = BeamDecoder(Decoder(target))
    with pytest.raises(UsageError, match="model_only needs a draft model"):
        bare.sample(PROMPT, beams=2, model_only=True, max_new_tokens=2)
    drafted = BeamDecoder(Decoder(target, TreeDrafter(draft, parse_tree("1"))))
    assert drafted.sample(PROMPT, beams=2, model_only=True, max_new_tokens=2).settings["model_only"]
