"""A token's bits on a GPU: in trees, in batches, in prompts read in parts, and alone they are the same."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from families import FAMILIES
from models.invariant_cases import TreeCase, numbers, products
from polydraft.backends.triton import invariant as _invariant
from polydraft.backends.triton.invariant import AttendPlan
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import language_model
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, parse_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FORMATS = [torch.bfloat16, torch.float32]
ROWS = (*range(1, 65), 100, 128, 129, 200, 512, 600)
GREEDY = SamplingParams(temperature=0)


def llama(layers: int = 3, window: int | None = None, dtype: torch.dtype = torch.bfloat16) -> HFModel:
    """A model with grouped heads, whose last product in each layer is cut into splits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1152, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=2048, initializer_range=0.08,
    )  # fmt: skip
    with torch.inference_mode(False):  # whatever the test is in
        model = HFModel(LlamaForCausalLM(config).to("cuda", dtype), invariant=True)
    model.window = window
    return model


@pytest.mark.parametrize(("outputs", "channels"), [(960, 576), (4096, 4096), (576, 1536), (22016, 1024), (300, 1100), (33, 77)])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_products(outputs: int, channels: int, dtype: torch.dtype) -> None:
    inputs = numbers(1, max(ROWS), channels, device="cuda", dtype=dtype, seed=0)
    weight = numbers(outputs, channels, device="cuda", dtype=dtype, seed=1)
    alone = torch.cat([_invariant.invariant_linear(inputs[:, row : row + 1], weight, None) for row in range(64)], dim=1)
    for rows in ROWS:
        found = _invariant.invariant_linear(inputs[:, :rows], weight, None)
        assert found[:, :64].equal(alone[:, :rows]), rows
        first, *others = _invariant.invariant_parts(inputs[:, :rows], weight, None)
        for part in others:
            first = first + part
        assert first.to(dtype).equal(found), rows


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_products_are_products(dtype: torch.dtype) -> None:
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for rows, outputs, channels in ((1, 4096, 4096), (7, 300, 1100), (130, 576, 1536), (600, 9000, 512)):
        found, expected = products("cuda", dtype, rows, outputs, channels, biased=rows > 1)
        torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize(
    ("length", "dtype"), [*((length, torch.bfloat16) for length in (0, 3, 16, 250, 255, 256, 1000)), (250, torch.float32)]
)
def test_attention(length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    group, channels = (3, 64) if length % 2 else (1, 128)
    case = TreeCase(length=length, tree="4x2x2x2x1x1x1", group=group, channels=channels, dtype=dtype)
    alone = case.alone("cuda")
    error = float((alone.double() - case.expected("cuda")).abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 1.6e-2), error
    for multiprocessors in (1, 10**6):  # at once, and with the splits apart
        monkeypatch.setattr(_invariant, "MULTIPROCESSORS", multiprocessors)
        assert case.in_a_tree("cuda")[0].equal(alone)
        assert all(row.equal(alone) for row in case.in_a_tree("cuda", batch=8, max_length=length + 8))
        for size in (1, 2, 9, 300):
            assert case.alone("cuda", size).equal(alone), size


PLANS = [
    *(AttendPlan(lines, 32, at_once) for lines in (16, 32) for at_once in (False, True)),
    AttendPlan(32, 16, at_once=False),
    AttendPlan(16, 32, at_once=False, warps=1),
    *(AttendPlan(lines, 64, at_once=False) for lines in (16, 32, 64)),
    AttendPlan(64, 64, at_once=True),
    AttendPlan(16, 64, at_once=False, warps=2, stages=4),
    AttendPlan(64, 16, at_once=False, stages=3),
    AttendPlan(64, 128, at_once=False, warps=8),
]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("length", "tree", "group", "channels"),
    [(300, "4x2x2x2x1x1", 1, 128), (700, "4x2x2x2x1", 3, 64), (509, "chain:40", 4, 128), (250, "2x2", 9, 64)],
)
def test_plans_change_no_bits(length: int, tree: str, group: int, channels: int, dtype: torch.dtype) -> None:
    case = TreeCase(length=length, tree=tree, group=group, channels=channels, dtype=dtype)
    alone = case.alone("cuda")
    for plan in PLANS[:6] if dtype == torch.float32 else PLANS:  # the others have no room
        assert case.in_a_tree("cuda", plan=plan)[0].equal(alone), plan


