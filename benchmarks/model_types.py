"""Every causal model type of `transformers`, tiny and random: does greedy text under `Speculate` equal that of `generate`?

One table: identical, refused (why), different, crash; `skipped` where `transformers` itself cannot build or run the tiny model.
Windows are a few tokens wide and the batch is ragged, so that texts run past all of them.

    python benchmarks/model_types.py              # all of them, some minutes
    python benchmarks/model_types.py gpt_neo bert
"""

import copy
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polydraft import Speculate
from polydraft.errors import PolydraftError
from polydraft.models.check import sharpen, twin_config
from polydraft.models.families import first_line

NEW_TOKENS = 24
LENGTHS = (9, 20, 3)
# What default configurations lack, or what a decoder is built with.
MORE: dict[str, dict[str, Any]] = {
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "xlnet": {"d_model": 64, "n_head": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
}


def build(model_type: str) -> Any:
    """Make a tiny model with random weights of the default configuration."""
    config = AutoConfig.for_model(model_type, **MORE.get(model_type, {}))
    config = twin_config(config)
    # With tied embeddings and scaled inputs random models say one token again and again, whatever the layers do.
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        sharpen(model)
    model.generation_config.eos_token_id = None
    return model


def noisy(model: Any) -> Any:
    """Make a draft that agrees in part."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(0.05 * weight.std() * torch.randn(weight.shape))
    return draft


def texts(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options)
    return result


def verdict(model_type: str) -> str:
    longest = max(LENGTHS)
    ids_BT = torch.randint(5, 90, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
    inputs = {"input_ids": ids_BT.masked_fill(~mask_BT, 0), "attention_mask": mask_BT.long()}
    try:
        model = build(model_type)
    except Exception as error:
        return f"skipped     {first_line(error)}"
    try:
        speculate = Speculate(draft=noisy(model), tree="3x2x1")
        got = texts(model, inputs, custom_generate=speculate)
    except PolydraftError as error:
        return f"refused     {error}"
    except Exception as error:
        return f"CRASH       {first_line(error)}"
    # Row by row: some models do other things in a padded batch than alone.
    alone = [texts(model, {"input_ids": ids_BT[row : row + 1, -length:]})[0, length:] for row, length in enumerate(LENGTHS)]
    same = [torch.equal(row, plain) for row, plain in zip(got[:, longest:], alone, strict=True)]
    if all(same):
        kinds = len(set(got[0, longest:].tolist()))
        return f"identical   {speculate.stats[0].tokens_per_pass:.2f} tokens per pass, {kinds} different tokens"
    batch = texts(model, inputs)
    return "identical   in a batch, not row by row" if torch.equal(got, batch) else f"DIFFERENT   rows {same}"


def main(model_types: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        print(f"{model_type:26} {verdict(model_type)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
