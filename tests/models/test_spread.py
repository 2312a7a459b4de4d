"""Targets on several devices: memory stays with its layer, texts stay the same, and what cannot work is said."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from covering import covering
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import HeadShape
from polydraft.models.cache import SlotCache, SpreadCache
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import check_device_map
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]
PARTS = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(3)), "model.norm", "model.rotary_emb", "lm_head"]

needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")


def offloaded(folder: str, tmp_path, *parts: str) -> HFModel:
    """A target some of whose parts are on disk and fetched by hooks when they are needed."""
    layout = {part: "disk" if part in parts else "cpu" for part in PARTS}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=layout, offload_folder=str(tmp_path), dtype=torch.float32)
    assert any(parameter.is_meta for parameter in model.parameters())
    return HFModel(model)


def texts(target: HFModel, drafter=None, temperature: float = 0.0) -> list[list[int]]:
    sampling = SamplingParams(temperature=temperature)
    return [one.token_ids for one in Decoder(target, drafter).generate(PROMPTS, sampling=sampling, max_new_tokens=10, seed=3)]


class Twins:
    """The same deeds on one cache for all layers and on one a layer."""

    def __init__(self) -> None:
        self.caches = [SlotCache(2, 9), SpreadCache(2, 9)]
        self._generator = torch.Generator().manual_seed(0)

    def write(self, slots_BT: Tensor, first_slot: int | None, used: int) -> None:
        """Write, and compare all that is stored."""
        states = torch.randn(2, 2, len(slots_BT), 3, slots_BT.shape[1], 4, generator=self._generator)
        seen = []
        for cache in self.caches:
            cache.aim(slots_BT, first_slot, used)
            seen.append([part for layer in range(2) for part in cache.update(*states[layer], layer)])
        for one, other in zip(*seen, strict=True):
            assert torch.equal(one, other)
        assert self.caches[0].nbytes == self.caches[1].nbytes > 0


def test_a_cache_a_layer_holds_what_one_cache_holds():
    twins, rows = Twins(), torch.arange(2)[:, None]
    twins.write(rows + torch.arange(4), None, 6)
    for cache in twins.caches:
        cache.move(rows + torch.tensor([[2, 3]]), rows + torch.tensor([[0, 1]]))
        cache.grow(14)
    twins.write(torch.arange(6, 11).expand(2, -1), 6, 11)


@needs_accelerate
@pytest.mark.parametrize(("where", "temperature"), covering(["a layer", "the ends"], [0.0, 1.0]))
def test_texts_of_a_target_with_hooks_are_the_same(roomy, tmp_path, where, temperature):
    parts = ("model.layers.1",) if where == "a layer" else ("model.embed_tokens", "model.layers.0", "lm_head")
    whole = load_model(roomy, CPU, torch.float32).model
    target = offloaded(roomy, tmp_path, *parts)
    assert target.device == CPU and target.graph_obstacle == "parts of the model are offloaded"
    assert whole.graph_obstacle is None and whole.spread is None
    tree = TreeDrafter(early_exit(whole, 2), parse_tree("3x2x1"))
    assert texts(target, temperature=temperature) == texts(whole, temperature=temperature)
    assert texts(target, tree, temperature) == texts(whole, tree, temperature)


@needs_accelerate
def test_drafts_for_a_target_with_hooks(roomy, tmp_path):
    target = offloaded(roomy, tmp_path / "layer", "model.layers.1")
    shape = HeadShape(hidden_size=32, taps=(1, 2), num_heads=2, num_key_heads=1, head_size=8, mlp_size=16, window=8)
    head = new_head(shape, target, None, "test").requires_grad_(False)
    target.tap(shape.taps)
    assert texts(target, TreeDrafter(head, parse_tree("3x2"))) == texts(load_model(roomy, CPU, torch.float32).model)
    with pytest.raises(UsageError, match="offloaded; use a draft model"):
        early_exit(target, 2)
    with pytest.raises(UsageError, match="offloaded; use a draft model"):
        new_head(shape, offloaded(roomy, tmp_path / "table", "lm_head"), None, "test")


@needs_accelerate
def test_by_device_map(roomy):
    loaded = load_model(roomy, CPU, torch.float32, device_map="auto")
    assert load_draft(roomy, loaded).device == loaded.model.device
    assert texts(loaded.model)[0] and loaded.model.graph_obstacle is None, "all on one device: nothing is lost"


@pytest.mark.parametrize(
    ("device_map", "device", "reason"),
    [("everywhere", "auto", "balanced_low_0"), ("auto", "cuda:1", "leave out --device"), ("tp", "auto", "torchrun")],
)
def test_layouts_that_cannot_be(device_map, device, reason, invoke):
    with pytest.raises(UsageError, match=reason):
        check_device_map(device_map, device)
    code, _, err = invoke("generate", "hello", "--device-map", device_map, "--device", device)
    assert code == 2 and reason in err and err.count("\n") == 1


def test_accelerate_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install accelerate"):
        check_device_map("auto", "auto")


def test_an_inflated_target_is_built_in_one_place():
    with pytest.raises(UsageError, match="one device"):
        load_model("inflated:7b", CPU, torch.float32, device_map="auto")


@pytest.mark.slow
def test_tensor_parallel_processes_write_the_same_text(roomy, tmp_path):
    options = ["generate", "hello there", "--target", roomy, "--draft", roomy, "--tree", "2x2", "--dtype", "float32"]
    # A draft that is the target itself: races order tokens by p/q, which is all rounding here, and rounding differs.
    options += ["--max-new-tokens", "12", "--temperature", "1", "--raw", "--scheme", "rrs-wor"]
    plain = subprocess.run(
        [sys.executable, "-m", "polydraft", *options], capture_output=True, text=True, timeout=120, check=True
    )
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0", "-m", "polydraft"]
    together = subprocess.run(
        [sys.executable, *start, *options, "--device-map", "tp"], capture_output=True, text=True, timeout=240, check=True
    )
    assert plain.stdout.strip() and plain.stdout.strip() in together.stdout


EVERY_SCHEME = """
import json, os, sys
from polydraft.draft import TreeDrafter
from polydraft.loading import load
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES
from polydraft.trees import parse_tree

