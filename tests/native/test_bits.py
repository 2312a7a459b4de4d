"""The bits of a token's features and logits do not depend on the tokens, rows, trees or threads beside it."""

import os
import subprocess
import sys

import pytest
import torch

from covering import covering
from native.native_models import FORMATS, SHAPES, block_of, native, path_to, random_text, random_tree, read
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import causal_block, parse_tree
from stand_in import head_shape

pytestmark = pytest.mark.usefixtures("compiled")
# Every shape and every number format by default, and all pairs in the slow tests.
every_pair = pytest.mark.parametrize(("shape", "number_format"), covering(SHAPES, FORMATS))
every_model = pytest.mark.parametrize("number_format", FORMATS)
CPU = torch.device("cpu")
LENGTH = 70


@every_pair
def test_parts_of_any_size(shape, number_format):
    model, text = native(shape, number_format), random_text(LENGTH)
    alone_1TF = read(model, [text], [1] * LENGTH)
    for size in (2, 3, 4, 5, 6, 7, 8, 13, 64, 65):
        sizes = [size] * (LENGTH // size) + ([LENGTH % size] if LENGTH % size else [])
        assert torch.equal(read(model, [text], sizes), alone_1TF), size


@every_model
def test_every_number_of_tokens_from_1_to_64(number_format):
    model = native("wide", number_format)
    text = random_text(64)
    with torch.inference_mode():
        whole_1TF = read(model, [text], [64])
        logits_1TV = model.head(whole_1TF)
        for count in range(1, 65):
            context = model.start(1, 64)
            got_1TF = context.extend(torch.tensor([text[:count]]), causal_block(1, count, CPU))
            assert torch.equal(got_1TF, whole_1TF[:, :count]), count
            assert torch.equal(model.head(got_1TF), logits_1TV[:, :count]), count


@every_pair
def test_batches_of_texts_of_different_lengths(shape, number_format):
    model = native(shape, number_format)
    for rows in (2, 3, 8):
        texts = [random_text(4 + 7 * row % 23, seed=row) for row in range(rows)]
        blocks = [random_text(5, seed=100 + row) for row in range(rows)]
        with torch.inference_mode():
            context = model.start(rows, 64)
            context.prefill(texts)
            got_BTF = context.extend(torch.tensor(blocks), causal_block(rows, 5, CPU))
        for row in range(rows):
            alone_1TF = read(model, [texts[row] + blocks[row]], [1] * (len(texts[row]) + 5))
            assert torch.equal(got_BTF[row], alone_1TF[0, -5:]), (rows, row)


@every_pair
@torch.inference_mode()
def test_trees_against_their_paths(shape, number_format):
    model = native(shape, number_format)
    texts = [random_text(9, seed=1), random_text(14, seed=2)]
    topologies = [random_tree(24, seed=3), random_tree(24, seed=4)]
    tokens = [random_text(24, seed=5), random_text(24, seed=6)]
    context = model.start(2, 80)
    context.prefill(texts)
    tree_BNF = context.extend(torch.tensor(tokens), block_of(topologies))
    logits_BNV = model.head(tree_BNF)
    for row, topology in enumerate(topologies):
        for node in range(topology.num_nodes):
            path = [tokens[row][step] for step in path_to(topology, node)]
            along_1TF = read(model, [texts[row] + path], [1] * (len(texts[row]) + len(path)))
            assert torch.equal(tree_BNF[row, node], along_1TF[0, -1]), (row, node)
            assert torch.equal(logits_BNV[row, node], model.head(along_1TF[:, -1:])[0, 0]), (row, node)
    paths = [path_to(topology, topology.num_nodes - 1) for topology in topologies]  # the same again behind a commit
    depth = max(map(len, paths))
    context.commit(torch.tensor([path + path[-1:] * (depth - len(path)) for path in paths]), torch.tensor([*map(len, paths)]))
    texts = [text + [given[step] for step in path] for text, given, path in zip(texts, tokens, paths, strict=True)]
    context.settle([len(text) for text in texts])
    got_BTF = context.extend(torch.tensor([[40], [41]]), causal_block(2, 1, CPU))
    for row, text in enumerate(texts):
        assert torch.equal(got_BTF[row, 0], read(model, [[*text, 40 + row]], [1] * (len(text) + 1))[0, -1])


@every_model
@torch.inference_mode()
def test_threads(number_format):
    model, text = native("wide", number_format), random_text(40)
    expected_1TF = read(model, [text], [40])
    for threads in (2, 5, 33):  # more than there are cores
        torch.set_num_threads(threads)
        assert torch.equal(read(model, [text], [7, 33]), expected_1TF), threads
        assert torch.equal(model.head(expected_1TF)[:, :3], model.head(expected_1TF[:, :3])), threads


def head_for(target, taps=()):
    shape = head_shape(target, taps, mlp_size=50, window=9)
    torch.manual_seed(7)
    target.tap(taps)
    return new_head(shape, target, None, "test").to(target.dtype).requires_grad_(False)


@every_model
@torch.inference_mode()
def test_feature_heads_in_trees_against_their_paths(number_format):
    target = native("odd", number_format)
    head, topology, tokens = head_for(target), random_tree(17, seed=8), random_text(17, seed=9)
    text, fused_1TH = random_text(12), torch.randn(1, 29, target.hidden_size, generator=torch.Generator().manual_seed(0))

    def outputs(path_tokens, fused, block, committed):
        context = head.start(1, 40)
        context.read(torch.tensor([text]), fused_1TH[:, :12], causal_block(1, 12, CPU))
        context.rewind([committed])
        return context.read(torch.tensor([path_tokens]), fused, block)

    tree_1NH = outputs(tokens, fused_1TH[:, 12:], block_of([topology]), 12)
    for node in range(topology.num_nodes):
        path = path_to(topology, node)
        along_1TH = outputs([tokens[step] for step in path], fused_1TH[:, [12 + step for step in path]],
                            causal_block(1, len(path), CPU), 12)  # fmt: skip
        assert torch.equal(tree_1NH[0, node], along_1TH[0, -1]), node
        assert torch.equal(head.head(tree_1NH)[0, node], head.head(along_1TH)[0, -1]), node


@every_model
@torch.inference_mode()
def test_feature_heads_store_what_they_would_read(number_format):
    """Whole or in parts, by compiled code; and as torch does it, but for rounding."""
    target = native("odd", number_format)
    head, text = head_for(target), random_text(12)
    fused_1TH = torch.randn(1, 12, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(target.dtype)

    def stored(parts, by_torch=False):
        context = head.start(1, 40)
        context.fast = None if by_torch else context.fast
        for start, stop in parts:
            context.store(torch.tensor([text[start:stop]]), fused_1TH[:, start:stop])
            context.rewind([stop])
        return context.cache.keys_LBHSC[..., :12, :], context.cache.values_LBHSC[..., :12, :]

    whole = head.start(1, 40)
    assert whole.fast is not None
    whole.read(torch.tensor([text]), fused_1TH, causal_block(1, 12, CPU))
    for number, read_LBHSC in enumerate((whole.cache.keys_LBHSC, whole.cache.values_LBHSC)):
        assert read_LBHSC[..., :12, :].abs().sum() > 0
        assert torch.equal(stored([(0, 12)])[number], read_LBHSC[..., :12, :])
        assert torch.equal(stored([(0, 5), (5, 6), (6, 12)])[number], read_LBHSC[..., :12, :])
        tolerance = 1e-4 if target.dtype == torch.float32 else 0.05
        torch.testing.assert_close(
            stored([(0, 12)], by_torch=True)[number], read_LBHSC[..., :12, :], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(("shape", "number_format"), covering(["llama", "mistral-sliding", "odd"], FORMATS))
def test_greedy_texts_are_identical_whatever_is_drafted(shape, number_format):
    """Without allowance for near-ties."""
    target = native(shape, number_format)
    prompts = [random_text(5, seed=1), random_text(17, seed=2), random_text(9, seed=3)]
    greedy = SamplingParams(temperature=0)
    alone = [Decoder(target).generate(prompt, sampling=greedy, max_new_tokens=40).token_ids for prompt in prompts]
    drafters = [TreeDrafter(early_exit(target, 2), parse_tree(tree)) for tree in ("4x2x1", "chain:3")]
    drafters.append(TreeDrafter(head_for(target), parse_tree("3x2x1")))
    for drafter in drafters:
        results = Decoder(target, drafter).generate(prompts, sampling=greedy, max_new_tokens=40)
        assert [result.token_ids for result in results] == alone
    assert any(result.stats.acceptance_rate > 0 for result in results)


@pytest.mark.slow  # compiles, and starts a process
def test_whichever_products_a_compiler_would_fuse(tmp_path):
    """GCC avoids fused additions in some loops for some CPUs (-mtune=native on Zen, and on Sapphire Rapids since GCC 13)."""
    command = ["gcc", "--param=avoid-fma-max-bits=512"]
    if subprocess.run([*command, "-E", "-xc", os.devnull], capture_output=True, check=False).returncode:
        pytest.skip("no GCC here that can be told so")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # a worker's name among them
    environment = {**outer, "CC": " ".join(command), "POLYDRAFT_CACHE": str(tmp_path)}
    asked = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "batches_of_texts or trees_against"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert list(tmp_path.glob("native/*.so")), "another compiler's kernels are other ones"
