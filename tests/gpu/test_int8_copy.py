"""An int8 copy of the target drafts on a GPU, in captured rounds, in the target's own cache."""

import logging

import pytest
import torch

from families import FAMILIES
from polydraft.draft import Parts, make_drafter
from polydraft.draft.costs import costs_of, measure
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.models.int8_copy import Int8Copy
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_dynamic, parse_tree

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 6, 7, 8], [9, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


@pytest.fixture(scope="module")
def target() -> HFModel:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return HFModel(FAMILIES.get("llama").build(**sizes).to("cuda", torch.bfloat16))


def decoder(target: HFModel, tree: str) -> Decoder:
    dynamic = parse_dynamic(tree)
    topology = parse_tree("none" if dynamic else tree)
    parts = Parts(draft=Int8Copy(target), topology=topology, dynamic=dynamic)
    return Decoder(target, make_drafter(parts))


@pytest.mark.parametrize("tree", ["chain:3", "2x1x1", "dynamic:8:4:fixed"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_greedy_texts_are_plain_ones(target: HFModel, tree: str, prompts: list[list[int]]) -> None:
    plain = Decoder(target).generate(prompts, sampling=GREEDY, max_new_tokens=24)
    found = decoder(target, tree).generate(prompts, sampling=GREEDY, max_new_tokens=24)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert found[0].stats.tokens_per_pass > 1.5


def test_sampled_texts_are_drafted(target: HFModel) -> None:
    sampling = SamplingParams(temperature=1.0)
    found = decoder(target, "2x1x1").generate(PROMPTS * 4, sampling=sampling, max_new_tokens=24, seed=3)
    assert found[0].stats.tokens_per_pass > 1.5
    again = decoder(target, "2x1x1").generate(PROMPTS * 4, sampling=sampling, max_new_tokens=24, seed=3)
    assert [one.token_ids for one in found] == [one.token_ids for one in again]


def test_costs_are_those_of_captured_rounds(target: HFModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        table = measure(target, Int8Copy(target), 8)
    assert not [line for line in caplog.messages if "without CUDA graphs" in line]
    assert table["captured"] and costs_of(table).draft_level < 1.5
