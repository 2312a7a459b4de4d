"""An int8 copy of the target drafts in the target's own memory, and leaves nothing there."""

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import polydraft
from covering import covering, keeping
from families import FAMILIES
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.draft import Parts, TreeDrafter, make_drafter
from polydraft.draft.copy_source import CopySource
from polydraft.draft.ladder import Ladder
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel
from polydraft.models.int8_copy import Int8Copy
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_dynamic, parse_tree

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 6, 7, 8], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
TREES = ["chain:3", "3x2x1", "dynamic:8:5:fixed", "dynamic:12"]


def decoder(target: HFModel, tree: str, drafter: str = "auto") -> Decoder:
    dynamic = parse_dynamic(tree)
    topology = parse_tree("none" if dynamic else tree)
    parts = Parts(draft=Int8Copy(target), topology=topology, dynamic=dynamic)
    return Decoder(target, make_drafter(parts, drafter))


@pytest.mark.parametrize(("name", "tree"), covering(list(FAMILIES), TREES))
def test_greedy_texts_are_plain_ones(name: str, tree: str) -> None:
    target = HFModel(FAMILIES.get(name).build())
    plain = Decoder(target).generate(PROMPTS, sampling=GREEDY, max_new_tokens=16)
    found = decoder(target, tree).generate(PROMPTS, sampling=GREEDY, max_new_tokens=16)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    if "fixed" in tree or "dynamic" not in tree:
        assert found[0].stats.tokens_per_pass > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_go_on_where_others_end(dtype: torch.dtype) -> None:
    """Rows that end early, n-grams beside the copy, and a kept memory."""
    target = HFModel(FAMILIES.get("llama").build().to(dtype))
    limits = [3, 20, 9]
    plain = Decoder(target).generate(PROMPTS, sampling=GREEDY, max_new_tokens=limits)
    for drafter in ("auto", "suffix+model"):
        ours = decoder(target, "3x2x1", drafter)
        for _ in range(2):
            found = ours.generate(PROMPTS, sampling=GREEDY, max_new_tokens=limits, keep=True)
            assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_rounds_without_candidates_take_no_pass_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many texts at a time nothing is drafted; then the default must not be slower than plain decoding."""
    target, passes = HFModel(FAMILIES.get("llama").build()), []
    extend = CopySource._extend
    monkeypatch.setattr(CopySource, "_extend", lambda source, *inputs: passes.append(1) or extend(source, *inputs))
    plain = Decoder(target).generate(PROMPTS, sampling=GREEDY, max_new_tokens=16)
    for place, expected in ((0, 0), (1, plain[0].stats.rounds // 2)):
        passes.clear()
        monkeypatch.setattr(Ladder, "guess", lambda ladder, rows, place=place: place)
        monkeypatch.setattr(Ladder, "best", lambda ladder, rows, situation, place=place: place)
        drafter = TreeDrafter(Int8Copy(target), parse_tree("2x1"), by_load=True)
        found = Decoder(target, drafter).generate(PROMPTS, sampling=GREEDY, max_new_tokens=16)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert len(passes) == expected


@pytest.mark.parametrize("tree", keeping(TREES[:-1], TREES[1]))
def test_sampled_texts_follow_the_target(tree: str) -> None:
    target, prompt, samples = HFModel(FAMILIES.get("llama").build(seed=2)), [5, 6, 7], 3000
    sampling = SamplingParams(temperature=1.3, top_k=3)
    found = decoder(target, tree).generate([prompt] * samples, sampling=sampling, max_new_tokens=3, seed=7)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in expected.items():
            logits_V = target.plain(torch.tensor([[*prompt, *text]]))[0, -1].double() / sampling.temperature
            best_K, token_K = logits_V.topk(3)
            for token, share in zip(token_K.tolist(), torch.softmax(best_K, -1).tolist(), strict=True):
                longer[*text, token] = chance * share
        expected = longer
    counts = np.array([sum(tuple(one.token_ids) == text for one in found) for text in expected])
    assert counts.sum() == samples
    assert chi_square_p_value(counts, np.array(list(expected.values()))) > 1e-5
    assert found[0].stats.tokens_per_pass > 1.2


def test_the_target_keeps_its_weights(roomy: str) -> None:
    plain = polydraft.load(roomy, "none", dtype="float32")
    ours = polydraft.load(roomy, "int8", dtype="float32", tree="chain:3")
    assert isinstance(ours.drafter.model, Int8Copy)
    before = [parameter.clone() for parameter in plain.target.hf_model.parameters()]
    ours.generate("Good morning", sampling=GREEDY, max_new_tokens=24)
    for one, other in zip(before, ours.target.hf_model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_copied_says_so(roomy: str) -> None:
    with pytest.raises(UsageError, match="draft 'int8' does not work here: the target is in int8 already; use a draft model"):
        polydraft.load(roomy, "int8", dtype="int8")
    with pytest.raises(UsageError, match="compiled code, which is switched off"):
        polydraft.load(roomy, "int8", dtype="float32", native=False)
    with pytest.raises(UsageError, match="recurrent layers"):
        Int8Copy(HFModel(MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1))))
