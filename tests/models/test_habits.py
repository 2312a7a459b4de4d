"""Models of unknown habits: what differs from plain passes is refused by name, what does not is welcome."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM

from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.twin import POSITIONS, WINDOW, sharpen, twin_config, twins
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

GREEDY = SamplingParams(temperature=0)
NOT_CAUSAL = [
    "bert", "roberta", "electra", "camembert", "ernie", "megatron-bert", "data2vec-text", "bert-generation", 
    "xlm-roberta", "big_bird", "rembert",
]  # fmt: skip
FAILING = ["blt", "cpmant", "xlm", "prophetnet", "openai-gpt"]
WELCOME = ["cohere2", "falcon", "gpt_bigcode", "gpt_oss", "olmo2", "stablelm", "granitemoe", "deepseek_v3", "gemma3_text"]


def build(model_type, **options):
    """A tiny model of a type's default configuration, with sharp random weights."""
    config = twin_config(AutoConfig.for_model(model_type, **options))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        sharpen(model)
    return model


def refusal(model):
    with pytest.raises(UsageError) as caught:
        HFModel(model)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(model.config.get_text_config(decoder=True).model_type) in message
    return message


@pytest.mark.parametrize(
    "model_type", [*NOT_CAUSAL[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in NOT_CAUSAL[3:])]
)
def test_an_encoder_with_a_language_head_is_refused(model_type):
    assert "not causal" in refusal(build(model_type))


@pytest.mark.parametrize("model_type", ["bert", "rembert"])  # the latter keeps its cache beside one for an encoder
def test_an_encoder_that_is_told_to_decode_is_welcome(model_type):
    model = HFModel(build(model_type, is_decoder=True))
    assert model.max_positions == POSITIONS
    prompts = [[5, 9, 2], [3, 3, 8, 1, 30, 4]]
    plain = Decoder(model).generate(prompts, sampling=GREEDY, max_new_tokens=8)
    drafted = Decoder(model, TreeDrafter(model, parse_tree("2x1"))).generate(prompts, sampling=GREEDY, max_new_tokens=8)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert drafted[0].stats.tokens_per_pass > 1.5


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma", "gemma2"])
def test_bidirectional_attention_is_refused(model_type):
    assert "use_bidirectional_attention" in refusal(build(model_type, use_bidirectional_attention=True))


def test_a_known_family_that_is_told_not_to_be_causal_is_refused():
    assert "is_causal=False" in refusal(FAMILIES.get("llama").build(is_causal=False))


class Blt:
    """Only the configuration, which names no number of layers; the model is large however it is built."""

    config = AutoConfig.for_model("blt")


@pytest.mark.parametrize("model_type", FAILING)
def test_a_class_that_fails_is_refused_by_name(model_type):
    refusal(Blt() if model_type == "blt" else build(model_type))


def test_several_output_heads_are_refused():
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "ffn_dim": 32, "num_attention_heads": 2, "hidden_size": 16}
    assert "single output head" in refusal(MusicgenForCausalLM(MusicgenDecoderConfig(**sizes, num_codebooks=2)).eval())


def test_sparse_attention_that_cannot_be_masked_is_called_by_its_name():
    message = refusal(build("deepseek_v4"))
    assert "compressed_sparse_attention" in message and "recurrent" not in message


@pytest.mark.parametrize("model_type", [*WELCOME[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in WELCOME[3:])])
def test_sound_models_are_welcome(model_type):
    HFModel(build(model_type))


@pytest.mark.parametrize("model_type", ["moshi", "doge"])
def test_models_whose_own_passes_disagree_past_the_window_are_refused(model_type):
    assert "with and without a cache" in refusal(build(model_type))


def test_a_window_of_one_token_is_refused():
    assert "window of 1" in refusal(FAMILIES.get("mistral").build(sliding_window=1))


class WindowedConfig(LlamaConfig):
    model_type = "windowed"


