"""Models with recurrent layers: trees as along their paths, texts as `generate` writes them, memories that cannot be cut."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covering import keeping
from exactness.test_slots import finish, open_engine, sequence
from models.recurrent_cases import CASES, build, noisy, wrapped
from polydraft.beam import BeamDecoder
from polydraft.certify.chi_square import FALSE_ALARM, chi_square_p_value
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.models.odd.recurrent_context import RecurrentContext
from polydraft.sampling import SamplingParams
from polydraft.trees import DraftTree, causal_block, parse_dynamic, parse_tree

GREEDY = SamplingParams(temperature=0)
FEW = ["lfm2", "qwen3_next", "falcon_h1", "jamba", "mamba"]
"""One of each kind of layer. By default each is compared with `generate` once, captured or not; all is in the slow tests."""
PROMPTS = [torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 20, 3)]

TREES = ["1x1x1x1", "3x2x1"]
PAIRS = list(itertools.product(FEW, ["none", *TREES]))


def plain(model, prompt, count=24):
    tokens_BT = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(tokens_BT), "pad_token_id": 0}  # which texts of a model may hold, too
    return model.generate(tokens_BT, do_sample=False, max_new_tokens=count, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("model_type", "tree"),
    keeping(list(itertools.product(CASES, TREES)), ("lfm2", "3x2x1")),
)
def test_texts_are_those_of_generate(model_type, tree):
    model = build(model_type)
    target, draft = wrapped(model), wrapped(noisy(model))
    assert isinstance(target.start(1, 8), RecurrentContext)
    expected = [plain(model, prompt, 16) for prompt in PROMPTS]
    assert len(set(expected[0])) > 5
    decoder = Decoder(target, TreeDrafter(draft, parse_tree(tree)))
    for rows in ([0], [0, 1, 2]):
        results = decoder.generate([PROMPTS[row] for row in rows], sampling=GREEDY, max_new_tokens=16)
        assert [result.token_ids for result in results] == [expected[row] for row in rows]
        assert results[0].stats.tokens_per_pass > 1  # some drafts were accepted, so that states of nodes were kept


@pytest.mark.parametrize("model_type", keeping(["lfm2", "falcon_h1"], "lfm2"))
def test_the_first_layers_are_a_draft(model_type):
    model = build(model_type)
    target = wrapped(model)
    draft = early_exit(target, target.num_layers - 1)
    assert len(draft.hf_model.model.layers) == target.num_layers - 1
    result = Decoder(target, TreeDrafter(draft, parse_tree("2x1"))).generate(PROMPTS[0], sampling=GREEDY, max_new_tokens=12)
    assert result.token_ids == plain(model, PROMPTS[0], 12)


@pytest.mark.parametrize("model_type", keeping(["lfm2", "mamba"], "mamba"))
def test_a_text_that_is_cut_is_read_anew(model_type):
    """A later prompt shares a beginning with an earlier one, ends before it, goes on from it, or has nothing to do with it."""
    model = build(model_type)
    decoder = Decoder(wrapped(model), TreeDrafter(wrapped(noisy(model)), parse_tree("2x1")))
    first = decoder.generate(PROMPTS[1], sampling=GREEDY, max_new_tokens=9).token_ids
    assert first == plain(model, PROMPTS[1], 9)
    for prompt in (PROMPTS[1] + first, PROMPTS[1][:12], PROMPTS[1][:12] + PROMPTS[0], PROMPTS[2], PROMPTS[2]):
        assert decoder.generate(prompt, sampling=GREEDY, max_new_tokens=9).token_ids == plain(model, prompt, 9)


@pytest.mark.parametrize("model_type", keeping(CASES, "qwen3_next"))
def test_a_second_turn_is_that_of_generate(model_type):
    """What is new of it is read from a state that is not empty, by several tokens at once or one by one."""
    model = build(model_type)
    decoder = Decoder(wrapped(model))  # rounds with a draft may end past the text, which is read anew then
    first = decoder.generate(PROMPTS[:2], sampling=GREEDY, max_new_tokens=8, keep=True)
    news = [PROMPTS[1][:11], [7, 8]]
    turns = [PROMPTS[row] + first[row].token_ids + news[row] for row in range(2)]
    second = decoder.generate(turns, sampling=GREEDY, max_new_tokens=12, keep=True)
    assert [result.token_ids for result in second] == [plain(model, turn, 12) for turn in turns]


@pytest.mark.parametrize("model_type", keeping(CASES, "mamba"))
def test_a_prompt_read_in_chunks_is_continued_as_by_generate(model_type):
    """As the server reads: a chunk before each round, one text beside another that is at work, then a text that goes on."""
    model = build(model_type)
    decoder = Decoder(wrapped(model), TreeDrafter(wrapped(noisy(model)), parse_tree("2x1")))
    engine = open_engine(decoder, slots=2, reuse=True, chunk=5)
    texts = [sequence(decoder, row, PROMPTS[row], GREEDY, limit=20, seed=row) for row in range(2)]
    for text in texts:
        engine.add(text)
    finish(engine)
    again = sequence(decoder, 2, [*texts[1].tokens, *PROMPTS[0]], GREEDY, limit=12, seed=2)
    engine.add(again)
    finish(engine)
    assert [text.new_tokens for text in texts] == [plain(model, PROMPTS[row], 20) for row in range(2)]
    assert again.new_tokens == plain(model, again.prompt, 12)


@pytest.mark.parametrize("model_type", keeping(["mamba", "mamba2"], "mamba"))
def test_a_prompt_longer_than_a_pass(model_type):
    model = build(model_type, max_position_embeddings=2 * PREFILL_CHUNK)
    prompt = torch.randint(5, 90, (PREFILL_CHUNK + 8,), generator=torch.Generator().manual_seed(0)).tolist()
    assert Decoder(HFModel(model)).generate(prompt, sampling=GREEDY, max_new_tokens=8).token_ids == plain(model, prompt, 8)


@pytest.mark.parametrize("model_type", keeping(CASES, "jamba", "lfm2"))
def test_only_layers_that_need_it_read_token_by_token(model_type):
    """The scan of Mamba takes no state to begin with, and so do the models that are built of it."""
    assert wrapped(build(model_type)).resumes == (model_type not in {"mamba", "falcon_mamba", "jamba", "zamba"})


def test_a_class_that_nobody_has_heard_of_and_that_forgets_is_found_out(monkeypatch):
    """It loses its state whenever it reads several tokens at once; nothing but a text in parts shows that."""
    model = build("lfm2")
    layer = type(model.model.layers[0].conv)
    forward = layer.forward

    def forgetful(self, hidden_states, **options):
        cache = options.get("past_key_values")
        if cache is not None and hidden_states.shape[1] > 1 and cache.has_previous_state(self.layer_idx):
            cache.layers[self.layer_idx].conv_states[0].zero_()
        return forward(self, hidden_states, **options)

    monkeypatch.setattr(layer, "forward", forgetful)
    target = HFModel(model)
    assert not target.resumes
    decoder = Decoder(target)
    turn = [*PROMPTS[1], *decoder.generate(PROMPTS[1], sampling=GREEDY, max_new_tokens=4, keep=True).token_ids, *PROMPTS[0]]
    assert decoder.generate(turn, sampling=GREEDY, max_new_tokens=12, keep=True).token_ids == plain(model, turn, 12)


@torch.inference_mode()
def test_a_beginning_is_read_at_once_and_the_rest_token_by_token(monkeypatch):
    """Of two rows, one that begins and one that goes on; the mixers are called as often as there are steps."""
    model = wrapped(build("mamba"))
    mixer = model.recurrence.mixers[0]
    context, calls, forward = model.start(2, 64), [], type(mixer).forward
    context.prefill([PROMPTS[0], []])

    def counted(self, hidden_RCF, *args, **options):
        if self is mixer:
            calls.append(tuple(hidden_RCF.shape[:2]))
        return forward(self, hidden_RCF, *args, **options)

    monkeypatch.setattr(type(mixer), "forward", counted)
    context.prefill([PROMPTS[2], PROMPTS[1]])
    assert calls == [(1, 20), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("model_type", "tree"), keeping(PAIRS, ("mamba", "1x1x1x1")))
def test_captured_rounds_give_the_same_texts(caches, model_type, tree):
    """Rows end at different rounds, by a token that no limit foretells, while a round runs ahead of it."""
    model = build(model_type)
    drafter = None if tree == "none" else TreeDrafter(wrapped(noisy(model)), parse_tree(tree))
    whole = [plain(model, prompt) for prompt in PROMPTS]
    end = next(token for place, token in enumerate(whole[0]) if place > 8 and token not in whole[0][:place])
    decoder = Decoder(wrapped(model), drafter, eos_token_ids=[end])
    expected = [text[: text.index(end) + 1] if end in text else text for text in whole]
    for _ in range(2):
        results = decoder.generate(PROMPTS, sampling=GREEDY, max_new_tokens=24)
        assert [result.token_ids for result in results] == expected
    stats = results[0].stats
    assert stats.replayed_rounds == stats.rounds and stats.rounds_ahead >= stats.rounds // 3
    assert len(caches) == 1 and len(set(caches[0].kinds)) == 1


@pytest.mark.parametrize("tree", keeping(["none", "2x1"], "2x1"))
def test_a_state_that_a_round_ahead_has_moved_on_is_not_kept(caches, tree):
    model = build("lfm2")
    drafter = None if tree == "none" else TreeDrafter(wrapped(noisy(model)), parse_tree(tree))
    text = plain(model, PROMPTS[0])
    place = next(place for place in range(9, 24) if text[place] not in text[:place])
    decoder = Decoder(wrapped(model), drafter, eos_token_ids=[text[place]])
    for _ in range(2):
        got = decoder.generate(PROMPTS[0], sampling=GREEDY, max_new_tokens=24, keep=True)
        assert got.token_ids == text[: place + 1] and got.stats.rounds_ahead > 0
    longer = PROMPTS[0] + got.token_ids + [7]
    got = decoder.generate(longer, sampling=GREEDY, max_new_tokens=6, keep=True)
    expected = plain(model, longer, 6)
    assert got.token_ids == expected[: expected.index(text[place]) + 1 if text[place] in expected else 6]


class Sealed(TorchDispatchMode):
    """Refuses looks at values and results of unknown size."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        assert not name.startswith(("_local_scalar_dense", "lift_fresh", "nonzero", "equal.")), f"{name} in a captured pass"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("model_type", "tree"), keeping(PAIRS, ("lfm2", "none"), ("mamba", "3x2x1")))
