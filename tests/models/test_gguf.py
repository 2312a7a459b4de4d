"""GGUF files as models: converted once into the cache, the same weights and tokens, and one clear line where that cannot be."""

import os
import shutil
import struct
from collections import namedtuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polydraft import Speculate
from polydraft.backends.native import kernels
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.models.gguf import gguf_source
from polydraft.models.gguf.folder import convert, converted_folder
from polydraft.models.gguf.header import read_header
from polydraft.models.hf import HFModel
from polydraft.models.loading import load_draft, load_model
from polydraft.models.packed import PackedEmbedding
from polydraft.models.quantised import Int8Linear, quantise
from polydraft.models.translation import TranslatedModel
from polydraft.sampling import SamplingParams

gguf = pytest.importorskip("gguf")

from models.gguf_cases import TOKENS, tiny, write  # noqa: E402  it needs the package

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")
CASES = {
    "qwen2": ({}, {}),
    "qwen2-q8": ({}, {"form": "Q8_0"}),
    "llama-q4": ({"kind": "llama"}, {"kind": "llama", "form": "Q4_0", "pre": "llama-bpe"}),
    "llama-tied": ({"kind": "llama", "tie_word_embeddings": True}, {"kind": "llama", "form": "Q5_0"}),
    "llama-pieces": ({"kind": "llama", "vocab_size": 320}, {"kind": "llama", "pieces": True}),
    "qwen3-q4": ({"kind": "qwen3"}, {"kind": "qwen3", "form": "Q4_1"}),
    "gemma3-q8": (
        {"kind": "gemma3_text", "vocab_size": 320},
        {"kind": "gemma3", "form": "Q8_0", "pieces": True, "begins": True},
    ),
}
TEXTS = ["abba the other", "  the   ab\n\nthe", "A1b2 ab, 345!", "", "<s>ab</s>the", "naïve ﬁ é <mine>ab"]


