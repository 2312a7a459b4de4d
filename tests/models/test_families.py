"""Every supported family: logits in a tree are those along its paths, memory is recomputation, greedy text is HF's."""

import random

import pytest
import torch

from covering import covering, keeping
from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason
from polydraft.models import FAMILIES as COVERED
from polydraft.models import language_model
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, Topology, causal_block, parse_tree

VOCABULARY = 96
TOLERANCE = 1e-4
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
TREES = ["4x2x1", "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]", "chain:4", "none"]
PLAIN = [(name, "none") for name in list(FAMILIES)]
SLIDING = ["mistral-sliding", "gemma2"]

# What wrapping and memory do for every family alike; what families differ in is in the tests of logits and of greedy texts.
few_families = pytest.mark.parametrize("name", keeping(list(FAMILIES), "llama", "gpt2", "gemma2"))


def test_every_covered_model_type_has_a_tiny_model():
    assert {FAMILIES.get(name).model_type for name in FAMILIES} == {*COVERED}


def random_text(length, rng):
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def random_tree(nodes, rng):
    return Topology((0, *sorted(rng.randrange(node) for node in range(1, nodes))))


def path_to(topology, node):
    path = [node]
    while path[-1]:
        path.append(topology.parents[path[-1]])
    return path[::-1]


def block_of(topologies):
    tables = [topology.tables(CPU) for topology in topologies]
    return Block(0, torch.stack([table.depths_N for table in tables]), torch.stack([table.ancestors_NN for table in tables]))


class Forest:
    """A context of some rows, and below each a random tree whose root is the row's pending token."""

    def __init__(self, model, path_logits, lengths, rng, capacity=64):
        self.model, self.path_logits, self.rng = model, path_logits, rng
        self.texts = [random_text(length, rng) for length in lengths]
        with torch.inference_mode():
            self.context = model.start(len(lengths), capacity)
            self.context.prefill([text[:-1] for text in self.texts])

    def plant(self, nodes, same=False, topology=None):
        shared = topology or random_tree(nodes, self.rng)
        same, nodes = same or topology is not None, shared.num_nodes
        self.topologies = [shared if same else random_tree(nodes, self.rng) for _ in self.texts]
        self.tokens = [[text[-1], *random_text(nodes - 1, self.rng)] for text in self.texts]
        return torch.tensor(self.tokens)

    def expected(self):
        paths = [
            text[:-1] + [tokens[step] for step in path_to(topology, node)]
            for text, tokens, topology in zip(self.texts, self.tokens, self.topologies, strict=True)
            for node in range(topology.num_nodes)
        ]
        return self.path_logits(self.model.hf_model, paths).unflatten(0, (len(self.texts), -1))

    def check(self, nodes=9, topology=None):
        tokens_BN = self.plant(nodes, topology=topology)
        got = self.model.head(self.context.extend(tokens_BN, block_of(self.topologies)))
        assert (got - self.expected()).abs().max() < TOLERANCE

    def commit_last_leaf(self, idle_row=None):
        """Commit the path to each row's last node, never the leftmost one, and let its last token be the pending one."""
        paths = [path_to(topology, topology.num_nodes - 1) for topology in self.topologies]
        assert any(path != sorted(range(len(path))) for path in paths)
        counts = [0 if row == idle_row else len(path) - 1 for row, path in enumerate(paths)]
        depth = max(map(len, paths))
        places = torch.tensor([path + path[-1:] * (depth - len(path)) for path in paths])
        self.context.commit(places, torch.tensor(counts))
        for row, (path, count) in enumerate(zip(paths, counts, strict=True)):
            if count:
                self.texts[row] = self.texts[row][:-1] + [self.tokens[row][node] for node in path]
        self.context.settle([len(text) - 1 for text in self.texts])


LENGTHS = {"single": [11], "ragged": [4, 13, 9]}


@pytest.mark.parametrize(("name", "lengths"), covering(list(FAMILIES), LENGTHS))
@torch.inference_mode()
def test_logits_in_a_tree_are_those_along_its_paths(tiny, path_logits, name, lengths):
    forest = Forest(tiny(name), path_logits, LENGTHS[lengths], random.Random(7))
    forest.check()
    for idle_row in (None, 0 if lengths == "ragged" else None):
        forest.commit_last_leaf(idle_row)  # wrong positions or slots after a non-leftmost path would show next
        forest.check()


