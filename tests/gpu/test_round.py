"""What only an accelerator can show: run with `pytest -m gpu tests/gpu`."""

import pytest
import torch

from polydraft.drafters import ModelTree
from polydraft.engine import Decoder
from polydraft.models import FAMILIES, TabularModel
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]


def perturbed(name: str, device: str) -> HFModel:
    model = FAMILIES.get(name).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return HFModel(model.to(device))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_greedy_text_equals_hugging_face_generate(name: str) -> None:
    model = FAMILIES.get(name).build().to("cuda")
    decoder = Decoder(HFModel(model), ModelTree(perturbed(name, "cuda"), parse_tree("4x2x1")))
    results = decoder.generate(PROMPTS, max_new_tokens=24, sampling=SamplingParams(temperature=0))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_never_waits_for_the_device(name: str, temperature: float) -> None:
    decoder = Decoder(HFModel(FAMILIES.get(name).build().to("cuda")), ModelTree(perturbed(name, "cuda"), parse_tree("4x2x1")))
    params = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, repetition_penalty=1.2)
    stream = decoder.stream(PROMPTS, sampling=params, max_new_tokens=40, seed=0)
    next(stream)  # warm-up: tables and libraries
    run = stream._run
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            run._round(run._session)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_same_seed_gives_the_same_text_on_both_devices() -> None:
    texts = []
    for device in ("cpu", "cuda"):
        table = TabularModel.random(32, 2, seed=0)
        other = TabularModel.random(32, 2, seed=1)
        target = TabularModel(table._logits_XV.to(device).reshape(32, 32, 32))
        blend = table.mixed_with(other, 0.7)
        draft = TabularModel(blend._logits_XV.to(device).reshape(32, 32, 32))
        decoder = Decoder(target, ModelTree(draft, parse_tree("3x2x1")))
        texts.append([result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=60, seed=7)])
    assert texts[0] == texts[1]
