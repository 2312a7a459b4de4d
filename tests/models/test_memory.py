"""Shared beginnings of texts are read once."""

import copy

import pytest
import torch

from families import FAMILIES
from models.recurrent_cases import CASES, build
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models import Memory, TabularModel
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.sampling import SamplingParams
from polydraft.trees import causal_block, parse_tree


def counting(model):
    """Count the tokens that pass through each of the model's contexts."""
    passed = []
    start = model.start

    def counted_start(batch_size, capacity):
        context = start(batch_size, capacity)
        extend = context.extend

        def counted_extend(tokens_BT, block):
            passed.append(tokens_BT.numel())
            return extend(tokens_BT, block)

        context.extend = counted_extend
        return context

    model.start = counted_start
    return passed


def next_logits(model, memory, texts):
    block = causal_block(len(texts), 1, torch.device("cpu"))
    return model.head(memory.context.extend(torch.tensor([[text[-1]] for text in texts]), block))[:, 0]


def test_only_what_is_new_is_read():
    model = TabularModel.random(9, 2, seed=0)
    passed = counting(model)
    memory = Memory(model, 1, behind=1, places=4)
    memory.align([[1, 2, 3, 4, 5]], longest=20)
    assert sum(passed) == 4, "all but the pending token"
    passed.clear()
    memory.align([[1, 2, 3, 4, 5, 6, 7]], longest=20)
    assert sum(passed) == 2
    passed.clear()
    memory.align([[1, 2, 8, 4, 5, 6]], longest=20)
    assert sum(passed) == 3, "8, 4 and 5: everything from the first difference on"
    passed.clear()
    memory.align([[1, 2, 8]], longest=20)
    assert sum(passed) == 0, "a shorter text is only cut"
    assert torch.equal(next_logits(model, memory, [[1, 2, 8]])[0], model.logits_after([1, 2, 8]))


def test_rows_keep_their_own_beginnings():
    model = TabularModel.random(9, 2, seed=1)
    memory = Memory(model, 2, behind=1, places=4)
    memory.align([[1, 2, 3], [4, 5, 6, 7, 8]], longest=20)
    texts = [[1, 2, 3, 3, 1], [4, 5, 0]]
    memory.align(texts, longest=20)
    assert memory.context.lengths == [4, 2]
    got = next_logits(model, memory, texts)
    for row, text in enumerate(texts):
        assert torch.equal(got[row], model.logits_after(text))


def test_texts_shorter_than_the_delay_hold_nothing():
    model = TabularModel.random(5, 1, seed=2)
    memory = Memory(model, 1, behind=2, places=4)
    memory.align([[3]], longest=8)
    assert memory.context.lengths == [0]
    memory.settle([[3, 1, 2]])
    assert memory.context.lengths == [1]
    memory.rewind([[3]])
    assert memory.context.lengths == [0] and memory.context.lengths_B.tolist() == [0]


def test_a_kept_memory_continues_a_conversation(tiny, perturbed):
    """The second turn passes its own tokens through the target, not the first turn's."""
    target, draft = tiny("llama"), perturbed("llama", 0.1)
    params = SamplingParams(temperature=0)
    decoder = Decoder(target, TreeDrafter(draft, parse_tree("2x1")))
    prompt = [5, 9, 33, 41, 8, 70, 12, 13, 14, 15]
    first = decoder.stream(prompt, sampling=params, max_new_tokens=8, keep=True)
    text = prompt + [event.token_id for event in first]
    question = [21, 22, 23]
    fresh = Decoder(target).generate(text + question, sampling=params, max_new_tokens=6)
    context = decoder._kept[1].memory.context
    passed = []
    extend = context.extend
    context.extend = lambda tokens_BT, block: passed.append(tokens_BT.shape[1]) or extend(tokens_BT, block)
    second = decoder.stream(text + question, sampling=params, max_new_tokens=6, keep=True)
    assert sum(passed) <= len(question) + 1, "the last token of the first turn was pending still"
    assert [event.token_id for event in second] == fresh.token_ids


