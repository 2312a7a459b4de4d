"""Slots of a tree: logits are those along the paths, whatever died and was moved; heads read as they were trained to."""

import random

import pytest
import torch

from families import FAMILIES
from polydraft.beam import BeamDecoder, text_log_probs
from polydraft.beam._node import Node
from polydraft.beam._reader import HeadReader, ModelReader, tree_reader
from polydraft.beam._slots import SlotTree
from polydraft.beam._workspace import BeamMemory
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason
from polydraft.models import HeadShape, TabularModel
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.trees import parse_tree

from .test_hugging_face import models


@torch.inference_mode()
def logits_after(model, texts):
    return torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", pytest.param("gemma2", marks=pytest.mark.slow), "opt"])
@torch.inference_mode()
def test_beams_that_die_leave_the_others_alone(name):
    """Grow and prune a random tree for many rounds, compacting all the time."""
    target, _ = models(name)
    rng = random.Random(1)
    prompt = [rng.randrange(3, 96) for _ in range(5)]
    tree, beams = SlotTree(BeamMemory(target, graphs=False)), [Node(prompt[-1])]
    context = tree.context
    context.prefill([prompt[:-1]])
    for _ in range(14):
        tree.read(beams)
        got = target.head(tree.features(beams))
        expected = logits_after(target.hf_model, [prompt + beam.tokens() for beam in beams])
        assert (got - expected).abs().max() < 1e-4
        forest = [rng.choice(beams).child(rng.randrange(3, 96)) for _ in range(6)]
        tree.read(forest)  # a draft's guesses, most of which die
        chosen = [*forest[:2], *(rng.choice(beams).child(rng.randrange(3, 96)) for _ in range(2))]
        beams = list(dict.fromkeys(chosen))[: rng.choice([1, 3, 4])]
        tree.keep(beams, slack=rng.choice([0, 0, 8]))
    assert context.lengths[0] > len(prompt)  # what all beams share has become text


@torch.inference_mode()
def test_one_beam_among_dead_ones_is_masked():
    target, _ = models("llama")
    tree, root = SlotTree(BeamMemory(target, graphs=False)), Node(7)
    tree.context.prefill([[5, 6]])
    tree.read([root.child(8), root.child(9), root.child(10)])
    only = root.child(9).child(11)
    tree.read([only])
    expected = logits_after(target.hf_model, [[5, 6, 7, 9, 11]])
    assert (target.head(tree.features([only])) - expected).abs().max() < 1e-4


def target_and_head(window=12):
    target = HFModel(FAMILIES.get("llama").build(seed=1))
    config = target.config
    shape = HeadShape(
        hidden_size=target.hidden_size,
        taps=(1, 2),
        num_heads=config.num_attention_heads,
        num_key_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        mlp_size=48,
        window=window,
    )
    torch.manual_seed(2)
    vocabulary = PartialVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    head = new_head(shape, target, vocabulary, "test").requires_grad_(False)
    target.tap(shape.taps)
    return target, head


@pytest.mark.parametrize("prompt", [[5, 9, 2, 44, 17], [5, 9], [7]])
@torch.inference_mode()
def test_heads_read_true_features_where_there_are_some(prompt):
    """After rounds of drafts, deaths and moves a head says of a text what a fresh one says that reads it in one go."""
    target, head = target_and_head()

    def begun(text):
        reader, tree = HeadReader(BeamMemory(head, graphs=False)), SlotTree(BeamMemory(target, graphs=False))
        tree.context.prefill([text[:-1]], reader.observer)
        root = Node(text[-1])
        reader.begin(text, root, tree)
        return reader, tree, root

    rng = random.Random(4)
    reader, tree, root = begun(prompt)
    beams = [root]
    for _ in range(7):
        got = reader.logits(beams)
        if beams != [root] or len(prompt) > 1:
            for row, beam in enumerate(beams):
                fresh, _, leaf = begun(prompt + beam.tokens())
                assert (got[row] - fresh.logits([leaf])[0]).abs().max() < 1e-4
        forest = [beam.child(rng.randrange(3, 96)) for beam in beams for _ in range(2)]
        reader.logits(forest)
        tree.read([*beams, *forest])
        beams = [forest[0].child(rng.randrange(3, 96)), forest[-1].child(rng.randrange(3, 96))]
        tree.keep(beams, slack=rng.choice([0, 40]))
        reader.keep(beams)
        reader.tree.keep(beams, slack=0)