@torch.inference_mode()
def test_a_pass_over_a_static_tree_takes_nothing_from_the_host(model_type, tree):
    model, topology = wrapped(build(model_type)), parse_tree(tree)
    context = model.start(2, 64)
    context.places = topology.num_nodes
    context.prefill(PROMPTS[:2])
    context.fix_span(64)
    tokens_BN = torch.full((2, topology.num_nodes), 7)
    tree = DraftTree.from_topology(topology, tokens_BN, (), torch.zeros_like(tokens_BN[0]))
    with Sealed():
        got_BNV = model.head(context.extend(tree.tokens_BN, tree.block()))
    expected_BNV = model.head(context.extend(tree.tokens_BN, replace(tree.block(), levels=None)))
    torch.testing.assert_close(got_BNV, expected_BNV, rtol=1e-5, atol=1e-5)


def test_trees_whose_levels_only_the_device_knows_are_not_captured(caches):
    model = build("lfm2")
    target, draft = wrapped(model), wrapped(noisy(model))
    decoder = Decoder(target, TreeDrafter(draft, parse_dynamic("dynamic:8")))
    result = decoder.generate(PROMPTS[0], sampling=GREEDY, max_new_tokens=12)
    assert result.token_ids == plain(model, PROMPTS[0], 12) and not caches[0].kinds