def test_an_interrupted_read_leaves_nothing_wrong_behind(monkeypatch):
    monkeypatch.setattr("polydraft.models.language_model.PREFILL_CHUNK", 4)
    model = TabularModel.random(9, 2, seed=0)
    memory = Memory(model, 1, behind=1, places=4)
    old, new = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [1, 2, 8, 7, 6, 5, 4, 3, 2, 1]
    memory.align([old], longest=16)
    extend, passes = memory.context.extend, iter([None])

    def interrupted(tokens_BT, block):
        if next(passes, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return extend(tokens_BT, block)

    memory.context.extend = interrupted
    with pytest.raises(KeyboardInterrupt):
        memory.align([new], longest=16)
    memory.context.extend = extend
    memory.align([old], longest=16)
    assert torch.equal(next_logits(model, memory, [old])[0], model.logits_after(old))


@pytest.mark.parametrize("native", [True, False])
def test_a_new_text_is_read_in_its_own_row_alone(native):
    model = HFModel(FAMILIES.get("llama").build(seed=3), native=native)
    texts = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24]]
    seen = []

    extend = HFContext.extend

    def counted(self, tokens_BT, block):
        seen.append(tuple(tokens_BT.shape))
        return extend(self, tokens_BT, block)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        memory = Memory(model, 3, behind=1, places=4)
        memory.align(texts, 32)
        patch.setattr(HFContext, "extend", counted)
        memory.align([texts[0], [31, 32, 33, 34, 35, 36], texts[2]], 32)
        assert seen == [(1, 5)]
        fresh = Memory(model, 3, behind=1, places=4)
        fresh.align([texts[0], [31, 32, 33, 34, 35, 36], texts[2]], 32)
        block = causal_block(3, 1, model.device)
        last_B1 = torch.tensor([[9], [36], [24]])
        torch.testing.assert_close(memory.context.extend(last_B1, block), fresh.context.extend(last_B1, block))
    assert memory.context.lengths == fresh.context.lengths == [4, 5, 3]


def filled(context, model, seed):
    """Let a context read two texts, pass a tree and commit a path; return what it says of the texts then."""
    chance = torch.Generator().manual_seed(seed)
    texts = torch.randint(5, 60, (2, 12), generator=chance).tolist()
    context.reserve(40)
    context.rewind([0, 0])
    context.prefill([texts[0], texts[1][:7]])
    context.extend(torch.tensor([text[:3] for text in texts]), causal_block(2, 3, context.device))
    context.commit(torch.tensor([[0, 1], [0, 1]]), torch.tensor([2, 1]))
    context.settle([14, 8])
    return model.head(context.extend(torch.tensor([[9], [8]]), causal_block(2, 1, context.device)))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neo", "lfm2", "mamba2"])
@torch.inference_mode()
def test_storage_changes_hands(tiny, kind):
    """A context that takes over another one's storage has no more of it, and knows nothing of what was there."""
    model = HFModel(build(kind)) if kind in CASES else tiny(kind)
    first, second = model.start(2, 4), model.start(2, 4)
    filled(first, model, 1)
    size = first.nbytes
    assert size > 0 and second.adopt(first) and second.nbytes == size
    expected = filled(model.start(2, 4), model, 2)
    assert torch.equal(filled(second, model, 2), expected)
    assert second.nbytes == size and second.address != 0
    for row in range(2):
        second.cache.clear(row)
    assert torch.equal(filled(second, model, 2), expected)
    assert not model.start(3, 4).adopt(second), "another number of rows"
    assert not (HFModel(build(kind)) if kind in CASES else copy.copy(model)).start(2, 4).adopt(second), "another model"


def test_captured_passes_read_each_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin and rows that go on are read apart; one that has begun a moment ago is not one that goes on."""
    model = HFModel(FAMILIES.get("llama").build())
    context, expected = model.start(3, 64), model.start(3, 64)
    texts, more = [[5, 6, 7], [8], []], [[], [9, 10], [11, 12, 13]]
    asked: list[list[int]] = []

    def replayed(self: HFContext, parts: list[list[int]], rows: list[int]) -> torch.Tensor:
        """Stand in for a captured pass, which a CPU does not have: read these rows and leave lengths to the caller."""
        asked.append(list(rows))
        (row,), (part,) = rows, parts
        tokens_1T = torch.tensor([part])
        return self.part(slice(row, row + 1)).extend(tokens_1T, causal_block(1, len(part), self.device))

    with torch.inference_mode():
        for one in (context, expected):
            one.prefill(texts)
        expected.prefill(more)
        monkeypatch.setattr(HFContext, "_replayed", replayed)
        context.prefill(more)
        assert asked == [[2], [1]]
        assert context.lengths == expected.lengths == context.lengths_B.tolist() == [3, 3, 3]
        block, tokens_31 = causal_block(3, 1, context.device), torch.tensor([[4], [4], [4]])
        torch.testing.assert_close(context.extend(tokens_31, block), expected.extend(tokens_31, block))
