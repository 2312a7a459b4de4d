"""Models that the caller has loaded: `load` and `Speculate` take them as they are, or say why not."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import polydraft
from families import FAMILIES
from polydraft.errors import UsageError
from polydraft.hf_generate import Speculate
from polydraft.models.hf import HFModel
from polydraft.models.int8_copy import Int8Copy
from polydraft.options import PairOptions

GREEDY = {"sampling": polydraft.SamplingParams(temperature=0), "max_new_tokens": 12}
PROMPT = "It is said that"


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def test_texts_are_those_of_the_same_model_by_name(model, tokenizer, tiny):
    before = copy.deepcopy(model.state_dict())
    expected = polydraft.load(tiny, "early-exit:2", tree="2x1", dtype="float32", device="cpu").generate(PROMPT, **GREEDY)
    drafts = ("none", "early-exit:2", tiny, AutoModelForCausalLM.from_pretrained(tiny), HFModel(FAMILIES.get("llama").build()))
    for draft in drafts[:-1]:
        decoder = polydraft.load(model, draft, tokenizer=tokenizer, tree="none" if draft == "none" else "2x1")
        assert decoder.generate(PROMPT, **GREEDY).text == expected.text
        assert decoder.eos_token_ids == (tokenizer.eos_token_id,) and decoder.defaults is not None
        sampled = [one.generate(PROMPT, max_new_tokens=12, seed=3).text for one in (decoder, decoder.replace())]
        assert sampled[0] == sampled[1]
    with pytest.raises(UsageError, match="96 tokens but the target 257"):
        polydraft.load(model, drafts[-1])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()) and not model.training


def test_without_a_tokenizer_prompts_are_token_ids(model, tokenizer):
    decoder = polydraft.load(model, "early-exit:2", tree="2x1")
    ids = tokenizer(PROMPT)["input_ids"]
    text = polydraft.load(model, "none", tokenizer=tokenizer).generate(PROMPT, **GREEDY)
    assert decoder.generate(ids, **GREEDY).token_ids == text.token_ids
    with pytest.raises(UsageError, match=r"text prompts need a tokenizer; pass token ids, or tokenizer=\.\.\."):
        decoder.generate(PROMPT)


def test_the_default_is_what_a_name_has_without_a_draft(model, tokenizer, tiny):
    decoder, named = polydraft.load(model, tokenizer=tokenizer), polydraft.load(tiny, dtype="float32", device="cpu")
    assert type(decoder.drafter.model) is type(named.drafter.model) is Int8Copy
    assert decoder.generate(PROMPT, **GREEDY).text == polydraft.load(tiny, "none").generate(PROMPT, **GREEDY).text
    assert polydraft.load(model, tokenizer=tokenizer, drafter="lookup").generate(PROMPT, **GREEDY).text


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config).eval()


def in_part(model):
    model.model.layers[1].mlp.train()
    return model


REFUSED = {
    "meta": (on_meta, {}, "the target is on the meta device, without weights; load it"),
    "training": (lambda model: model.train(), {}, r"target is in training mode.*model\.eval\(\)"),
    "training in part": (in_part, {}, r"target is in training mode.*model\.eval\(\)"),
    "body alone": (lambda model: model.model, {}, "polydraft needs a causal language model"),
    "no model": (lambda model: 3, {}, "target is an object of type int; allowed: a name, a folder, a model"),
    "a layer": (lambda model: torch.nn.Linear(2, 2), {}, "target is an object of type Linear; allowed: a name"),
    "dtype": (None, {"dtype": "bfloat16"}, "in float32 already, not in bfloat16; pass its name instead, or leave out dtype"),
    "int8": (None, {"dtype": "int8"}, "in float32 already, not in int8; pass its name"),
    "device": (None, {"device": "cuda:7"}, "not available|on cpu already"),
    "device map": (None, {"device_map": "auto"}, "loaded already; leave out device_map='auto'"),
    "adapter": (
        None,
        {"adapter": "a/b"},
        "adapter='a/b' works only with a target given by name; apply it to your model with PeftModel",
    ),
    "tokenizer by name": (None, {"tokenizer": "gpt2"}, r"tokenizer is an object of type str; .*AutoTokenizer.from_pretrained"),
    "draft": (None, {"draft": 3}, "draft is an object of type int; allowed"),
    "meta draft": (None, {"draft": on_meta}, "the draft is on the meta device"),
    "drafter": (None, {"draft": lambda model: model, "drafter": "lookup"}, "uses no draft"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(case, model):
    change, options, says = REFUSED[case]
    options = {key: value(model) if callable(value) else value for key, value in options.items()}
    with pytest.raises(UsageError, match=says) as caught:
        polydraft.load(model if change is None else change(model), **options)
    assert "\n" not in str(caught.value)


def test_a_compiled_model_runs_uncompiled(model, caplog):
    calls = []
    compiled = torch.compile(model, backend=lambda module, inputs: calls.append(module) or module.forward)
    plain, drafted = polydraft.load(model, "none"), polydraft.load(compiled, compiled)
    with caplog.at_level("INFO"):
        polydraft.load(compiled, "none")
    assert "the target is compiled by torch.compile" in caplog.text
    assert drafted.generate([5, 6], **GREEDY).token_ids == plain.generate([5, 6], **GREEDY).token_ids and not calls


def test_tokenizers_of_others_are_refused(model, other_vocabulary, tiny):
    with pytest.raises(UsageError, match=r"the tokenizer has 260 tokens but target .* 257; pass the target's own"):
        polydraft.load(model, tokenizer=AutoTokenizer.from_pretrained(other_vocabulary))
    with pytest.raises(UsageError, match="tokenizer is for a loaded target"):
        polydraft.load(tiny, tokenizer=AutoTokenizer.from_pretrained(tiny))


def test_a_model_that_was_converted_or_trains_is_refused(model):
    decoder = polydraft.load(model, "none")
    model.train()
    with pytest.raises(UsageError, match="training mode"):
        decoder.generate([5, 6], **GREEDY)
    model.eval().to(torch.bfloat16)
    with pytest.raises(UsageError, match="was moved or converted; make a new decoder"):
        decoder.generate([5, 6], **GREEDY)


def test_commands_take_names_only():
    with pytest.raises(
        UsageError, match=r"target is an object of type Linear, not a name; .*polydraft.load takes loaded models"
    ):
        PairOptions(torch.nn.Linear(2, 2))


def test_speculate_takes_a_draft_by_name(model, tokenizer, tiny, renumbered, unlike_vocabulary, tmp_path):
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    for draft in (tiny, renumbered, "early-exit:2", "none", "auto"):
        custom = Speculate(draft, tree="2x1")
        assert torch.equal(model.generate(**inputs, **options, custom_generate=custom), plain)
        assert (custom.stats[0].tokens_per_pass > 1) == (draft in (tiny, renumbered, "early-exit:2"))
    with pytest.raises(UsageError, match="different vocabularies"):
        model.generate(**inputs, **options, custom_generate=Speculate(draft=unlike_vocabulary))


def test_a_named_draft_is_made_for_the_model_at_hand(model, tokenizer, tiny):
    """The first layers of one model are not those of another."""
    inputs, custom = tokenizer(PROMPT, return_tensors="pt"), Speculate("early-exit:2", tree="2x1")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    other = FAMILIES.get("llama").build(seed=4, vocab_size=model.config.vocab_size, num_hidden_layers=4)
    for one in (model, other, model):
        assert torch.equal(one.generate(**inputs, **options, custom_generate=custom), one.generate(**inputs, **options))
        assert custom._draft is not None and custom._draft.hf_model.model.embed_tokens is one.model.embed_tokens


def test_a_pipeline_takes_speculate(model, tokenizer):
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    custom = Speculate("early-exit:2", tree="2x1")
    assert writer(PROMPT, **options, custom_generate=custom) == writer(PROMPT, **options) and custom.stats


def _with_a_forward_of_its_own(layer):
    usual = layer.forward
    layer.forward = lambda hidden: -2 * usual(hidden)


def _with_a_class_of_its_own(layer):
    usual = type(layer)
    layer.__class__ = type("Steered", (usual,), {"forward": lambda self, hidden: -2 * usual.forward(self, hidden)})


def _with_a_hook(layer):
    layer.register_forward_hook(lambda layer, inputs, output: -2 * output)


@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "self_attn.o_proj"])
@pytest.mark.parametrize("change", [_with_a_forward_of_its_own, _with_a_class_of_its_own, _with_a_hook])
def test_layers_that_their_owner_has_changed_do_what_they_do_now(model, tokenizer, part, change):
    """Code that bypasses a layer knows nothing of the change: steering and patched attention would be lost without a word."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    usual, size = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist(), ids.shape[1]
    for layer in model.model.layers:
        change(layer.get_submodule(part))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, size:].tolist()
    decoder = polydraft.load(model, "early-exit:2", tokenizer=tokenizer, tree="2x1")
    assert decoder.generate(PROMPT, **GREEDY).token_ids == expected != usual


def test_changes_between_two_texts_are_noticed(model, tokenizer):
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    decoder, speculate = polydraft.load(model, "early-exit:2", tokenizer=tokenizer, tree="2x1"), Speculate(draft="none")

    def texts():
        options = {"max_new_tokens": 12, "do_sample": False}
        found = [model.generate(ids, **options), model.generate(ids, custom_generate=speculate, **options)]
        return [decoder.generate(PROMPT, **GREEDY).token_ids, *(one[0, ids.shape[1] :].tolist() for one in found)]

    usual = texts()
    hook = model.model.layers[1].mlp.register_forward_hook(lambda layer, inputs, output: -2 * output)
    hooked = texts()
    hook.remove()
    assert texts() == usual != hooked
    assert all(one == usual[0] for one in usual) and all(one == hooked[0] for one in hooked)
    assert decoder.target.lean is not None, "without changes they are bypassed again"
