"""The kernels between a layer's matrix products, on a GPU; and whole models by them against the plain way."""

import pytest
import torch

from families import FAMILIES
from models.fused_cases import (
    FORMS,
    PLACES,
    check_add_norm,
    check_entries,
    check_fused_features,
    check_gate,
    check_head,
    check_move_up,
    check_place,
    check_rotate_store,
    check_vector_product,
)
from polydraft.engine import Decoder
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FORMATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_kernels(dtype: torch.dtype) -> None:
    for channels in (48, 576, 4096):
        check_add_norm("cuda", dtype, channels, added=channels != 576)
        check_gate("cuda", dtype, channels)
    for queries, keys, channels in ((9, 3, 64), (32, 32, 128), (5, 1, 80)):
        check_rotate_store("cuda", dtype, queries, keys, channels)
    for rows, channels in ((7, 576), (4096, 11008), (12288, 4096), (5000, 2560)):
        check_vector_product("cuda", dtype, rows, channels, biased=rows == 4096)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_kernels_of_heads_and_memories(dtype: torch.dtype) -> None:
    check_entries("cuda", dtype)
    for form in FORMS.values():
        check_head("cuda", dtype, form)
    for norm in TapNorm:
        check_fused_features("cuda", dtype, {"tap_norm": norm})
    for case in PLACES.values():
        check_place("cuda", **case)
    for layers, rows, heads, channels in ((30, 3, 3, 64), (2, 1, 32, 128), (3, 2, 2, 80)):
        check_move_up("cuda", dtype, layers, rows, heads, channels)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_a_fused_body_computes_what_the_lean_one_does(name: str) -> None:
    target = HFModel(FAMILIES.get(name).build().to("cuda"))
    sampling = SamplingParams(temperature=0)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]
    assert target.fast is not None
    fused = Decoder(target).generate(prompts, sampling=sampling, max_new_tokens=20)
    target.fast = None
    lean = Decoder(target).generate(prompts, sampling=sampling, max_new_tokens=20)
    assert [one.token_ids for one in fused] == [one.token_ids for one in lean]
