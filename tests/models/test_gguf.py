"""GGUF files as models: converted once into the cache, the same logits, and one clear line where that cannot be."""

import importlib.util
import os
import shutil
from collections import namedtuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from polydraft import Speculate
from polydraft.errors import FailureError, UsageError
from polydraft.models.gguf_files import convert, gguf_source
from polydraft.models.gguf_header import read_header
from polydraft.models.loading import load_draft, load_model
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


TOKENS = ["<pad>", "<s>", "</s>", *(chr(33 + number) for number in range(92)), "ab"]


def write(path, model, begins=None, tokens=TOKENS):
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
    writer.add_token_list(tokens)
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


def test_a_file_and_a_folder_with_one_are_loaded(tmp_path, cache, caplog, capfd):
    model = tiny()
    file = write(tmp_path / "tiny.gguf", model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with caplog.at_level("INFO", logger="polydraft"):
        loaded = load_model(str(file), CPU, torch.float32)
    assert "tiny.gguf" in caplog.text and "GB in" in caplog.text  # said beforehand
    stages = ["converting tiny.gguf", "reading its weights", "writing them", "making its tokenizer"]
    assert [one for one in stages if one in caplog.text] == stages
    said = capfd.readouterr().err
    assert "onverting and" not in said and "riting model" not in said, "bars are for terminals"
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


@pytest.mark.parametrize("kept", [0.9, 0.02])
def test_a_file_that_is_cut_short_is_refused_by_its_header(tmp_path, cache, monkeypatch, kept):
    file = write(tmp_path / "tiny.gguf", tiny())
    whole = file.stat().st_size
    os.truncate(file, int(kept * whole))
    # It takes a minute to look at a large vocabulary.
    monkeypatch.setattr(gguf, "GGUFReader", lambda *_: pytest.fail("the slow reader was asked"))
    expected = rf"{int(kept * whole)} of {whole} bytes are there" if kept > 0.5 else "its header is not whole"
    with pytest.raises(FailureError, match=rf"tiny.gguf is cut short, {expected}; download it again"):
        load_model(str(file), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_header_says_what_the_packages_own_reader_says(tmp_path):
    file = write(tmp_path / "tiny.gguf", tiny(), begins=True)
    header, reader = read_header(file), gguf.GGUFReader(file)
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.fields == own and header.vocabulary == {token: number for number, token in enumerate(TOKENS)}
    assert header.num_weights == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert header.num_bytes <= file.stat().st_size < header.num_bytes + 32  # the writer fills up the last tensor


@pytest.mark.parametrize("at", [4, 8, 16, 24])
def test_a_damaged_header_is_one_line(tmp_path, cache, at):
    file = write(tmp_path / "tiny.gguf", tiny())
    data = bytearray(file.read_bytes())
    data[at : at + 8] = b"\xff" * 8
    file.write_bytes(data)
    with pytest.raises(FailureError, match=r"tiny.gguf is (cut short|damaged or of a newer kind).*; download it again"):
        load_model(str(file), CPU, torch.float32)


def test_what_a_kill_left_in_the_cache_is_gone_after_the_next_load(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny())
    load_model(str(file), CPU, torch.float32)
    left = cache / ".large-0123456789ab-float32.0123456789abcdef"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    os.utime(left, (0, 0))
    load_model(str(file), CPU, torch.float32)
    assert not left.exists() and len(list(cache.iterdir())) == 1


def test_a_draft_with_other_tokens_is_refused_before_it_is_converted(tmp_path, cache, monkeypatch):
    target = load_model(str(write(tmp_path / "target.gguf", tiny())), CPU, torch.float32)
    swapped = [*TOKENS[:10], TOKENS[11], TOKENS[10], *TOKENS[12:]]
    other = [f"w{number}" for number in range(96)]
    with monkeypatch.context() as patch:
        patch.setattr("polydraft.models.gguf_files.convert", lambda *_: pytest.fail("converted for nothing"))
        for name, tokens in (("swapped", swapped), ("other", other)):
            draft = str(write(tmp_path / f"{name}.gguf", tiny(), tokens=tokens))
            with pytest.raises(UsageError, match=rf"{name}.gguf' and target .* have different vocabularies \(96 and"):
                load_draft(draft, target)
    # One token of another spelling proves nothing: it is compared as it is converted.
    draft = str(write(tmp_path / "draft.gguf", tiny(), tokens=[*TOKENS[:20], "zz", *TOKENS[21:]]))
    with pytest.raises(UsageError, match="have different vocabularies"):
        load_draft(draft, target)
    assert load_draft(str(write(tmp_path / "same.gguf", tiny(), begins=True)), target) is not None


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