@torch.inference_mode()
def test_heads_read_guesses_one_after_another():
    """Below nodes that the target has not passed an entry needs the head's own output for its parent, also unasked."""
    target, head = target_and_head()
    results = []
    for stepwise in (True, False):
        reader, tree = HeadReader(BeamMemory(head, graphs=False)), SlotTree(BeamMemory(target, graphs=False))
        tree.context.prefill([[5, 9, 2, 44]], reader.observer)
        root = Node(17)
        reader.begin([5, 9, 2, 44, 17], root, tree)
        one, other = root.child(30).child(31), root.child(40)
        for level in ([root], [root.child(30), other], [one]) if stepwise else ():
            reader.logits(level)
        results.append(reader.logits([one.child(32), other]))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.parametrize("draft", ["head", "early", "noisy"])
def test_every_kind_of_draft_gives_the_same_search(draft):
    target, head = target_and_head()
    _, noisy = models("llama")
    drafter = TreeDrafter(head, parse_tree("1")) if draft == "head" else TreeDrafter(noisy, parse_tree("1"))
    if draft == "early":
        from polydraft.models.hf import early_exit

        drafter = TreeDrafter(early_exit(target, 2), parse_tree("1"))
    for prompt in ([4, 8, 15], [7]):
        plain = BeamDecoder(Decoder(target)).search(prompt, beams=3, max_new_tokens=24, num_return_sequences=3)
        options = dict(beams=3, max_new_tokens=24, num_return_sequences=3, draft_width=6)
        drafted = BeamDecoder(Decoder(target, drafter)).search(prompt, **options)
        assert [text.token_ids for text in drafted.texts] == [text.token_ids for text in plain.texts]


def test_readers_are_chosen_by_the_draft():
    target, head = target_and_head()
    of_head, of_model = (tree_reader(BeamMemory(draft, graphs=False)) for draft in (head, target))
    assert isinstance(of_head, HeadReader) and of_head.observer is not None, "it reads the target's features of the prompt"
    assert isinstance(of_model, ModelReader) and of_model.observer is None


def test_log_probabilities_are_the_models_own():
    target, noisy = models("llama")
    prompt = [4, 8, 15, 16]
    decoder = BeamDecoder(Decoder(target, TreeDrafter(noisy, parse_tree("1"))))
    sampling = SamplingParams(temperature=1.4, top_k=9)
    texts = decoder.sample(prompt, beams=3, max_new_tokens=9, num_return_sequences=3, sampling=sampling, seed=1).texts
    with torch.inference_mode():
        for text in texts:
            logits = target.hf_model(torch.tensor([prompt + text.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(text.token_ids)[:, None])[:, 0]
            assert torch.tensor(text.log_probs) == pytest.approx(expected, abs=1e-4)
    again = text_log_probs(target, prompt, [text.token_ids for text in texts])
    assert [value for row in again for value in row] == pytest.approx(
        [value for text in texts for value in text.log_probs], abs=1e-4
    )


def test_what_was_streamed_is_the_best_text():
    """Settled tokens come before the end, and none is taken back."""
    target = TabularModel.random(12, 2, seed=3, sharpness=4.0)
    draft = target.mixed_with(TabularModel.random(12, 2, seed=4), 0.7)
    beams = BeamDecoder(Decoder(target, TreeDrafter(draft, parse_tree("1"))))
    for mode, sampling in (("search", None), ("sample", SamplingParams())):
        stream = beams.stream([1, 2], mode=mode, beams=3, max_new_tokens=24, sampling=sampling, seed=3)
        events = list(stream)
        best = stream.result().best
        assert [event.token_id for event in events] == best.token_ids
        assert events[-1].stop_reason is StopReason.LENGTH and not any(event.stop_reason for event in events[:-1])
        assert [event.round for event in events] == sorted(event.round for event in events)
        assert stream.stats.new_tokens == len(events)
    early = beams.stream([1, 2], beams=3, max_new_tokens=24)
    first = next(early)
    early.close()
    result = early.result()
    assert result.best.token_ids[0] == first.token_id and result.best.stop_reason is StopReason.CANCELLED


def test_the_context_ends_a_text():
    target, noisy = models("llama")
    decoder = BeamDecoder(Decoder(target, TreeDrafter(noisy, parse_tree("1"))))
    result = decoder.search([9] * 120, beams=2, max_new_tokens=50)
    assert len(result.best.token_ids) == 8 and result.best.stop_reason is StopReason.CONTEXT
