"""Layers of several shapes, sparse and chunked attention, models that count positions themselves: texts as of `generate`."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from exactness.test_admission import open_engine, sequence
from models.recurrent_cases import noisy
from polydraft import Speculate
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.cache import SpreadCache
from polydraft.models.hf import HFModel
from polydraft.models.twin import sharpen, twin_config
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

GREEDY = SamplingParams(temperature=0)
PROMPTS = [torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 20, 3)]
COUNTING = {
    "bart": {}, "bloom": {}, "mpt": {}, "falcon": {"alibi": True}, "roformer": {"is_decoder": True}, "pegasus": {}, "mvp": {},
    "whisper": {}, "blenderbot": {}, "trocr": {},
}  # fmt: skip
"""Types that count positions themselves."""
SHAPES = {"gemma3n_text": {}, "gemma4_text": {}, "mimo_v2_flash": {}, "hrm_text": {}}
"""Types whose layers keep keys of several shapes, share them, or are more in a cache than in the model."""
QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "eos_token_id": 2,
}  # fmt: skip
SPARSE = {"deepseek_v32": {}, "glm_moe_dsa": {}, "axk2": {}, "hy_v4": {}, "qwen4_exp_text": QSA}
CHUNKED = {"llama4_text": {"num_hidden_layers": 4}}  # the last one sees everything
MIXERS_IN_ATTENTION = {"zaya": {}}
QUICK = {"bart", "bloom", "deepseek_v32", "llama4_text"}
"""One of each kind that no other default test compares with `generate`: gemma4_text comes below."""


def build(model_type, auto=AutoModelForCausalLM, **options):
    config = twin_config(AutoConfig.for_model(model_type, **options))
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config).float().eval()
        sharpen(model)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def plain(model, prompt, count=16):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def case(name, options):
    return pytest.param(name, options, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [case(*one) for cases in (COUNTING, SHAPES, SPARSE, CHUNKED, MIXERS_IN_ATTENTION) for one in cases.items()],
)
def test_texts_are_those_of_generate(model_type, options):
    model = build(model_type, **options)
    expected = [plain(model, prompt) for prompt in PROMPTS]
    decoder = Decoder(HFModel(model), TreeDrafter(HFModel(noisy(model), trusted=True), parse_tree("3x2x1")))
    for rows in ([0], [0, 1, 2]):
        results = decoder.generate([PROMPTS[row] for row in rows], sampling=GREEDY, max_new_tokens=16)
        assert [result.token_ids for result in results] == [expected[row] for row in rows]
    assert results[0].stats.tokens_per_pass > 1


@pytest.mark.parametrize("model_type", ["bart", pytest.param("bloom", marks=pytest.mark.slow)])
def test_the_model_counts_as_ever_when_no_pass_of_ours_runs(model_type):
    model = build(model_type)
    before = [list(module.__dict__) for module in model.modules()]
    expected = plain(model, PROMPTS[1])
    Decoder(HFModel(model)).generate(PROMPTS[0], sampling=GREEDY, max_new_tokens=3)
    assert [list(module.__dict__) for module in model.modules()] == before
    assert plain(model, PROMPTS[1]) == expected


def test_rows_come_and_go_where_layers_have_several_shapes():
    """More texts than rows, so that rows are resized, cleared and shared out."""
    model = build("gemma4_text")
    target = HFModel(model)
    assert isinstance(target.start(1, 8).cache, SpreadCache)
    decoder = Decoder(target, TreeDrafter(HFModel(noisy(model), trusted=True), parse_tree("2x1")))
    prompts = [PROMPTS[number % 3][: 2 + number] for number in range(7)]
    results = decoder.generate(prompts, sampling=GREEDY, max_new_tokens=9)
    assert [result.token_ids for result in results] == [plain(model, prompt, 9) for prompt in prompts]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gemma4_text" else pytest.mark.slow)
        for name in SHAPES | SPARSE
        if name != "qwen4_exp_text"  # which has recurrent layers, too
    ],
)
def test_beginnings_are_shared_whatever_the_layers_keep(name, monkeypatch):
    for module in ("models.prefixes", "engine.slots"):
        monkeypatch.setattr(f"polydraft.{module}.BLOCK", 8)
    model = build(name, **(SHAPES | SPARSE)[name])
    decoder = Decoder(HFModel(model), TreeDrafter(HFModel(noisy(model), trusted=True), parse_tree("2x1")))
    engine, stem = open_engine(decoder, slots=2, reuse=True), [5 + 7 * place % 80 for place in range(30)]
    texts = [sequence(decoder, row, [*stem, 9, 9 + row], GREEDY, limit=9, seed=row) for row in range(3)]
    for one in texts:
        engine.add(one)
        while not engine.done:
            engine.step()
    assert [one.cached for one in texts] == [0, 31, 31]
    assert [one.new_tokens for one in texts] == [plain(model, list(one.prompt), 9) for one in texts]


@pytest.mark.parametrize("model_type", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_multimodal_model_reads_text_alone(model_type):
    """Its processor says that no token is an image, and `generate` hands it positions in several dimensions."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    tower = {"embed_dim": 64}  # never passed, and wide
    options = {"text_config": {"rope_parameters": rope}, "vision_config": tower} if model_type == "qwen2_vl" else {}
    model = build(model_type, auto=AutoModelForImageTextToText, **options)
    ids = torch.tensor([PROMPTS[0]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    # `generate` fails by itself if it is told that there are no images, so only the kinds of tokens are named.
    inputs["mm_token_type_ids" if model_type == "qwen2_vl" else "token_type_ids"] = torch.zeros_like(ids)
    got = model.generate(**inputs, custom_generate=Speculate(draft=noisy(model), tree="2x1"), **options)
    assert got.tolist() == expected.tolist()
