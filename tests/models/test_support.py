"""Models that cannot score trees are refused by name, in one line that says why."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

from polydraft.errors import UsageError
from polydraft.models.families import FULL, SLIDING, context_limit, layer_kinds, refuse_unsupported
from polydraft.models.hf import HFModel

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}


def build(model_type, auto=AutoModelForCausalLM, **options):
    return auto.from_config(AutoConfig.for_model(model_type, **options)).eval()


def fake(**options):
    """A model of which only the configuration exists."""
    defaults = {"model_type": "fake", "num_hidden_layers": 2, "_attn_implementation": "sdpa", "is_encoder_decoder": False}
    config = SimpleNamespace(**{**defaults, **options})
    config.get_text_config = lambda decoder: config
    return SimpleNamespace(config=config)


def refusal(model):
    with pytest.raises(UsageError) as caught:
        HFModel(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_recurrent_gemma_is_refused():
    model = build(
        "recurrent_gemma", **SMALL, num_attention_heads=2, intermediate_size=24, lru_width=16, attention_window_size=8
    )
    message = refusal(model)
    assert "'recurrent_gemma'" in message and "recurrent" in message and "in modules of its own" in message


def test_minimax_keeps_states_where_nobody_can_copy_them():
    message = refusal(build("minimax", **SMALL, **HEADS, num_local_experts=2))
    assert "'minimax'" in message and "recurrent" in message and "MiniMaxCache" in message


def test_an_encoder_decoder_is_refused():
    options = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    message = refusal(build("t5", AutoModelForSeq2SeqLM, vocab_size=32, **options))
    assert "'t5'" in message and "encoder-decoder" in message


def test_layers_that_keep_one_key_for_several_tokens_are_refused():
    message = refusal(fake(model_type="deepseek_v4", layer_types=["heavily_compressed_attention", SLIDING]))
    assert "'deepseek_v4'" in message and "one key per group" in message and "recurrent" not in message


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_without_tree_masks_is_refused(implementation):
    message = refusal(fake(_attn_implementation=implementation))
    assert implementation in message and "attn_implementation='sdpa'" in message


def test_eager_attention_is_welcome():
    refuse_unsupported(fake(_attn_implementation="eager"))


def test_layer_kinds_are_read_as_transformers_reads_them():
    assert layer_kinds(fake(layer_types=[FULL, SLIDING]).config) == [FULL, SLIDING]
    assert layer_kinds(fake(sliding_window=8).config) == [SLIDING, SLIDING]
    assert layer_kinds(fake(sliding_window=None).config) == [FULL, FULL]
    assert layer_kinds(fake().config) == [FULL, FULL]


def test_context_ends_where_rotary_frequencies_would_change():
    assert context_limit(fake(max_position_embeddings=64).config) == 64
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert context_limit(fake(max_position_embeddings=64, rope_parameters=rope).config) == 16
    assert context_limit(fake(max_position_embeddings=64, rope_parameters={"rope_type": "llama3"}).config) == 64


def test_context_ends_where_llama_4_would_scale_its_queries():
    scaled = {"attn_temperature_tuning": True, "floor_scale": 32, "max_position_embeddings": 64}
    assert context_limit(fake(**scaled, no_rope_layers=[1, 0]).config) == 31
    assert context_limit(fake(**scaled, no_rope_layers=[1, 1]).config) == 64


class StrangeConfig(LlamaConfig):
    model_type = "strange"


def strange(model_class):
    torch.manual_seed(0)
    return model_class(StrangeConfig(**SMALL, **HEADS, initializer_range=0.35)).eval()


class MaskDropper(LlamaForCausalLM):
    """Takes a mask and never looks at it; both ways in, since the output head may be split off."""

    config_class = StrangeConfig

    def __init__(self, config):
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda *args, attention_mask=None, **options: forward(*args, **options)


class WellBehaved(LlamaForCausalLM):
    config_class = StrangeConfig


def test_an_unknown_type_that_ignores_masks_is_found_out():
    message = refusal(strange(MaskDropper))
    assert "'strange'" in message and "tree masks" in message
    assert "docs/models.md" in message


def test_an_unknown_type_that_follows_masks_is_welcome():
    assert HFModel(strange(WellBehaved)).name == "strange"


class PositionDropper(LlamaForCausalLM):
    """Counts positions by itself, so nodes of one depth get different ones."""

    config_class = StrangeConfig

    def __init__(self, config):
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda *args, position_ids=None, **options: forward(*args, **options)


def test_an_unknown_type_that_ignores_positions_is_found_out():
    assert "'strange'" in refusal(strange(PositionDropper))