class SlotWindow(LlamaForCausalLM):
    """Has a window that it counts in slots, as GPT-Neo's table does; right in plain passes, wrong in trees past it."""

    config_class = WindowedConfig

    def __init__(self, config):
        super().__init__(config)
        forward, window = self.model.forward, config.attention_window_size

        def windowed(*args, attention_mask=None, **options):
            cache, tokens = options.get("past_key_values"), options["input_ids"]
            used = tokens.shape[1] + (cache.get_seq_length() if cache is not None else 0)
            queries, keys = torch.arange(used - tokens.shape[1], used), torch.arange(used)
            near = (queries[:, None] >= keys) & (queries[:, None] - keys < window)
            mask = near[None, None] if attention_mask is None or attention_mask.dim() == 2 else attention_mask & near
            return forward(*args, attention_mask=mask, **options)

        self.model.forward = windowed


def windowed(window):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return SlotWindow(WindowedConfig(**sizes, attention_window_size=window, initializer_range=0.35)).eval()


@pytest.mark.parametrize("window", [5, 4096])
def test_a_window_counted_in_slots_is_found_out_however_wide(window):
    """The old check read four tokens, and would not have met even the narrower one."""
    assert "tree masks" in refusal(windowed(window))


def test_a_twin_is_small_and_keeps_every_kind_of_layer():
    model = build("gemma3_text")
    config = AutoConfig.for_model("gemma3_text")
    shrunk = twin_config(config)
    assert set(shrunk.layer_types) == set(config.layer_types)
    assert shrunk.sliding_window == WINDOW and shrunk.max_position_embeddings == POSITIONS
    assert sum(weight.numel() for weight in next(twins(model)).parameters()) < 1e6


def test_checking_leaves_the_random_numbers_alone():
    model = build("olmo2")
    before = torch.get_rng_state()
    HFModel(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [pytest.param(240, marks=pytest.mark.slow), 256])
def test_gpt_neo_past_its_stock_window(length):
    """With a window of 256, texts that cross it parted from `generate` after a few tokens."""
    model = FAMILIES.get("gpt_neo").build(window_size=256, max_position_embeddings=320)
    rng = random.Random(length)
    prompts = [[rng.randrange(3, 96) for _ in range(size)] for size in (length, length - 9)]
    draft = FAMILIES.get("gpt_neo").build(window_size=256, max_position_embeddings=320, seed=1)
    results = Decoder(HFModel(model), TreeDrafter(HFModel(draft), parse_tree("3x2x1"))).generate(
        prompts, sampling=GREEDY, max_new_tokens=32
    )
    for prompt, result in zip(prompts, results, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32, pad_token_id=0)
        assert result.token_ids == expected[0, len(prompt) :].tolist()


def test_gpt_neo_exits_early_with_its_windows():
    target = HFModel(FAMILIES.get("gpt_neo").build())
    decoder = Decoder(target, TreeDrafter(early_exit(target, 2), parse_tree("2x1")))
    prompt = list(range(3, 30))
    expected = target.hf_model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, pad_token_id=0)
    assert decoder.generate(prompt, sampling=GREEDY, max_new_tokens=16).token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_phi4_ends_where_generate_forgets_the_text():
    """Past the original context its `generate` loses the cache, and differs from its own plain passes."""
    model = HFModel(build("phi4_multimodal"), endless=True)
    assert model.max_positions == POSITIONS // 2


def test_gpt_neo_with_hooks_is_refused():
    model = FAMILIES.get("gpt_neo").build()
    model.transformer.h[1].register_forward_hook(lambda module, inputs, output: output)
    assert "hooks" in refusal(model)


def test_known_families_are_not_tried(monkeypatch):
    """Their tests are in the suite; a twin at every start would be for nothing."""
    monkeypatch.setattr("polydraft.models.hf.check_habits", lambda *_: pytest.fail("a known family was tried"))
    for name in FAMILIES:
        HFModel(FAMILIES.get(name).build())