split = "RANK" in os.environ
decoder = load(sys.argv[1], sys.argv[2], tree="2x1", dtype="float32", device_map="tp" if split else None)
texts = {}
for name in SCHEMES:
    most = SCHEMES.get(name).max_children
    tree = parse_tree("chain:3" if most == 1 else "2x1")
    own = decoder.replace(drafter=TreeDrafter(decoder.drafter.model, tree, name))
    for temperature in (0.0, 0.8):
        asked = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 10, "seed": 3}
        results = own.generate([[5, 6, 7, 8], [9, 10, 11]], **asked)
        texts[f"{name} {temperature}"] = [one.token_ids for one in results]
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(texts))
"""


@pytest.mark.slow
def test_every_scheme_writes_the_same_over_two_processes(roomy, tmp_path):
    """Hugging Face's plan splits the target; every process drafts and verifies for itself, by the same random numbers."""
    script, draft = tmp_path / "script.py", tmp_path / "draft"
    script.write_text(EVERY_SCHEME)
    shutil.copytree(roomy, draft)
    model, generator = AutoModelForCausalLM.from_pretrained(roomy), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(draft)
    found = [
        subprocess.run(
            [sys.executable, *way, str(script), roomy, str(draft)], capture_output=True, text=True, timeout=400, check=True
        )
        for way in ([], ["-m", "torch.distributed.run", "--nproc-per-node", "2"])
    ]
    alone, together = (
        json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in (one.stdout for one in found)
    )
    assert len(alone) >= 20 and together == alone