@pytest.mark.parametrize("window", [2, 20, 300])
def test_attention_through_a_window(window: int) -> None:
    case = TreeCase(length=500, tree="4x2x2x1x1", group=3, channels=64, window=window, dtype=torch.bfloat16)
    alone = case.alone("cuda")
    assert case.in_a_tree("cuda")[0].equal(alone) and case.alone("cuda", 64).equal(alone)


def one_by_one(model: HFModel, prompt: list[int], path: list[int]) -> Tensor:
    """Read a prompt, then a path token by token; return the logits behind its last."""
    context = model.start(1, 2048)
    context.prefill([prompt])
    block = Block(0, torch.zeros(1, 1, dtype=torch.long, device="cuda"), torch.ones(1, 1, 1, dtype=torch.bool, device="cuda"))
    for token in path:
        features = context.extend(torch.tensor([[token]], device="cuda"), block)
        context.rewind([context.lengths[0] + 1])
    return model.head(features)[0, 0]


@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.bfloat16, None), (torch.bfloat16, 100), (torch.float32, None)],
    ids=["whole", "window", "float32"],
)
@torch.inference_mode()
def test_every_node_has_the_logits_of_plain_decoding(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tables = llama(window=window, dtype=dtype), parse_tree("3x2x2x1x1").tables(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 16, 250, 255, 256, 300, 40, 511]
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]
    tokens = torch.randint(0, 512, (8, len(tables.depths_N)), generator=generator).to("cuda")
    block = Block(0, tables.depths_N.expand(8, -1), tables.ancestors_NN.expand(8, -1, -1))
    context = model.start(8, 2048)
    context.prefill(prompts)
    in_batch = model.head(context.extend(tokens, block))
    for row in range(8):
        single = model.start(1, 2048)
        single.prefill(prompts[row : row + 1])
        own = Block(0, block.depths_BT[:1], block.visible_BTU[:1])
        assert model.head(single.extend(tokens[row : row + 1], own))[0].equal(in_batch[row]), row
    for node in (0, 1, 5, len(tables.depths_N) - 1):
        for row in (0, 2, 4, 7):
            path = tokens[row, tables.ancestors_NN[node]].tolist()
            assert one_by_one(model, prompts[row], path).equal(in_batch[row, node]), (node, row)
            monkeypatch.setattr(language_model, "PREFILL_CHUNK", 37)
            assert one_by_one(model, [*prompts[row], *path[:-1]], path[-1:]).equal(in_batch[row, node]), (node, row)
            monkeypatch.undo()


def test_greedy_texts_are_those_of_plain_decoding() -> None:
    model, draft = llama(), llama(layers=1)
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 10, 20, 250, 30, 5, 64, 400)
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]
    plain = Decoder(model)
    expected = [plain.generate(prompt, sampling=GREEDY, max_new_tokens=80).token_ids for prompt in prompts]
    assert len({tuple(text) for text in expected}) == len(prompts)
    together = plain.generate(prompts, sampling=GREEDY, max_new_tokens=80)
    assert [result.token_ids for result in together] == expected
    for tree in ("chain:3", "4x2x1", "2x2x2x2x1", "fork:30x2"):
        decoder = Decoder(model, TreeDrafter(draft, parse_tree(tree)))
        together = decoder.generate(prompts, sampling=GREEDY, max_new_tokens=80)
        assert [result.token_ids for result in together] == expected, tree
        assert decoder.generate(prompts[3], sampling=GREEDY, max_new_tokens=80).token_ids == expected[3], tree


def test_what_cannot_be_invariant_says_so() -> None:
    with pytest.raises(UsageError, match="it computes in bfloat16 or float32, not in float16"):
        HFModel(FAMILIES.get("llama").build().to("cuda", torch.float16), invariant=True)
    with pytest.raises(UsageError, match="model type 'gpt2' runs by its own code"):
        HFModel(FAMILIES.get("gpt2").build().to("cuda", torch.bfloat16), invariant=True)
    assert HFModel(FAMILIES.get("llama").build().to("cuda", torch.bfloat16)).invariant
    assert not HFModel(FAMILIES.get("llama").build().to("cuda")).invariant, "float32 must be asked for"
