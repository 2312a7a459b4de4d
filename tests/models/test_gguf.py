"""GGUF files as models: converted once into the cache, the same logits, and one clear line where that cannot be."""

import importlib.util
import shutil
from collections import namedtuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polydraft import Speculate
from polydraft.errors import FailureError, UsageError
from polydraft.models.gguf_files import convert, gguf_source
from polydraft.models.loading import load_model
from polydraft.models.twin import sharpen

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
NAMES = {
    "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output.", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}  # fmt: skip


def tiny():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).eval()
    with torch.no_grad():
        sharpen(model)
    return model


def write(path, model, begins=None):
    """Write a Qwen 2 model, with a tokenizer of single characters."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<pad>", "<s>", "</s>", *(chr(33 + number) for number in range(92)), "ab"])
    writer.add_token_types([3, 3, 3, *[1] * 93])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if begins is not None:
        writer.add_add_bos_token(begins)
    for name, weight in model.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_and_a_folder_with_one_are_loaded(tmp_path, cache, caplog):
    model = tiny()
    file = write(tmp_path / "tiny.gguf", model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with caplog.at_level("INFO", logger="polydraft"):
        loaded = load_model(str(file), CPU, torch.float32)
    assert "tiny.gguf" in caplog.text and "GB in" in caplog.text  # said beforehand
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.plain(tokens), model(tokens).logits)
    assert loaded.eos_token_ids == (2,) and loaded.tokenizer.convert_tokens_to_ids("a") == 67
    caplog.clear()
    (tmp_path / "folder").mkdir()
    file.rename(tmp_path / "folder" / "renamed.gguf")
    again = load_model(str(tmp_path / "folder"), CPU, torch.float32)
    assert torch.equal(again.model.plain(tokens), loaded.model.plain(tokens))


def test_a_conversion_happens_once_per_number_format(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "tiny.gguf", tiny())
    load_model(str(file), CPU, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr("polydraft.models.gguf_files.convert", lambda *_: pytest.fail("converted again"))
        load_model(str(file), CPU, torch.float32)
    assert load_model(str(file), CPU, torch.bfloat16).model.dtype == torch.bfloat16
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("begins", [True, False, None])
def test_texts_begin_as_the_file_says(tmp_path, cache, begins):
    file = write(tmp_path / "tiny.gguf", tiny(), begins)
    loaded = load_model(str(file), CPU, torch.float32)
    assert loaded.tokenizer("ab").input_ids == ([1] if begins else []) + [95]


def test_speculate_takes_a_model_that_transformers_loaded_from_a_file(tmp_path):
    file = write(tmp_path / "tiny.gguf", tiny())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    got = model.generate(ids, custom_generate=Speculate(draft=tiny(), tree="2x1"), **options)
    assert got.tolist() == expected.tolist()


def test_several_files_are_not_guessed_between(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"has 2 GGUF files \(a.gguf, b.gguf\); name one"):
        gguf_source(str(tmp_path))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_model(str(tmp_path / "none.gguf"), CPU, torch.float32)


def test_a_file_of_something_else_is_named(tmp_path, cache):
    (tmp_path / "text.gguf").write_text("once upon a time " * 9)
    with pytest.raises(FailureError, match=r"text.gguf is no GGUF file"):
        load_model(str(tmp_path / "text.gguf"), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


def test_too_little_room_is_said_before_anything_is_written(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "tiny.gguf", tiny())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(FailureError, match=r"needs 0.0 GB in .*, where 0.0 GB are free; set POLYDRAFT_CACHE"):
        convert(file, cache / "folder")
    assert not list(cache.iterdir())


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path, cache):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "nobodys")
    writer.add_tensor("weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match=r"transformers cannot read odd.gguf \(.*nobodys"):
        load_model(str(tmp_path / "odd.gguf"), CPU, torch.float32)
