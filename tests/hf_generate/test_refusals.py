"""What `Speculate` cannot do is refused by name."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from families import FAMILIES
from polydraft.errors import UsageError
from polydraft.hf_generate import Speculate

from .setups import draft, single, speculate, target

REFUSED = {
    "num_beams": {"num_beams": 2},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "assistant_model": {"assistant_model": draft},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "guidance_scale": {"guidance_scale": 1.5},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "cache_implementation": {"cache_implementation": "static"},
    "use_cache": {"use_cache": False},
    "past_key_values": {"past_key_values": DynamicCache},
    "synced_gpus": {"synced_gpus": True},
    "SynthIDText": {
        "watermarking_config": lambda: SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
        "do_sample": True,
    },
    "position_ids": {"position_ids": lambda: torch.arange(3, 10)[None]},
    "constraints": {"constraints": lambda: ["anything"]},
    "force_words_ids": {"force_words_ids": [[4]]},
}


@pytest.mark.parametrize(("name", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name, options):
    made = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(UsageError, match=name) as caught:
        target().generate(**single, max_new_tokens=4, pad_token_id=0, custom_generate=speculate(), **made)
    assert "\n" not in str(caught.value)


def test_embeddings_are_refused():
    embeddings = target().get_input_embeddings()(single["input_ids"])
    with pytest.raises(UsageError, match="inputs_embeds"):
        target().generate(inputs_embeds=embeddings, max_new_tokens=4, pad_token_id=0, custom_generate=speculate())


def test_an_encoder_decoder_is_refused():
    options = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**options, decoder_start_token_id=0)).eval()
    with pytest.raises(UsageError, match="encoder-decoder"):
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=3, custom_generate=Speculate())


def test_unknown_model_inputs_are_refused():
    with pytest.raises(UsageError, match="token_type_ids"):
        speculate()(target(), single["input_ids"], [], [], GenerationConfig(), token_type_ids=torch.zeros(1, 7))


def test_right_padding_is_refused():
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0]])
    with pytest.raises(UsageError, match="attention_mask"):
        target().generate(
            single["input_ids"], attention_mask=mask, pad_token_id=0, max_new_tokens=3, custom_generate=speculate()
        )


def test_an_empty_row_is_refused():
    inputs = {"input_ids": torch.tensor([[5, 6], [0, 0]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
    with pytest.raises(UsageError, match="empty prompt"):
        target().generate(**inputs, pad_token_id=0, max_new_tokens=3, custom_generate=speculate())


def test_training_mode_is_refused():
    model = FAMILIES.get("llama").build().train()
    with pytest.raises(UsageError, match=r"model\.eval\(\)"):
        model.generate(**single, pad_token_id=0, max_new_tokens=3, custom_generate=speculate())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "0x2"}, "tree width 0"),
        ({"scheme": "rrs"}, "unknown scheme 'rrs'"),
        ({"draft_temperature": -1.0}, "draft_temperature=-1.0"),
        ({"draft_temperature": float("nan")}, "draft_temperature=nan"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(options, message):
    with pytest.raises(UsageError, match=message):
        Speculate(draft=draft(), **options)


def nearly_full(length=124):
    """A batch of which one text is about to reach the end of a context of 128 tokens, and one is not."""
    ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :100] = mask[1, :100] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("length", [124, 140])
def test_texts_outgrow_the_context_as_those_of_generate_do(length):
    options = {**nearly_full(length), "do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
    plain = target().generate(**options)
    assert torch.equal(target().generate(**options, custom_generate=speculate()), plain)


class Listener:
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value)

    def end(self):
        pass


@pytest.mark.parametrize(
    ("name", "overrides", "room"),
    [("gpt2", {}, 4), ("opt", {}, 4), ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 4)],
)
def test_positions_that_end_are_refused_before_the_first_token(name, overrides, room):
    """Where `generate` looks positions up in a table, or bends them as a text grows, and no tree can follow."""
    model, listener = FAMILIES.get(name).build(**overrides), Listener()
    options = {"do_sample": False, "pad_token_id": 0, "custom_generate": Speculate()}
    one = {key: value[:1] for key, value in nearly_full().items()}
    with pytest.raises(UsageError, match=f"max_new_tokens to at most {room}") as caught:
        model.generate(**one, **options, max_new_tokens=room + 1, streamer=listener)
    assert "\n" not in str(caught.value)
    assert len(listener.heard) <= 1, "nothing but the prompt, which `generate` itself puts"
    model.generate(**one, **options, max_new_tokens=room)


def test_empty_inputs_that_generate_adds_by_itself_are_no_reason_to_refuse():
    """Multimodal classes hand on `mm_encoder_outputs={}` though no image was given."""
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tiny, "vocab_size": 96, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 7, "initializer_range": 0.35}
    config = Gemma3Config(text_config=text, vision_config={**tiny, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    options = {**single, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(**options)
    assert torch.equal(model.generate(**options, custom_generate=Speculate()), plain)


def test_wrappers_are_kept_between_calls():
    custom = Speculate(draft=draft())
    options = {"max_new_tokens": 3, "pad_token_id": 0, "custom_generate": custom}
    target().generate(**single, **options)
    kept = custom._target
    target().generate(**single, **options)
    assert custom._target is kept
    other = FAMILIES.get("llama").build(seed=1)
    plain = other.generate(**single, max_new_tokens=3, pad_token_id=0)
    assert torch.equal(other.generate(**single, **options), plain), "another model is not mistaken for it"
    for parameter in other.parameters():
        parameter.data = parameter.data.clone().mul_(0.9)
    plain = other.generate(**single, max_new_tokens=3, pad_token_id=0)
    assert torch.equal(other.generate(**single, **options), plain), "nor the model before its weights were exchanged"


@pytest.mark.parametrize(
    ("given", "says"),
    [("org/small", "'org/small'.*not found"), ("early-exit:9", "allowed: 1 to 2"), (3, "draft is an object.*int")],
)
def test_a_draft_that_is_no_model_is_refused_by_name(given, says):
    with pytest.raises(UsageError, match=says) as caught:
        target().generate(**single, max_new_tokens=3, pad_token_id=0, custom_generate=Speculate(draft=given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [64, 400])
def test_a_draft_with_other_tokens_is_refused(size):
    other = FAMILIES.get("llama").build(vocab_size=size)
    with pytest.raises(UsageError, match=f"{size} tokens.*{target().config.vocab_size}"):
        target().generate(**single, max_new_tokens=4, pad_token_id=0, custom_generate=Speculate(draft=other))
