"""What only an accelerator can show: run with `pytest -m gpu tests/gpu`."""

import warnings

import pytest
import torch

from exactness.configurations import SCHEMES_AND_WALKS
from exactness.setups import tree_for
from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Stats
from polydraft.engine.round import run_round
from polydraft.lab.theory import Costs
from polydraft.models import HeadShape, TabularModel
from polydraft.models.heads.feature_head import ENDLESS
from polydraft.models.heads.head_folder import new_head
from polydraft.models.heads.parallel_head import DFlashHead, ParallelShape, PEagleHead
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.trees import DynamicShape, Topology, parse_tree
from verify.test_at_once import check_same, round_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PAIRS = SCHEMES_AND_WALKS
COSTS = Costs(draft_level=0.05, tree_pass=lambda nodes: 1 + 0.003 * nodes)
"""Of dynamic trees: nothing to measure, and worth drafting."""
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]


def perturbed(name: str, device: str) -> HFModel:
    model = FAMILIES.get(name).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return HFModel(model.to(device))


def head_tree(target: HFModel, tree: Topology | DynamicShape | None = None) -> TreeDrafter:
    shape = HeadShape(
        hidden_size=target.hidden_size, taps=(1,), num_heads=2, num_key_heads=1, head_size=16, mlp_size=32, window=16
    )
    known = PartialVocabulary(torch.arange(0, target.vocab_size, 2, device="cuda"), target.vocab_size)
    head = new_head(shape, target, known, "test").to("cuda").requires_grad_(False)
    target.tap(shape.taps)
    return TreeDrafter(head, tree or parse_tree("4x2x1"), costs=COSTS)


def parallel_tree(target: HFModel, kind: str, tree: Topology | DynamicShape) -> TreeDrafter:
    sizes: dict[str, int] = {"num_heads": 2, "num_key_heads": 1, "head_size": 16, "mlp_size": 32, "depths": 5, "mask_token": 1}
    form: dict[str, bool] = {"joins": False, "reads_last": False, "normed_output": False, "root_drafts": False}
    shape = ParallelShape(**sizes, **form, taps=(1,), hidden_size=target.hidden_size, window=16, layer_windows=(16, ENDLESS))
    known = PartialVocabulary(torch.arange(0, target.vocab_size, 2, device="cuda"), target.vocab_size)
    torch.manual_seed(0)
    head = new_head(shape, target, known, "test", {"peagle": PEagleHead, "dflash": DFlashHead}[kind])
    head.to("cuda").requires_grad_(False)
    target.tap(shape.taps)
    return TreeDrafter(head, tree, costs=COSTS)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_greedy_text_equals_hugging_face_generate(name: str) -> None:
    model = FAMILIES.get(name).build().to("cuda")
    decoder = Decoder(HFModel(model), TreeDrafter(perturbed(name, "cuda"), parse_tree("4x2x1")))
    results = decoder.generate(PROMPTS, max_new_tokens=24, sampling=SamplingParams(temperature=0))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["model", "head", "dynamic", "dynamic-head"])
def test_a_round_never_waits_for_the_device(name: str, temperature: float, kind: str) -> None:
    if kind.endswith("head") and name == "gemma2":
        pytest.skip("gemma2's soft cap hides its hidden states")
    target = HFModel(FAMILIES.get(name).build().to("cuda"))
    tree = DynamicShape(nodes=24, depth=4) if kind.startswith("dynamic") else parse_tree("4x2x1")
    drafter = head_tree(target, tree) if kind.endswith("head") else TreeDrafter(perturbed(name, "cuda"), tree, costs=COSTS)
    check_without_waiting(Decoder(target, drafter), temperature)


@pytest.mark.parametrize(("scheme", "walk"), PAIRS)
def test_no_walk_waits_for_the_device(scheme: str, walk: str) -> None:
    drafter = TreeDrafter(perturbed("llama", "cuda"), parse_tree(tree_for(scheme, "4x2x1")), scheme)
    check_without_waiting(Decoder(HFModel(FAMILIES.get("llama").build().to("cuda")), drafter, walk=walk), 1.0)


@pytest.mark.parametrize(("scheme", "walk"), PAIRS)
@pytest.mark.parametrize("known", [True, False], ids=["part of the tokens", "all tokens"])
def test_a_round_is_verified_as_on_the_cpu(scheme: str, walk: str, known: bool) -> None:
    check_same(*(round_of(scheme, walk, SamplingParams(), known, device=device)() for device in ("cpu", "cuda")))


@pytest.mark.parametrize(("scheme", "walk", "temperature"), [*((*pair, 1.0) for pair in PAIRS), ("top", "node", 0.0)])
def test_verification_fits_into_a_cuda_graph(scheme: str, walk: str, temperature: float) -> None:
    verify = round_of(scheme, walk, SamplingParams(temperature=temperature), rows=2, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            expected = verify()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verdict = verify()
        graph.replay()
        torch.cuda.synchronize()
    check_same(verdict, expected)


def check_without_waiting(decoder: Decoder, temperature: float) -> None:
    """Run a round in which a look at the device is an error."""
    params = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, repetition_penalty=1.2)
    stream = decoder.stream(PROMPTS, sampling=params, max_new_tokens=40, seed=0)
    next(stream)  # warm-up: tables and libraries
    run = stream.engine
    uniforms_BU = run.slots.noise.uniforms(run.workspace.num_uniforms(run.walk))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            run_round(run.workspace.state, run.walk, uniforms_BU, Stats())
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("scheme", "walk"), PAIRS)
def test_same_seed_gives_the_same_text_on_both_devices(scheme: str, walk: str) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        table = TabularModel.random(32, 2, seed=0)
        other = TabularModel.random(32, 2, seed=1)
        target = TabularModel(table.logits_XV.to(device).reshape(32, 32, 32))
        blend = table.mixed_with(other, 0.7)
        draft = TabularModel(blend.logits_XV.to(device).reshape(32, 32, 32))
        decoder = Decoder(target, TreeDrafter(draft, parse_tree(tree_for(scheme)), scheme), walk=walk)
        texts.append([result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=60, seed=7)])
    assert texts[0] == texts[1]
