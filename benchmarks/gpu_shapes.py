"""Time eager rounds on a GPU with random weights in the shapes of real models; costs are real, texts are not.

python benchmarks/gpu_shapes.py
"""

import json
import statistics
import time
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel, early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

SHAPES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
}  # fmt: skip
TOKENS = 32


def main() -> None:
    logging.set_verbosity_error()
    rows = {}
    for name, shape in SHAPES.items():
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
        torch.set_default_dtype(torch.float32)
        prompt = torch.randint(10, 30000, (512,)).tolist()
        target = HFModel(model)
        tree = TreeDrafter(early_exit(target, 1), parse_tree("4x2x2x1x1"))
        decoders = {
            "plain": Decoder(target),
            "plain, hf body": Decoder(HFModel(model, lean=False)),
            "tree of 45 nodes": Decoder(target, tree),
        }
        times: dict[str, list[float]] = {"hf generate": [], **{key: [] for key in decoders}}
        for _ in range(4):
            times["hf generate"].append(clock(partial(plain_generate, model, prompt)))
            for key, decoder in decoders.items():
                stream = decoder.stream(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=TOKENS)
                seconds = clock(partial(list, stream))
                times[key].append(seconds * TOKENS / stream.stats.rounds)
        rows[name] = {key: 1e3 * statistics.median(values[1:]) / TOKENS for key, values in times.items()}
        print(name, {key: f"{value:.2f} ms per pass" for key, value in rows[name].items()}, flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(rows))


def plain_generate(model, prompt: list[int]) -> None:
    ids = torch.tensor([prompt], device="cuda")
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)


def clock(function) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
