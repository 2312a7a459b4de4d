"""Beams whose passes a stand-in captures, for tests without a GPU."""

import random
from functools import cache

import pytest

from polydraft.beam import BeamDecoder
from polydraft.beam._workspace import BeamWorkspace
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models import FeatureHead, TabularModel
from polydraft.models.hf import early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree
from stand_in import StandIn

from .test_hugging_face import models
from .test_memory import target_and_head

TRUNCATED = SamplingParams(temperature=0.9, top_k=12, top_p=0.95)
WAYS = {
    "search": dict(mode="search", early_stopping=True),
    "coupled": dict(mode="sample", sampling=TRUNCATED),
    "hf": dict(mode="sample", draws="hf"),
    "layers": dict(mode="sample", verification="layers", sampling=TRUNCATED),
    "iid": dict(mode="sample", draws="iid", sampling=TRUNCATED),
    "dynamic": dict(mode="sample", width_threshold=0.6, sampling=TRUNCATED),
    "one cache": dict(mode="sample", one_cache=True, sampling=TRUNCATED),
    "penalty": dict(mode="search", sampling=SamplingParams(temperature=0, repetition_penalty=1.3)),
}
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 60) for _ in range(length)] for length in (3, 40, 1)]


@cache
def pair(name):
    """A target and a drafter."""
    if name == "table":
        target = TabularModel.random(64, 2, seed=3, sharpness=2.5)
        return target, TreeDrafter(target.mixed_with(TabularModel.random(64, 2, seed=4), 0.7), parse_tree("1"))
    if name in ("head", "near head"):
        target, head = target_and_head(window=512 if name == "head" else 12)
        return target, TreeDrafter(head, parse_tree("1"))
    family, _, draft = name.partition("/")
    target, noisy = models(family)
    if draft == "none":
        return target, None
    return target, TreeDrafter(early_exit(target, 2) if draft == "early" else noisy, parse_tree("1"))


class CapturedBeams(BeamDecoder):
    """Beams whose passes have the distributions in them, as on a GPU, and are captured by stand-ins where graphs are on."""

    def __init__(self, decoder, **given):
        super().__init__(decoder)
        self.given = given
        self.graphs = []
        """All stand-ins that were given to workspaces: the target's, then the draft's."""

    def new_workspace(self):
        """Return a workspace with stand-ins; its own graphs need a GPU."""
        work = BeamWorkspace(self.decoder.target, self.draft, self.decoder.graphs, packs=True, **self.given)
        if self.decoder.graphs:
            memories = [memory for memory in (work.target_memory, work.draft_memory) if memory is not None]
            for memory in memories:
                banks = [memory.bank]
                if memory is work.draft_memory and isinstance(self.draft, FeatureHead):
                    banks.append(work.target_memory.bank)  # heads read the target's features
                memory.graphs = StandIn(lambda memory=memory, banks=banks: [memory.context, *banks])
                self.graphs.append(memory.graphs)
        return work


def beams(name, graphs=True, **given):
    """Beams of a pair; what is given goes to their workspaces."""
    target, drafter = pair(name)
    return CapturedBeams(Decoder(target, drafter, eos_token_ids=(2, 5, 7), graphs=graphs), **given)


def outcome(decoder, prompt, **options):
    chosen = {
        "beams": 3,
        "draft_width": 6,
        "draft_depth": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 10,
        "seed": len(prompt),
        **options,
    }
    stream = decoder.stream(prompt, **chosen)
    for _ in stream:
        pass
    return stream.result()


def assert_same(got, expected):
    assert [text.token_ids for text in got.texts] == [text.token_ids for text in expected.texts]
    for one, other in zip(got.texts, expected.texts, strict=True):
        assert (one.sources, one.stop_reason) == (other.sources, other.stop_reason)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert got.stats.rounds == expected.stats.rounds
    assert expected.stats.replayed_rounds == 0
