"""A target, a noisy draft, and both ways to generate."""

import copy
from functools import cache

import torch

from families import FAMILIES
from polydraft.hf_generate import Speculate

PROMPTS = [[5, 17, 40, 8, 23, 61, 9], [33, 12, 70], [44, 45, 46, 47, 48]]


@cache
def target():
    return FAMILIES.get("llama").build()


@cache
def draft():
    """The target with noise in its weights."""
    model = copy.deepcopy(target())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


@cache
def speculate():
    return Speculate(draft=draft(), tree="3x2x1")


def padded(prompts=PROMPTS):
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def both(inputs, **options):
    """Generate plainly and with drafts; options given as functions are made anew for each."""
    results = []
    for custom in (None, speculate()):
        made = {name: value() if callable(value) else value for name, value in options.items()}
        settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, **made}
        results.append(target().generate(**inputs, custom_generate=custom, **settings))
    return results


def assert_same(inputs, **options):
    plain, fast = both(inputs, **options)
    assert fast.dtype == torch.long
    assert torch.equal(plain, fast)
    return fast


single, batch = padded(PROMPTS[:1]), padded()
