"""Layers on two devices: keys and values stay with them, texts stay the same."""

import pytest
import torch

from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def place(part, device: str) -> None:
    """Put a part of a model on a device and bring it what it needs, as accelerate does."""
    part.to(device)

    def fetch(module, arguments, options):
        return moved(arguments, device), {key: moved(value, device) for key, value in options.items()}

    part.register_forward_pre_hook(fetch, with_kwargs=True)


@pytest.mark.parametrize("head", ["cpu", "cuda"])
def test_texts_are_those_of_one_device(head: str) -> None:
    whole, model = FAMILIES.get("llama").build(), FAMILIES.get("llama").build().to("cuda")
    place(model.model.layers[1], "cpu")
    place(model.model.layers[2], "cuda")
    place(model.model.norm, head)
    place(model.lm_head, head)
    # As accelerate does for the whole: what comes out is where the tokens were.
    model.register_forward_hook(lambda module, inputs, outputs: outputs.__class__(logits=outputs.logits.to("cuda")))
    target = HFModel(model)
    assert target.device.type == "cuda" and "spread over several devices (cpu, cuda:0)" in (target.graph_obstacle or "")
    assert target._split_head
    greedy = SamplingParams(temperature=0)
    for draft in (None, FAMILIES.get("llama").build().to("cuda")):
        drafter = None if draft is None else TreeDrafter(HFModel(draft), parse_tree("3x2x1"))
        results = Decoder(target, drafter).generate(PROMPTS, max_new_tokens=16, sampling=greedy)
        expected = Decoder(HFModel(whole)).generate(PROMPTS, max_new_tokens=16, sampling=greedy)
        assert [one.token_ids for one in results] == [one.token_ids for one in expected]