@pytest.mark.parametrize(("name", "lengths"), covering(list(FAMILIES), LENGTHS))
@torch.inference_mode()
def test_levels_passed_one_by_one_equal_the_whole_tree(tiny, path_logits, name, lengths):
    model = tiny(name)
    forest = Forest(model, path_logits, LENGTHS[lengths], random.Random(3))
    tokens_BN = forest.plant(10, same=True)
    topology, whole = forest.topologies[0], block_of(forest.topologies)
    levels = []
    for level in topology.levels:
        part = slice(level.start, level.stop)
        block = Block(level.start, whole.depths_BT[:, part], whole.visible_BTU[:, part, : level.stop])
        levels.append(model.head(forest.context.extend(tokens_BN[:, part], block)))
    assert (torch.cat(levels, dim=1) - forest.expected()).abs().max() < TOLERANCE
    forest.commit_last_leaf()
    forest.check()


@few_families
@torch.inference_mode()
def test_rewound_memory_equals_a_fresh_one(tiny, path_logits, name):
    forest = Forest(tiny(name), path_logits, [12, 17], random.Random(5))
    forest.check()
    forest.commit_last_leaf()
    forest.texts = [text[:-3] for text in forest.texts]
    forest.context.rewind([len(text) - 1 for text in forest.texts])
    forest.check()
    forest.texts[1] = forest.texts[1][:2]  # back into the prompt, one row only
    forest.context.rewind([len(text) - 1 for text in forest.texts])
    forest.context.prefill([[], [31, 32]])
    forest.texts[1] = [*forest.texts[1][:1], 31, 32, 33]
    forest.check()


@few_families
@torch.inference_mode()
def test_growing_keeps_the_content(tiny, path_logits, name):
    forest = Forest(tiny(name), path_logits, [9, 5], random.Random(6), capacity=17)
    forest.check()
    forest.context.reserve(40)
    assert forest.context.capacity == 40
    forest.check(nodes=20)
    forest.context.reserve(30)
    assert forest.context.capacity == 40, "memory never shrinks"


@few_families
@torch.inference_mode()
def test_a_prompt_read_in_chunks_equals_one_go(tiny, path_logits, name, monkeypatch):
    monkeypatch.setattr(language_model, "PREFILL_CHUNK", 5)
    forest = Forest(tiny(name), path_logits, [23, 7, 16], random.Random(8))
    assert forest.context.lengths == [22, 6, 15]
    forest.check()


def hf_greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


def assert_same_greedy(model, path_logits, prompt, got, expected):
    """Equal, or different from a position on where the two best logits really are within rounding of each other."""
    assert len(got) == len(expected)
    for index, pair in enumerate(zip(got, expected, strict=True)):
        if pair[0] != pair[1]:
            logits = path_logits(model, [prompt + expected[:index]])[0]
            gaps = logits.max() - logits[list(pair)]
            assert gaps.max() < 1e-3, f"token {index}: {pair} although the logits differ by {gaps.tolist()}"
            return


@pytest.mark.parametrize(
    ("name", "tree"),
    [*covering(list(FAMILIES), TREES[:-1]), *keeping(PLAIN, ("llama", "none"))],
)
def test_greedy_text_is_that_of_generate(tiny, perturbed, path_logits, name, tree):
    target = tiny(name)
    decoder = Decoder(target, TreeDrafter(perturbed(name, 0.1), parse_tree(tree)) if tree != "none" else None)
    rng = random.Random(11)
    prompts = [random_text(5, rng), random_text(12, rng)]
    results = decoder.generate(prompts, sampling=GREEDY, max_new_tokens=16)
    for prompt, result in zip(prompts, results, strict=True):
        assert_same_greedy(target.hf_model, path_logits, prompt, result.token_ids, hf_greedy(target.hf_model, prompt, 16))
    if tree != "none":  # both outcomes occur, or the test would prove little
        assert 0 < results[0].stats.acceptance_rate < 1