def test_a_file_and_a_folder_with_one_are_loaded(tmp_path, cache, caplog, capfd):
    model = tiny()
    file = write(tmp_path / "tiny.gguf", model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with caplog.at_level("INFO", logger="polydraft"):
        loaded = load_model(str(file), CPU, torch.float32)
    assert "converting tiny.gguf, once" in caplog.text and f"GB in {cache}" in caplog.text
    assert "converting:" not in capfd.readouterr().err, "bars are for terminals"
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
        patch.setattr("polydraft.models.gguf.folder.convert", lambda *_: pytest.fail("converted again"))
        load_model(str(file), CPU, torch.float32)
    assert load_model(str(file), CPU, torch.bfloat16).model.dtype == torch.bfloat16
    assert len(list((cache / "gguf").iterdir())) == 2


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
    with pytest.raises(FailureError, match=r"text.gguf is not a GGUF file"):
        load_model(str(tmp_path / "text.gguf"), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("kept", [0.9, 0.02])
def test_a_file_that_is_cut_short_is_refused_by_its_header(tmp_path, cache, monkeypatch, kept):
    file = write(tmp_path / "tiny.gguf", tiny())
    whole = file.stat().st_size
    os.truncate(file, int(kept * whole))
    # It takes a minute to look at a large vocabulary.
    monkeypatch.setattr(gguf, "GGUFReader", lambda *_: pytest.fail("the slow reader was asked"))
    missing = whole - int(kept * whole)
    expected = (
        rf"{int(kept * whole)} of {whole} bytes are there, {missing} are missing" if kept > 0.5 else "its header is incomplete"
    )
    with pytest.raises(FailureError, match=rf"tiny.gguf is cut short, {expected}; download it again"):
        load_model(str(file), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_header_says_what_the_packages_own_reader_says(tmp_path):
    file = write(tmp_path / "tiny.gguf", tiny(), begins=True)
    header, reader = read_header(file), gguf.GGUFReader(file)
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.fields == own and header.tokens == list(TOKENS)
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


def test_a_draft_with_other_tokens_is_refused_before_it_is_converted(tmp_path, cache, monkeypatch):
    target = load_model(str(write(tmp_path / "target.gguf", tiny())), CPU, torch.float32)
    other = str(write(tmp_path / "other.gguf", tiny(), tokens=[f"w{number}" for number in range(96)]))
    with monkeypatch.context() as patch:
        patch.setattr("polydraft.models.gguf.folder.convert", lambda *_: pytest.fail("converted for nothing"))
        with pytest.raises(UsageError, match=r"other.gguf' and target .* have different vocabularies and share 0 of"):
            load_draft(other, target)
    # One token of another spelling changes little, and numbers can be translated.
    draft = str(write(tmp_path / "draft.gguf", tiny(), tokens=[*TOKENS[:20], "zz", *TOKENS[21:]]))
    assert not isinstance(load_draft(draft, target), TranslatedModel)
    swapped = str(write(tmp_path / "swapped.gguf", tiny(), tokens=[*TOKENS[:10], TOKENS[11], TOKENS[10], *TOKENS[12:]]))
    made = load_draft(swapped, target)
    assert isinstance(made, TranslatedModel) and (made.shared[10], made.shared[11], made.shared[12]) == (11, 10, 12)
    assert load_draft(str(write(tmp_path / "same.gguf", tiny(), begins=True)), target) is not None


def test_too_little_room_is_said_before_anything_is_written(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "tiny.gguf", tiny())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(FailureError, match=r"needs 0.0 GB \(\d+ bytes\) in .*, where 0.0 GB are free; set POLYDRAFT_CACHE"):
        convert(file, cache / "folder", torch.float32)
    assert not list(cache.iterdir())


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path, cache):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "nobodys")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"])
    writer.add_tensor("weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match=r"transformers cannot read odd.gguf, whose architecture is 'nobodys'; .*qwen2"):
        load_model(str(tmp_path / "odd.gguf"), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(("number", "name"), [(99, "number 99"), (24, "I8")])
def test_weights_in_a_format_that_cannot_be_read_are_named(tmp_path, cache, number, name):
    file = write(tmp_path / "tiny.gguf", tiny())
    data = bytearray(file.read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (0,)
    data[at : at + 4] = struct.pack("<I", number)
    file.write_bytes(data)
    with pytest.raises(UsageError, match=rf"tensor token_embd.weight of tiny.gguf .*cannot be read \({name}\); use a file in"):
        load_model(str(file), CPU, torch.float32)


def test_a_vocabulary_of_another_size_than_its_embeddings_is_refused(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny(), tokens=TOKENS[:-1])
    with pytest.raises(FailureError, match=r"has 95 tokens, but 96 rows in token_embd.weight"):
        load_model(str(file), CPU, torch.float32)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_tensor_that_is_missing_is_named(tmp_path, cache):
    model = tiny()
    del model.model.layers[1].mlp.up_proj
    file = write(tmp_path / "tiny.gguf", model)
    with pytest.raises(FailureError, match=r"tiny.gguf has no model.layers.1.mlp.up_proj.weight, which its model needs"):
        load_model(str(file), CPU, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_tokens_are_those_of_transformers(tmp_path, cache, case):
    options, written = CASES[case]
    file = write(tmp_path / "tiny.gguf", tiny(**options), **written)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(str(file), CPU, dtype)
        ours = loaded.model.hf_model
        expected = theirs.to(dtype).state_dict()
        assert ours.state_dict().keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
        assert ours.config.to_diff_dict().keys() >= {"vocab_size", "hidden_size"}
        assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    if written.get("begins") is not None:
        tokenizer.add_bos_token = written["begins"]
    for text in TEXTS:
        tokens = tokenizer(text).input_ids
        assert loaded.tokenizer(text).input_ids == tokens, text
        assert loaded.tokenizer.decode(tokens) == tokenizer.decode(tokens)
    # Theirs adds tokens of its class that no file of this size has.
    assert (
        len(loaded.tokenizer) == loaded.model.vocab_size
        and loaded.tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()
    )


def test_converted_folders_are_read_by_transformers_too(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny(), form="Q8_0")
    folder = converted_folder(file, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    ours = load_model(str(file), CPU, torch.float32).model.hf_model.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids == [95]


@compiled
@pytest.mark.parametrize("case", CASES)
def test_int8_is_what_rounding_float32_gives(tmp_path, cache, case):
    options, written = CASES[case]
    file = write(tmp_path / "tiny.gguf", tiny(**options), **written)
    found = load_model(str(file), CPU, torch.int8).model
    expected = HFModel(quantise(load_model(str(file), CPU, torch.float32).model.hf_model))
    layers = dict(expected.hf_model.named_modules())
    for name, layer in found.hf_model.named_modules():
        assert type(layer) is type(layers[name]) or type(layer) is PackedEmbedding
        if isinstance(layer, Int8Linear):
            assert all(torch.equal(*pair) for pair in zip(layer.held, layers[name].held, strict=True))
    tables = [model.hf_model.get_input_embeddings().weight for model in (found, expected)]
    assert torch.equal(*tables) and found.dtype == expected.dtype == torch.float32
    greedy = SamplingParams(temperature=0)
    texts = [Decoder(model).generate([[5, 6, 7, 8], [9, 10]], sampling=greedy, max_new_tokens=8) for model in (found, expected)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
    packed = type(found.hf_model.get_input_embeddings()) is PackedEmbedding
    assert packed == (written.get("form", "F32") != "F32" and case != "gemma3-q8")
    assert (found.fast is not None) == (expected.fast is not None)


@compiled
def test_weights_are_used_where_they_are_mapped(tmp_path, cache):
    file = write(tmp_path / "tiny.gguf", tiny())
    for dtype in (torch.float32, torch.int8):
        layers = load_model(str(file), CPU, dtype).model.hf_model.model.layers
        addresses = (
            {layer.self_attn.k_proj.held[0].untyped_storage().data_ptr() for layer in layers}
            if dtype == torch.int8
            else {layer.self_attn.k_proj.weight.untyped_storage().data_ptr() for layer in layers}
        )
        assert len(addresses) == 1, "views of one mapping, side by side without a copy"