def test_a_row_can_be_kept_where_its_state_is_and_nowhere_else():
    context = wrapped(build("lfm2")).start(2, 64)
    context.prefill([PROMPTS[0], PROMPTS[1]])
    assert context.keepable([9, 20]) == [9, 20]
    assert context.keepable([8, 20]) == [0, 20]
    context.rewind([8, 20])
    assert context.keepable([8, 20]) == [0, 20]
    context.rewind([0, 20])
    context.prefill([PROMPTS[2], []])
    assert context.keepable([3, 20]) == [3, 20]


def test_an_interrupted_reading_leaves_nothing_to_go_on_from(monkeypatch):
    model = wrapped(build("lfm2"))
    context = model.start(2, 64)
    context.prefill([PROMPTS[0], PROMPTS[1]])
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            context.prefill([PROMPTS[2], []])
    assert context.keepable([9, 20]) == [0, 20]


@pytest.mark.parametrize("model_type", keeping(FEW, "lfm2", "mamba"))
@torch.inference_mode()
def test_what_is_advanced_over_is_committed_and_the_rest_stays(model_type):
    """As beams do: some places become text, a branch behind them goes on."""
    model = wrapped(build(model_type))
    text, more = PROMPTS[1], PROMPTS[0]
    context = model.start(1, 64)
    context.prefill([text])
    context.extend(torch.tensor([more[:4]]), causal_block(1, 4, model.device))
    context.advance(torch.tensor([2]))
    context.settle([len(text) + 2])
    context.rewind([len(text) + 4])  # which keeps the other two
    got_V = model.head(context.extend(torch.tensor([more[4:5]]), causal_block(1, 1, model.device)))[0, 0]
    expected_V = model.plain(torch.tensor([text + more[:5]]))[0, -1]
    torch.testing.assert_close(got_V, expected_V, rtol=1e-4, atol=1e-4)