@pytest.mark.parametrize("name", keeping(SLIDING, "mistral-sliding"))
def test_text_much_longer_than_the_window(tiny, perturbed, path_logits, name):
    target = tiny(name)
    assert target.window == 7
    decoder = Decoder(target, TreeDrafter(perturbed(name, 0.1), parse_tree("3x2x1")))
    rng = random.Random(12)
    prompts = [random_text(30, rng), random_text(17, rng)]
    results = decoder.generate(prompts, sampling=GREEDY, max_new_tokens=60)
    for prompt, result in zip(prompts, results, strict=True):
        assert_same_greedy(target.hf_model, path_logits, prompt, result.token_ids, hf_greedy(target.hf_model, prompt, 60))


@pytest.mark.parametrize("name", SLIDING)
@torch.inference_mode()
def test_the_window_follows_depth_not_slots(tiny, path_logits, name):
    """A wide tree has many more slots than the window; a narrow window must still reach over them."""
    model = tiny(name)
    forest = Forest(model, path_logits, [25, 19], random.Random(13), capacity=80)
    forest.check(nodes=40)
    forest.commit_last_leaf()
    forest.check(nodes=16)
    # And a tree deeper than the window, whose root is out of its own leaves' sight.
    forest.check(topology=parse_tree("fork:3x11"))
    forest.commit_last_leaf()
    forest.check(nodes=16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2"])
def test_the_context_ends_at_the_last_position(tiny, perturbed, path_logits, name):
    target = tiny(name)
    decoder = Decoder(target, TreeDrafter(perturbed(name, 0.05), parse_tree("2x2x1x1")))
    prompt = random_text(120, random.Random(14))
    result = decoder.generate(prompt, sampling=GREEDY, max_new_tokens=50)
    assert result.stop_reason is StopReason.CONTEXT
    assert_same_greedy(target.hf_model, path_logits, prompt, result.token_ids, hf_greedy(target.hf_model, prompt, 8))


@few_families
def test_weights_changed_in_place_are_followed(path_logits, name):
    """The wrapper holds the model, not a copy: whoever trains on, or loads other weights, gets what the model says."""
    model = HFModel(FAMILIES.get(name).build())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.hf_model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    with torch.inference_mode():
        Forest(model, path_logits, [11, 6], random.Random(17)).check()


@few_families
def test_the_users_model_stays_usable(name):
    """Wrapping changes nothing for those who use the model otherwise, also one made in inference mode."""
    with torch.inference_mode():
        model = FAMILIES.get(name).build()
        expected = model(torch.tensor([[5, 6, 7]])).logits
        HFModel(model)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, expected)


@torch.inference_mode()
def test_a_causal_block_is_a_plain_sequence(tiny, path_logits):
    model = tiny("llama")
    text = random_text(9, random.Random(15))
    context = model.start(1, 16)
    got = model.head(context.extend(torch.tensor([text]), causal_block(1, 9, CPU)))[0]
    expected = path_logits(model.hf_model, [text[: length + 1] for length in range(9)])
    assert (got - expected).abs().max() < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_eager_attention_takes_the_same_trees(path_logits, name):
    model = HFModel(FAMILIES.get(name).build(attn_implementation="eager"))
    assert model.config._attn_implementation == "eager"
    forest = Forest(model, path_logits, [11, 6], random.Random(16))
    forest.check()
    forest.commit_last_leaf()
    forest.check()


def test_llama_shapes_with_both_kinds_of_layers_decode():
    model = FAMILIES.get("qwen2").build(seed=1, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    prompt = list(range(3, 20))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(prompt) :]
    result = Decoder(HFModel(model)).generate(prompt, sampling=GREEDY, max_new_tokens=8)
    assert result.token_ids == expected.tolist()


@few_families
def test_tiny_models_do_not_only_repeat_themselves(name):
    result = Decoder(HFModel(FAMILIES.get(name).build())).generate([9, 8, 7, 6], sampling=GREEDY, max_new_tokens=24)
    assert len(set(result.token_ids)) >= 4
