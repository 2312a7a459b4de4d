"""Adapters: the text is that of the model with the adapter that is switched on now, whatever was switched on before."""

import os
from pathlib import Path

import pytest
import torch

import polydraft
from covering import covering
from families import FAMILIES
from polydraft.backends.native import kernels
from polydraft.errors import UsageError
from polydraft.hf_generate import Speculate
from polydraft.models import adapters
from polydraft.models.hf import HFModel
from polydraft.models.quantised import Int8Linear
from polydraft.sampling import SamplingParams

GREEDY = {"sampling": SamplingParams(temperature=0), "max_new_tokens": 12}
PROMPT = [9, 30, 44, 12, 71, 8, 25]
ADAPTED = ("q_proj", "down_proj")
SWITCHES = [
    {"active_adapters": ["two"]},
    {"disable_adapters": True},
    {"disable_adapters": False, "active_adapters": ["one"]},
    {"scaling": {"one": 2.0}},
]


class Lora(torch.nn.Module):
    """A layer with two adapters that can be switched, as PEFT's are."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters, self.merged_adapters = base, ["one"], False, []
        self.scaling = {"one": 1.0, "two": 1.0}
        shape = base.weight.shape
        self.deltas = torch.nn.ParameterDict({name: torch.nn.Parameter(0.2 * torch.randn(shape)) for name in self.scaling})

    def forward(self, input_XF: torch.Tensor) -> torch.Tensor:
        output_XG = self.base_layer(input_XF)
        if not self.disable_adapters:
            for name in self.active_adapters:
                output_XG = output_XG + self.scaling[name] * torch.nn.functional.linear(input_XF, self.deltas[name])
        return output_XG


def built(name="llama"):
    return FAMILIES.get(name).build()


def put_on(model):
    """Put adapters on a model, as PEFT does: in the place of its layers."""
    torch.manual_seed(7)
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, ADAPTED[0]), (layer.mlp, ADAPTED[1])):
            setattr(part, name, Lora(getattr(part, name)))
    model.peft_config = {"one": None, "two": None}
    return model.eval()


def take_off(model):
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, ADAPTED[0]), (layer.mlp, ADAPTED[1])):
            setattr(part, name, getattr(part, name).base_layer)
    del model.peft_config


def switch(model, **state):
    for part in model.modules():
        if isinstance(part, Lora):
            part.__dict__.update(state)


def generated(model):
    """What `generate` says."""
    tokens_BT = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(tokens_BT), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens_BT, max_new_tokens=12, **options)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("tree", "keep"), covering(["none", "3x2x1", "dynamic:8"], [False, True]))
def test_switching_changes_the_text_and_nothing_is_left_of_the_other(tree, keep):
    model = put_on(built())
    decoder = polydraft.load(model, draft="none" if tree == "none" else built(), tree=tree)
    assert decoder.target.adapted and decoder.target.lean is None and decoder.target.fast is None
    texts = []
    for state in ({}, *SWITCHES):
        switch(model, **state)
        texts.append(decoder.generate(PROMPT, keep=keep, **GREEDY).token_ids)
        assert texts[-1] == generated(model)
    assert texts[0] == texts[3] and len(set(map(tuple, texts))) == 4


@pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
@pytest.mark.parametrize(("tree", "keep"), covering(["3x2x1", "dynamic:8:4:fixed"], [True, False]))
def test_a_copy_goes_on_with_the_adapter_that_it_was_made_with_and_the_text_does_not(tree, keep):
    model = put_on(built())
    decoder = polydraft.load(model, "int8", tree=tree)
    first = decoder.generate(PROMPT, keep=keep, **GREEDY)
    assert first.token_ids == generated(model) and first.stats.tokens_per_pass > 2
    for state in SWITCHES:
        switch(model, **state)
        found = decoder.generate(PROMPT, keep=keep, **GREEDY)
        assert found.token_ids == generated(model)
        if state.get("active_adapters") == ["one"]:  # as when it was copied
            assert found.token_ids == first.token_ids and found.stats.passes == first.stats.passes
    copied = [part for part in decoder.drafter.model.hf_model.modules() if isinstance(part, Lora)]
    assert copied and all(part.active_adapters == ["one"] and part.scaling["one"] == 1.0 for part in copied)


@pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
def test_a_copy_from_before_an_adapter_was_put_on_drafts_for_the_model_with_it():
    model = built()
    decoder = polydraft.load(model, "int8", tree="3x2x1")
    changes = [(lambda model: None), put_on, (lambda model: switch(model, active_adapters=["two"])), take_off]
    for change in changes:
        change(model)
        assert decoder.generate(PROMPT, keep=True, **GREEDY).token_ids == generated(model)


def test_weights_that_change_in_place_are_read_anew():
    model = built()
    decoder = polydraft.load(model, draft="none")
    first = decoder.generate(PROMPT, keep=True, **GREEDY).token_ids
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    assert decoder.generate(PROMPT, keep=True, **GREEDY).token_ids == generated(model) != first


def test_an_adapter_may_be_put_on_and_taken_off_after_loading():
    model = built()
    decoder = polydraft.load(model, draft=built(), tree="2x1")
    plain = generated(model)
    lean = decoder.target.lean
    for adapted in (False, True, False):
        if adapted:
            put_on(model)
        elif decoder.target.adapted:
            take_off(model)
        assert decoder.generate(PROMPT, keep=True, **GREEDY).token_ids == generated(model)
        assert (decoder.target.lean is None) == adapted == decoder.target.adapted
    assert lean is not None and generated(model) == plain


def test_one_in_training_mode_is_refused():
    model = built()
    decoder = polydraft.load(model, draft="none")
    put_on(model).model.layers[0].self_attn.q_proj.train()
    with pytest.raises(UsageError, match=r"training mode.*model.eval\(\)"):
        decoder.generate(PROMPT, **GREEDY)


def test_captured_rounds_belong_to_the_adapter_that_they_were_captured_with(caches):
    model = put_on(built())
    decoder = polydraft.load(model, draft=built(), tree="2x1")
    for state in ({}, {"active_adapters": ["two"]}, {"active_adapters": ["one"]}):
        switch(model, **state)
        assert decoder.generate(PROMPT, **GREEDY).token_ids == generated(model)
    assert len(caches) == 2 and all(cache.replays for cache in caches), "the third call finds the first one's captures again"


def test_speculate_follows_adapters_too():
    model, custom = put_on(built()), Speculate(draft=built(), tree="3x2x1")
    inputs = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}
    for state in ({}, {"active_adapters": ["two"]}, {"disable_adapters": True}):
        switch(model, **state)
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        output = model.generate(**inputs, custom_generate=custom, **options)
        assert output[0, len(PROMPT) :].tolist() == generated(model)


@pytest.mark.skipif(adapters.importlib.util.find_spec("peft") is not None, reason="peft is installed")
def test_without_peft_an_adapter_is_refused_in_one_line(tiny, invoke):
    code, out, err = invoke("generate", "Hi", "--target", tiny, "--adapter", "org/adapter", "--max-new-tokens", "4")
    assert code == 2 and not out
    assert err.splitlines()[-1].endswith(
        "adapter 'org/adapter' needs the package peft; get it with: pip install 'polydraft[adapters]'"
    )


# With PEFT itself.


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def saved(peft, folder, targets=ADAPTED, base="tiny", **options):
    """Train nothing, save an adapter: of random weights, for a model of these sizes."""
    model = FAMILIES.get("llama").build(**options)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=32, target_modules=list(targets)))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return str(folder)


def sizes(folder):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return {"vocab_size": config.vocab_size, "eos_token_id": config.eos_token_id, "bos_token_id": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_adapter_by_name_is_merged(dtype, peft, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    if dtype == "int8" and kernels() is None:
        pytest.skip("there are no native kernels here")
    folder = Path(saved(peft, tmp_path, **sizes(tiny)))
    decoder = polydraft.load(tiny, "early-exit:2", adapter=folder, dtype=dtype, device="cpu", tree="2x1")
    assert not decoder.target.adapted and (decoder.target.fast is None) == (kernels() is None)
    if dtype == "int8":
        assert isinstance(decoder.target.hf_model.lm_head, Int8Linear)
        return
    number_type = getattr(torch, dtype)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=number_type), folder)
    logits = [one(torch.tensor([PROMPT])).logits for one in (theirs, decoder.target.hf_model)]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-4 if dtype == "float32" else 0.5)
    if dtype == "float32":
        assert decoder.generate(PROMPT, **GREEDY).token_ids == generated(theirs)
        assert decoder.generate(PROMPT, **GREEDY).token_ids != polydraft.load(tiny, "none").generate(PROMPT, **GREEDY).token_ids


@pytest.mark.parametrize("kind", ["PeftModel", "transformers"])
def test_models_that_carry_one(kind, peft, tmp_path):
    folder, model = saved(peft, tmp_path), built()
    if kind == "PeftModel":
        model = peft.PeftModel.from_pretrained(model, folder)
    else:
        model.load_adapter(folder)
    decoder = polydraft.load(model, draft=built(), tree="3x2x1")
    on = decoder.generate(PROMPT, keep=True, **GREEDY).token_ids
    assert on == generated(model)
    if kind == "PeftModel":
        with model.disable_adapter():
            off = decoder.generate(PROMPT, keep=True, **GREEDY).token_ids
        merged = model.merge_and_unload()
        assert decoder.generate(PROMPT, keep=True, **GREEDY).token_ids == generated(merged) == on
        assert decoder.target.lean is not None
    else:
        model.disable_adapters()
        off = decoder.generate(PROMPT, keep=True, **GREEDY).token_ids
    assert off == generated(built()) != on


def test_generate_of_a_peft_model_takes_speculate(peft, tmp_path):
    model = peft.PeftModel.from_pretrained(built(), saved(peft, tmp_path))
    inputs = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    output = model.generate(**inputs, custom_generate=Speculate(draft=built(), tree="3x2x1"), **options)
    assert output[0, len(PROMPT) :].tolist() == generated(model)


MISFITS = {
    "deeper": ({"num_hidden_layers": 4}, "tensors are missing or unexpected, such as .*layers.3"),
    "shallower": ({"num_hidden_layers": 2}, "tensors are missing or unexpected, such as .*layers.2"),
    "wider": ({"hidden_size": 64}, "its tensors have other shapes"),
    "of other layers": ({"targets": ["query_key_value"]}, "query_key_value.* not found"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_adapter_of_another_model_is_refused_in_one_line(case, peft, tiny, tmp_path):
    options, says = MISFITS[case]
    folder = saved(peft, tmp_path, **{**sizes(tiny), **{key: value for key, value in options.items() if key != "targets"}})
    if "targets" in options:
        config = tmp_path / "adapter_config.json"
        config.write_text(config.read_text().replace("down_proj", "query_key_value").replace("q_proj", "query_key_value"))
    with pytest.raises(UsageError, match=f"does not fit target .*{says}") as caught:
        polydraft.load(tiny, "none", adapter=folder)
    assert "\n" not in str(caught.value)


def test_one_for_a_model_of_another_name_is_told_of(peft, tiny, tmp_path, caplog):
    polydraft.load(tiny, "none", adapter=saved(peft, tmp_path, base="org/large", **sizes(tiny)))
    assert "was trained on org/large" in caplog.text


def test_what_is_no_adapter_is_refused(peft, tiny, tmp_path):
    for name, says in ((str(tmp_path), "no adapter_config.json"), ("/no/such", "no such folder"), ("org/none", "cannot load")):
        with pytest.raises(UsageError, match=says) as caught:
            polydraft.load(tiny, "none", adapter=name)
        assert "\n" not in str(caught.value)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot load adapter"):
        polydraft.load(tiny, "none", adapter=os.fspath(tmp_path))


def test_prompts_that_are_learned_are_refused(peft):
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(UsageError, match="of kind PROMPT_TUNING, puts vectors"):
        polydraft.load(peft.get_peft_model(built(), config).eval())


def test_the_command_line_takes_one(peft, tiny, tmp_path, invoke):
    folder = saved(peft, tmp_path, **sizes(tiny))
    common = ("generate", "Hi", "--target", tiny, "--draft", "early-exit:2", "--max-new-tokens", "8", "--raw")
    texts = [invoke(*common, *more)[:2] for more in ((), ("--adapter", folder))]
    assert [code for code, _ in texts] == [0, 0] and texts[0][1] != texts[1][1]


def test_one_on_quantised_weights_stays_apart(peft, tiny, tmp_path):
    """They cannot take it in without being rounded again."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    scheme = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, quantization_config=scheme)
    target = HFModel(adapters.with_adapter(model, saved(peft, tmp_path, **sizes(tiny)), "tiny"))
    assert target.adapted and target.quantised_by == "bitsandbytes"
    decoder = polydraft.load(target.hf_model, draft=tiny, tree="2x1")
    assert decoder.generate(PROMPT, **GREEDY).token_ids == generated(target.hf_model)
