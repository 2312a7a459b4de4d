"""Large shapes on a GPU: built there, in seconds, with the logits of the small model."""

import resource
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.models.hf import HFModel
from polydraft.models.inflated import SHAPES, InflatedModel, inflate
from polydraft.trees import causal_block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = "cuda"
TOKENS = torch.arange(7, 7 + 24 * 90, 90)[None]


def small(dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of the bundled one's shape, with norms that are not all ones."""
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=4096, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.to(DEVICE, dtype)


@pytest.mark.parametrize("shape", list(SHAPES))
@torch.no_grad()
def test_every_shape_has_the_small_models_logits(shape: str) -> None:
    """As exact in bfloat16 as the small model is in it."""
    exact = small(torch.float32)(TOKENS.to(DEVICE)).logits
    rounded = small(torch.bfloat16)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    big = inflate(rounded, SHAPES.get(shape))
    logits = big(TOKENS.to(DEVICE)).logits.float()
    assert time.perf_counter() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6, "kilobytes: nothing large on the host"
    noise = (rounded(TOKENS.to(DEVICE)).logits.float() - exact).square().mean().sqrt()
    assert (logits - exact).square().mean().sqrt() < 2.5 * noise < 0.5 * exact.std()


@torch.no_grad()
def test_passes_of_the_engine_in_float32() -> None:
    source = HFModel(small(torch.float32))
    target = InflatedModel(source, "1b")
    logits = []
    for model in (source, target):
        model.tap((7, 15, 22))
        context = model.start(1, 64)
        context.prefill([TOKENS[0].tolist()])
        features = context.extend(TOKENS[:, :5].to(DEVICE), causal_block(1, 5, model.device))
        assert features.shape == (1, 5, 4 * 576)
        logits.append((model.head(features), features))
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
