"""Prepare MCSD's real pairs, and measure them. Finished steps are skipped: start it again to continue.

python benchmarks/mcsd_pairs.py --prompts DIR --out results/mcsd

`models` must hold the weights that `polydraft.lab.papers.mcsd_pairs` names: Qwen2.5-Coder-1.5B-Instruct and TinyLlama-1.1B-Chat
as GGUF files, and stories15M.bin of llama2.c. From these come two drafts distilled from Qwen2.5-Coder, stories15M with
TinyLlama's tokenizer, and the same fine-tuned on what TinyLlama writes. DIR holds the prompt sets: alpaca.jsonl,
wmt_ende.jsonl, spec_bench.jsonl.
"""

import argparse
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.lab.papers.mcsd_pairs import FOLDER, QWEN, QWEN_DRAFTS, RUNS, STORIES, STORIES_TUNED, TINY_LLAMA
from polydraft.models.gguf import converted_folder, load_converted_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="folder of prompt sets")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    place = ("--device", options.device)
    for name, (layers, width) in QWEN_DRAFTS.items():
        sizes = ("--layers", str(layers), "--width", str(width))
        train(f"{FOLDER}/qwen-draft-{name}", "--target", QWEN, *sizes, *place)
    if not Path(STORIES).exists():
        convert(Path(f"{STORIES}.bin"), Path(TINY_LLAMA), Path(STORIES))
    # A quarter of the steps that a new draft takes, at a tenth of the rate, because it can already write.
    gentle = ("--steps", "600", "--learning-rate", "1e-4")
    train(STORIES_TUNED, "--target", TINY_LLAMA, "--start", STORIES, *gentle, *place)
    results = ("--reproduce", "mcsd", "--size", "page", "--prompts", options.prompts, "--out", options.out)
    polydraft("bench", *results, "--runs", ",".join(run.name for run in RUNS), *place, "--resume")


def train(out: str, *options: str) -> None:
    """Train a draft, or continue its training; its card is written last."""
    if not Path(out, "README.md").exists():
        polydraft("train", "draft", "--out", out, *options, "--resume")


def polydraft(*arguments: str) -> None:
    print("polydraft", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "polydraft", *arguments], check=True)


def convert(weights: Path, tokenizer: Path, out: Path) -> None:
    """Write a model of llama2.c as a Hugging Face folder, with the tokenizer of a GGUF file."""
    model = read_llama2c(weights)
    model.save_pretrained(out)
    load_converted_tokenizer(converted_folder(tokenizer, torch.float32)).save_pretrained(out)


def read_llama2c(weights: Path) -> LlamaForCausalLM:
    """Read a file of llama2.c's first format: seven sizes, and all weights in float32."""
    with weights.open("rb") as file:
        size, inner, layers, heads, key_heads, vocabulary, positions = struct.unpack("7i", file.read(28))
        numbers = torch.from_numpy(np.fromfile(file, dtype="<f4"))
    channels, place = size // heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return numbers[place - count : place].view(shape)

    def halves(rows: torch.Tensor, count: int) -> torch.Tensor:
        """Bring the channels that llama2.c turns as neighbours to where transformers turns halves."""
        return rows.view(layers, count, channels // 2, 2, size).transpose(2, 3).reshape(layers, -1, size)

    state = {"model.embed_tokens.weight": take(abs(vocabulary), size)}
    found = {"input_layernorm": take(layers, size)}
    found["self_attn.q_proj"] = halves(take(layers, size, size), heads)
    found["self_attn.k_proj"] = halves(take(layers, key_heads * channels, size), key_heads)
    found["self_attn.v_proj"] = take(layers, key_heads * channels, size)
    found["self_attn.o_proj"] = take(layers, size, size)
    found["post_attention_layernorm"] = take(layers, size)
    found["mlp.gate_proj"] = take(layers, inner, size)
    found["mlp.down_proj"] = take(layers, size, inner)
    found["mlp.up_proj"] = take(layers, inner, size)
    state |= {f"model.layers.{layer}.{name}.weight": rows[layer] for name, rows in found.items() for layer in range(layers)}
    state["model.norm.weight"] = take(size)
    take(2, positions, channels // 2)  # tables of angles
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if vocabulary > 0 else take(-vocabulary, size)
    assert place == len(numbers), "the file has another format"
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=abs(vocabulary),
        # It was trained on shorter texts; rotary positions extend beyond them.
        max_position_embeddings=max(positions, 2048),
        tie_word_embeddings=vocabulary > 0,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


if __name__ == "__main__":
    main()