def test_the_model_is_left_as_it_was():
    model = build("qwen3_next")
    before = [list(module.__dict__) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    Decoder(HFModel(model)).generate(PROMPTS[0], sampling=GREEDY, max_new_tokens=3)
    assert [list(module.__dict__) for module in model.modules()] == before
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_recurrent_layer_that_somebody_has_replaced_is_refused():
    model = copy.deepcopy(build("lfm2"))
    layer = model.model.layers[0].conv
    layer.forward = lambda *args, **options: type(layer).forward(layer, *args, **options)
    with pytest.raises(UsageError, match="the forward method of a recurrent layer was replaced"):
        HFModel(model)


@pytest.mark.parametrize("model_type", ["zamba2", "nemotron_h"])
def test_another_formula_for_a_token_alone_is_refused(model_type):
    with pytest.raises(UsageError, match=rf"'{model_type}'.*alone by another formula"):
        HFModel(build(model_type, time_step_min=0.001))


def test_layers_without_attention_are_no_obstacle():
    kinds = wrapped(build("nemotron_h")).config.layer_types
    assert {"moe", "mlp", "linear_attention"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba", *FEW[:-1]])
def test_sampled_texts_have_the_distribution_of_plain_passes(model_type):
    model = build(model_type, vocab_size=8)
    prompt, new, samples = [3, 7, 4, 6, 5], 3, 2_000
    texts = list(itertools.product(range(8), repeat=new))
    with torch.inference_mode():
        logits_XTV = model(input_ids=torch.tensor([[*prompt, *text] for text in texts]), use_cache=False).logits
    distributions_XTV = logits_XTV.double().softmax(dim=-1)[:, len(prompt) - 1 : -1]
    chances_X = distributions_XTV.gather(2, torch.tensor(texts)[:, :, None])[:, :, 0].prod(dim=1).numpy()
    decoder = Decoder(HFModel(model), TreeDrafter(HFModel(noisy(model)), parse_tree("2x2")))
    results = decoder.generate([prompt] * samples, sampling=SamplingParams(), max_new_tokens=new, seed=11)
    place = {text: number for number, text in enumerate(texts)}
    counts_X = np.bincount([place[tuple(result.token_ids)] for result in results], minlength=len(texts))
    assert chi_square_p_value(counts_X, chances_X) > FALSE_ALARM / len(FEW)


def test_beams_are_those_of_generate():
    model, prompt = build("lfm2"), PROMPTS[1]
    decoder = Decoder(wrapped(model), TreeDrafter(wrapped(noisy(model)), parse_tree("2x1")))
    expected = model.generate(torch.tensor([prompt]), do_sample=False, num_beams=3, max_new_tokens=16, pad_token_id=0)
    assert BeamDecoder(decoder).search(prompt, beams=3, max_new_tokens=16).best.token_ids == expected[0, len(prompt) :].tolist()
