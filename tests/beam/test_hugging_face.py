"""Beam search is Hugging Face's, text by text and score by score, in every family; beam sampling has its distribution."""

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch

from covering import keeping
from families import FAMILIES
from polydraft.beam import BeamDecoder
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

from .reference import beam_sampling_distribution

FALSE_ALARM = 1e-4
PADDING = 1
# Ends that are likely, unlikely, many; every rule of stopping; penalties for long and for short texts.
SETTINGS = [
    {"ends": (2,), "length_penalty": 1.0, "early_stopping": False},
    {"ends": (2, 5, 7, 9, 11, 13, 15, 17), "length_penalty": 0.5, "early_stopping": True},
    {"ends": (2, 5, 30, 31, 32, 33), "length_penalty": 2.0, "early_stopping": "never"},
    {"ends": (5, 6, 7, 8, 9, 10, 20, 21, 22), "length_penalty": -0.5, "early_stopping": False},
]


@cache
def models(name):
    """A tiny model and the same with noise in its weights: a draft that agrees in part."""
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode(False), torch.no_grad():
        model = FAMILIES.get(name).build()
        noisy = copy.deepcopy(model)
        for parameter in noisy.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return HFModel(model), HFModel(noisy)


def decoder(name, ends, with_draft):
    target, draft = models(name)
    return BeamDecoder(Decoder(target, TreeDrafter(draft, parse_tree("1")) if with_draft else None, eos_token_ids=ends))


def hugging_face(name, prompt, ends, tokens, beams, **options):
    ids = torch.tensor([prompt])
    output = models(name)[0].hf_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=PADDING,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist()


def assert_same(got, expected, scores):
    assert len(got.texts) == len(expected)
    for text, tokens, score in zip(got.texts, expected, scores, strict=True):
        assert text.token_ids == tokens[: len(text.token_ids)]
        assert set(tokens[len(text.token_ids) :]) <= {PADDING}
        assert text.score == pytest.approx(score, abs=2e-4)


# Every setting by default. Families differ in their passes, whose logits and texts are compared in tests/models.
@pytest.mark.parametrize("name", keeping(list(FAMILIES), *list(FAMILIES)[: len(SETTINGS)]))
def test_search_is_hugging_faces_in_every_family(name):
    prompt = [random.Random(3).randrange(3, 96) for _ in range(9)]
    setting = dict(SETTINGS[list(FAMILIES).index(name) % len(SETTINGS)])
    ends = setting.pop("ends")
    expected = hugging_face(name, prompt, ends, 12, 3, **setting)
    for with_draft in (False, True):
        got = decoder(name, ends, with_draft).search(
            prompt, beams=3, draft_depth=2, max_new_tokens=12, num_return_sequences=3, **setting
        )
        assert_same(got, *expected)


RULES = [(beams, number) for beams in (1, 4) for number in range(len(SETTINGS))]


@pytest.mark.parametrize(("beams", "number"), keeping(RULES, (1, 1), *RULES[len(SETTINGS) :]))
def test_search_is_hugging_faces_with_every_rule(beams, number):
    setting = dict(SETTINGS[number])
    ends = setting.pop("ends")
    prompt = [random.Random(8).randrange(3, 96) for _ in range(6)]
    expected = hugging_face("qwen3", prompt, ends, 18, beams, **setting) if beams > 1 else None
    plain, drafted = (
        decoder("qwen3", ends, with_draft).search(prompt, beams=beams, max_new_tokens=18, num_return_sequences=beams, **setting)
        for with_draft in (False, True)
    )
    if expected is not None:
        assert_same(plain, *expected)
    assert [text.token_ids for text in drafted.texts] == [text.token_ids for text in plain.texts]
    assert drafted.stats.passes < plain.stats.passes


def test_penalties_are_hugging_faces():
    prompt, ends = [7, 7, 9, 30, 31, 7], (2,)
    sampling = SamplingParams(temperature=0, repetition_penalty=1.4)
    expected = hugging_face("llama", prompt, ends, 12, 3, repetition_penalty=1.4)
    for with_draft in (False, True):
        got = decoder("llama", ends, with_draft).search(
            prompt, beams=3, max_new_tokens=12, num_return_sequences=3, sampling=sampling
        )
        assert_same(got, *expected)


def test_one_beam_is_greedy_decoding():
    target, _ = models("phi")
    prompt = [5, 9, 40, 41]
    greedy = Decoder(target).generate(prompt, max_new_tokens=20, sampling=SamplingParams(temperature=0))
    assert decoder("phi", (), True).search(prompt, beams=1, max_new_tokens=20).best.token_ids == greedy.token_ids


def truncated_rows(model, prompt, top_k, temperature):
    """Scores as Hugging Face's beams add them up: log-softmax, then temperature and top-k, not normed again."""

    @cache
    def rows(text):
        with torch.inference_mode():
            scores = model(torch.tensor([[*prompt, *text]])).logits[0, -1].log_softmax(-1) / temperature
        kept = scores >= scores.topk(top_k).values[-1]
        return torch.where(kept, scores, -torch.inf).double().numpy()

    return rows


def test_sampling_has_hugging_faces_distribution():
    """Both are held against the distribution by exhaustion: theirs shows that it is the right one, ours that we follow it."""
    prompt, beams, steps, samples = [5, 9, 40], 2, 2, 800
    target, _ = models("qwen3")
    distribution = beam_sampling_distribution(
        truncated_rows(target.hf_model, prompt, 4, 1.3), width=beams, steps=steps, draws="hf", ends=()
    )
    texts = {text: place for place, text in enumerate(distribution)}
    ids = torch.tensor([prompt] * samples)
    torch.manual_seed(0)
    output = target.hf_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=True,
        temperature=1.3,
        top_k=4,
        pad_token_id=0,
        early_stopping="never",
    )
    theirs = [tuple(map(tuple, both)) for both in output[:, len(prompt) :].view(samples, beams, steps).tolist()]
    sampling = SamplingParams(temperature=1.3, top_k=4)
    engine = decoder("qwen3", (), True)
    options = dict(beams=beams, draws="hf", draft_depth=1, early_stopping="never", num_return_sequences=beams)
    ours = [
        tuple(
            tuple(text.token_ids)
            for text in engine.sample(prompt, sampling=sampling, max_new_tokens=steps, seed=seed, **options).texts
        )
        for seed in range(100)
    ]
    for found in (theirs, ours):
        counts = np.zeros(len(distribution))
        for text in found:
            counts[texts[text]] += 1
        assert chi_square_p_value(counts, np.array(list(distribution.values()))) > FALSE_ALARM
