"""Every causal model type of `transformers`, tiny and random: does greedy text under `Speculate` equal that of `generate`?

Each type is tried with trees 3x2x1: one text, a ragged and padded batch of three, and a repetition penalty. Windows are a few
tokens wide, so that texts run past all of them. Beside it stands what Hugging Face's own assistance does with one text.
docs/models.md is made of the results.

    python benchmarks/model_types.py --write docs/models.md --results build/model_types.jsonl    # all of them, some minutes
    python benchmarks/model_types.py gpt_neo bert
"""

import argparse
import copy
import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from polydraft import Speculate
from polydraft.errors import PolydraftError
from polydraft.models.check import sharpen, twin_config
from polydraft.models.families import first_line

NEW_TOKENS = 24
LENGTHS = (9, 20, 3)
TREE = "3x2x1"
WORKS, REFUSED, NOT_BUILT, WRONG, CRASH = "works", "refused", "not built", "WRONG", "CRASH"
_ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "eos_token_id": 2,
}  # fmt: skip
_MAMBA2 = {"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_ATTENTION = {"hidden_size": 32, "attention_hidden_size": 64, "attention_head_dim": 16, "num_attention_heads": 4}
_SHORT = {"num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 8}
_HYBRIDS = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "zamba": {**_ATTENTION, **_SHORT, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {
        **_ATTENTION, **_SHORT, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8,
        "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "mamba2": {"num_hidden_layers": 2, "state_size": 8, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
}  # fmt: skip
# What default configurations lack, or what a decoder is built with.
MORE: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _ENCODERS},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "xlnet": {"d_model": 64, "n_head": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    **{name: {**_MAMBA2, **more} for name, more in _HYBRIDS.items()},
    "rwkv": {"attention_hidden_size": 64},
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA},
}


_HEAD = """# Models

Made by `python benchmarks/model_types.py --write docs/models.md` with transformers {version}. Every type is built tiny, with
random weights and windows of a few tokens, and generates greedily with a noisy copy of itself as a draft: trees `{tree}`, one
text, a ragged and padded batch of {rows}, and a repetition penalty. *Works* means that all texts equal those of `generate`.
A real model is checked in the same way when it is loaded, on a small copy
([decision 20](decisions/020-unknown-models-are-tried-on-a-twin.md)); what differs is refused, not decoded wrongly.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one model type."""

    model_type: str
    result: str
    """One of the five words above."""
    note: str = ""
    tokens_per_pass: float | None = None
    assisted: str = ""
    """What Hugging Face's assistance does with one text: same, other text, or fails."""


def causal_types() -> list[str]:
    """Return all types that `AutoModelForCausalLM` knows."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> list[str]:
    """Return the types that only `AutoModelForImageTextToText` knows."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def build(model_type: str) -> Any:
    """Make a tiny model with random weights of the default configuration."""
    config = twin_config(AutoConfig.for_model(model_type, **MORE.get(model_type, {})))
    # With tied embeddings and scaled inputs random models say one token again and again, whatever the layers do.
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
    if hasattr(config, "original_max_position_embeddings"):  # where texts end, for some
        config.original_max_position_embeddings = config.max_position_embeddings
    torch.manual_seed(0)
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = (AutoModelForCausalLM if causal else AutoModelForImageTextToText).from_config(config).float().eval()
    with torch.no_grad():
        sharpen(model)
    model.generation_config.eos_token_id = None
    return model


def noisy(model: Any) -> Any:
    """Make a draft that agrees in part."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=generator))
    return draft


def texts(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    """Return the new tokens of each row."""
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **options}
    rows: list[list[int]] = model.generate(**inputs, **given)[:, inputs["input_ids"].shape[1] :].tolist()
    return rows


def try_type(model_type: str) -> Verdict:
    """Build a model of a type and try it."""
    try:
        model = build(model_type)
        draft = noisy(model)
        longest = max(LENGTHS)
        ids_BT = torch.randint(5, 90, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(1))
        mask_BT = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
        batch = {"input_ids": ids_BT.masked_fill(~mask_BT, 0), "attention_mask": mask_BT.long()}
        singles = [{"input_ids": ids_BT[row : row + 1, -length:]} for row, length in enumerate(LENGTHS)]
        for single in singles:
            single["attention_mask"] = torch.ones_like(single["input_ids"])
        plain = [texts(model, single)[0] for single in singles]
        penalised = texts(model, singles[1], repetition_penalty=1.3)
    except Exception as error:
        return Verdict(model_type=model_type, result=NOT_BUILT, note=first_line(error))
    assisted = try_assistance(model, draft, singles[0], plain[0])
    verdict = Verdict(model_type=model_type, result=WORKS, assisted=assisted)
    try:
        speculate = Speculate(draft=draft, tree=TREE)
        one = texts(model, singles[0], custom_generate=speculate)[0]
        rows = texts(model, batch, custom_generate=speculate)
        other = texts(model, singles[1], custom_generate=speculate, repetition_penalty=1.3)
    except PolydraftError as error:
        return dataclasses.replace(verdict, result=REFUSED, note=str(error))
    except Exception as error:
        return dataclasses.replace(verdict, result=CRASH, note=first_line(error))
    tokens_per_pass = speculate.stats[0].tokens_per_pass
    verdict = dataclasses.replace(verdict, tokens_per_pass=round(tokens_per_pass, 2), note=_weakness(plain, tokens_per_pass))
    if one != plain[0] or other != penalised:
        return dataclasses.replace(verdict, result=WRONG, note="one text" if one != plain[0] else "with a repetition penalty")
    if rows == plain:
        return verdict
    # Some models do other things in a padded batch than alone.
    if rows == texts(model, batch):
        return dataclasses.replace(verdict, note="in a padded batch as `generate` there, which differs from its texts alone")
    return dataclasses.replace(verdict, result=WRONG, note=f"rows {[a == b for a, b in zip(rows, plain, strict=True)]}")


def _weakness(plain: list[list[int]], tokens_per_pass: float) -> str:
    """Say where a text shows little."""
    few = max(len(set(row)) for row in plain) < 4
    return "hardly a text: the random model repeats itself" if few else "no draft was accepted" if tokens_per_pass <= 1 else ""


def try_assistance(model: Any, draft: Any, inputs: dict[str, torch.Tensor], plain: list[int]) -> str:
    """Say what Hugging Face's own assistance does with one text."""
    try:
        return "same" if texts(model, inputs, assistant_model=draft)[0] == plain else "other text"
    except Exception:
        return "fails"


def page(verdicts: Iterable[Verdict]) -> str:
    """Return docs/models.md."""
    everything = {verdict.model_type: verdict for verdict in verdicts}
    causal = [everything[name] for name in causal_types() if name in everything]
    multimodal = [everything[name] for name in multimodal_types() if name in everything]
    counts = Counter(verdict.result for verdict in causal)
    built = len(causal) - counts[NOT_BUILT]
    share = 100 * counts[WORKS] // max(built, 1)
    same = [verdict for verdict in causal if verdict.assisted == "same"]
    also = sum(verdict.result == WORKS for verdict in same)
    parts = [
        _HEAD.format(version=transformers.__version__, tree=TREE, rows=len(LENGTHS)),
        f"Of {len(causal)} causal types, {built} can be built and run `generate` here; **{counts[WORKS]} work ({share} %)**, "
        f"{counts[REFUSED]} are refused.\nHugging Face's own assistance, which takes one text at a time, gives the same text "
        f"for {len(same)} of them; {also} of these work here.\n",
        "## Causal types\n",
        *_table(causal),
    ]
    if untried := [f"`{name}`" for name in causal_types() if name not in everything]:
        parts.insert(2, f"Not tried yet: {', '.join(untried)}.\n")
    if multimodal:
        works = sum(verdict.result == WORKS for verdict in multimodal)
        tried = sum(verdict.result != NOT_BUILT for verdict in multimodal)
        parts += [
            "\n## Multimodal types with text alone\n",
            "Types that only `AutoModelForImageTextToText` knows, with prompts of text. "
            f"{works} of the {tried} that can be built so work.\n",
            *_table(multimodal),
        ]
    return "\n".join(parts) + "\n"


def _table(verdicts: Iterable[Verdict]) -> list[str]:
    rows = ["| type | | tokens per pass | HF assistance | |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        rate = "" if verdict.tokens_per_pass is None else f"{verdict.tokens_per_pass:.2f}"
        note = verdict.note.replace("|", "\\|").replace(f"model type '{verdict.model_type}' ", "")
        rows.append(f"| `{verdict.model_type}` | {verdict.result} | {rate} | {verdict.assisted} | {note} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; all if none is given")
    parser.add_argument("--write", type=Path, help="write the page there")
    parser.add_argument("--results", type=Path, help="keep results in this file; types that it holds are not tried again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known: dict[str, Verdict] = {}
    if arguments.results is not None and arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            verdict = Verdict(**json.loads(line))
            known[verdict.model_type] = verdict
    for model_type in arguments.types or [*causal_types(), *multimodal_types()]:
        if model_type in known and not arguments.types:
            continue
        verdict = known[model_type] = try_type(model_type)
        print(
            f"{model_type:26} {verdict.result:9} {verdict.tokens_per_pass or '':5} {verdict.assisted:10} {verdict.note}",
            flush=True,
        )
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                print(json.dumps(dataclasses.asdict(verdict)), file=file)
    if arguments.write is not None:
        arguments.write.write_text(page(known.values()))


if __name__ == "__main__":
    main()
