"""Small GGUF files of several architectures, tokenizers and number formats."""

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM

from polydraft.models.twin import sharpen

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
NAMES = {
    "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output.", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}  # fmt: skip
GEMMA_NAMES = {
    **NAMES, "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOKENS = ["<pad>", "<s>", "</s>", *(chr(33 + number) for number in range(92)), "ab"]
PIECES = [
    "<unk>", "<s>", "</s>", "▁", *(chr(97 + number) for number in range(26)), "▁a", "ab", "▁ab", "th", "the", "▁the", "er",
    "he", "▁▁", "<mine>", *(f"<0x{number:02X}>" for number in range(256)),
]  # fmt: skip


def tiny(kind="qwen2", **options):
    torch.manual_seed(0)
    sizes = SIZES | options
    if kind == "gemma3_text":
        sizes |= {"head_dim": 8, "sliding_window": 64, "tie_word_embeddings": True}
    elif kind == "qwen3":
        sizes |= {"head_dim": 128}  # transformers reads no other from a file
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        sharpen(model)
    return model


def write(path, model, begins=None, tokens=TOKENS, *, kind="qwen2", form="F32", pre="qwen2", pieces=False):
    """Write a model, with a tokenizer of single characters, or of pieces with scores."""
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if kind in ("gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
    if kind == "gemma3":
        writer.add_sliding_window(64)
    if pieces:
        tokens = (PIECES + [f"unused{number}" for number in range(config.vocab_size)])[: config.vocab_size]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_token_types([{"<mine>": 4}.get(one, 3 if one in ("<s>", "</s>") else 1) for one in tokens])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_token_merges(["a b"])
        writer.add_pad_token_id(0)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if begins is not None:
        writer.add_add_bos_token(begins)
    add_tensors(writer, model, kind, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensors(writer, model, kind, form):
    tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name.startswith("lm_head."):
            continue
        for old, new in (GEMMA_NAMES if kind == "gemma3" else NAMES).items():
            name = name.replace(old, new)
        if kind == "llama" and ("attn_q." in name or "attn_k." in name):  # llama.cpp keeps the channels of a pair together
            heads = 4 if "attn_q." in name else 2
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        if kind == "gemma3" and "norm" in name:
            weight = weight + 1
        values = weight.contiguous().numpy()
        if weight.ndim > 1 and form != "F32":
            quantised = GGMLQuantizationType[form]
            writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
