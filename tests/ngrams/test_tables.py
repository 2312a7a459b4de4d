"""N-grams as tensors propose what the host's memories do, and make well-formed tries of it."""

import dataclasses

import pytest
import torch

import polydraft.draft.trie as trie_module
from covering import some_slow
from polydraft.draft import RiderOptions
from polydraft.draft.device_trie import DeviceTrieBuilder
from polydraft.draft.gram_options import Sizes
from polydraft.draft.trie import WIDTH, Limits, grow, trie_ladder
from polydraft.ngrams import GRAM_CACHES, GramOptions
from polydraft.sampling import NO_TOKEN

from .brute import random_text

CPU = torch.device("cpu")
DEPTH = 6


def built(names, options, texts, nodes, depth=DEPTH):
    """The builder, and its tree of some texts."""
    caches = [GRAM_CACHES.get(name)(options) for name in names]
    sizes = Sizes(nodes=nodes, depth=depth, width=WIDTH, least=0.0, riders=RiderOptions(branches=0))
    builder = DeviceTrieBuilder(caches, sizes, len(texts), CPU, "+".join(names))
    builder.source.make_room(places=1 + nodes, depth=depth, captured=False)
    builder.source.begin(texts, max(map(len, texts)) + 20, range(len(texts)))
    tail_B2 = torch.tensor([[0, *text[-2:]][-2:] for text in texts])
    return builder, builder.build(tail_B2, torch.zeros(len(texts), 0))


def chances_in(builder, row):
    """The chance of each path that is proposed, before any is left out."""
    found = {}
    for _, paths in builder.candidates():
        for (_, depth, mark), chance in zip(paths.numbers_BX3[row].tolist(), paths.chances_BX[row].tolist(), strict=True):
            if depth <= builder.depth:
                found[mark] = max(found.get(mark, 0.0), chance)
    return sorted((chance for chance in found.values() if chance > 0), reverse=True)


def paths_in(tree, row):
    """The paths of tokens that a walk may follow."""
    found, waiting = [], [(0, ())]
    while waiting:
        node, path = waiting.pop()
        for child in tree.child_table_BNK[row, node].tolist():
            if child:
                longer = (*path, int(tree.tokens_BN[row, child]))
                found.append(longer)
                waiting.append((child, longer))
    return found


def expected(memory, depth, width=WIDTH):
    """All that a memory proposes, each path with its chance."""
    found, waiting = {}, [((), memory.end(), 1.0)]
    while waiting:
        path, place, chance = waiting.pop()
        ways = memory.ways(place, width)
        total = max(sum(own for _, own in ways), 1.0)
        for token, own in ways:
            longer = (*path, token)
            found[longer] = chance * own / total
            if len(longer) < depth:
                waiting.append((longer, memory.step(place, token), found[longer]))
    return found


def opened(name, options, text):
    memory = GRAM_CACHES.get(name)(options).open()
    memory.read(text)
    return memory


def texts_of(seed):
    return [random_text(10 * seed + row, size, vocabulary=6) for row, size in enumerate((120, 1, 37, 2, 300))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("name", "longest"), [("lookup", 4), ("lookup", 2), ("suffix", 12)])
def test_the_text_proposes_what_lookup_does_on_the_host(options, name, longest, seed):
    options, texts = dataclasses.replace(options, max_match=longest), texts_of(seed)
    builder, tree = built([name], options, texts, nodes=24)
    for row, text in enumerate(texts):
        # Matches of any length are, on a device, those of lookup with as long ones as make a difference.
        host = expected(opened("lookup", options, text), DEPTH)
        assert chances_in(builder, row) == pytest.approx(sorted(host.values(), reverse=True))
        proposed = paths_in(tree, row)
        assert len(set(proposed)) == len(proposed) == min(len(host), 24)
        best = sorted(host.values(), reverse=True)[:24]
        assert sorted((host[path] for path in proposed), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("seed", some_slow(range(4), range(1, 4)))
def test_a_corpus_proposes_what_it_does_on_the_host(options, seed):
    texts = texts_of(seed)
    _, tree = built(["corpus"], options, texts, nodes=20)
    for row, text in enumerate(texts):
        host = expected(opened("corpus", options, text), DEPTH)
        best = sorted(host.values(), reverse=True)[:20]
        assert len(best) == 20
        assert sorted((host[path] for path in paths_in(tree, row)), reverse=True) == pytest.approx(best)


def test_an_unknown_end_and_foreign_tokens_lead_to_nothing(options):
    _, tree = built(["corpus", "lookup"], options, [[25, 26, 27], [29]], nodes=8)
    assert not tree.child_table_BNK.any() and (tree.tokens_BN[:, 1:] == NO_TOKEN).all()
    _, tree = built(["corpus"], options, [[25, 3]], nodes=8)  # the last token alone is known
    assert set(paths_in(tree, 0)) <= set(expected(opened("corpus", options, [3]), DEPTH))


@pytest.mark.parametrize("seed", some_slow(range(4), range(1, 4)))
def test_a_corpus_goes_on_where_the_text_began(options, seed):
    texts, nodes = texts_of(seed), 16
    _, tree = built(["lookup", "corpus"], options, texts, nodes)
    for row, text in enumerate(texts):
        found = expected(opened("lookup", options, text), DEPTH)
        for stem, chance in [((), 1.0), *found.items()]:
            below = expected(opened("corpus", options, [*text, *stem]), DEPTH - len(stem)) if len(stem) < DEPTH else {}
            for path in below:
                whole = (*stem, *path)
                found[whole] = max(found.get(whole, 0.0), chance * below[path])
        best = sorted(found.values(), reverse=True)[:nodes]
        # A node has room for so many children; more of them are left out, and what is below them.
        proposed = sorted((found[path] for path in paths_in(tree, row)), reverse=True)
        assert len(proposed) >= nodes - 4
        assert all(any(one == pytest.approx(other) for other in best) for one in proposed)


@pytest.mark.parametrize("name", ["lookup", "corpus"])
def test_tries_are_those_that_the_host_would_grow(monkeypatch, options, name):
    monkeypatch.setattr(trie_module, "_UNSEEN", 1.0)  # the host looks for likely children first, in another order otherwise
    text = random_text(3, 200, vocabulary=6)
    _, tree = built([name], options, [text], nodes=16)
    limits = Limits(nodes=16, depth=DEPTH, width=WIDTH, least=0.0, ladder=trie_ladder(16, (16,)))
    memory = opened(name, options, text)
    trie = grow(text[-1], [name], [memory], limits)
    host = expected(memory, DEPTH)
    paths = {0: ()}
    for node in range(1, len(trie)):
        paths[node] = (*paths[trie.parents[node]], trie.tokens[node])
    own, others = ([host[path] for path in found] for found in (paths_in(tree, 0), list(paths.values())[1:]))
    assert sorted(own) == pytest.approx(sorted(others))


def test_tries_are_well_formed(options):
    texts = texts_of(7)
    _, tree = built(["suffix", "corpus"], options, texts, nodes=30)
    rows, nodes = tree.tokens_BN.shape
    assert nodes == 31 and tree.tokens_BN[:, 0].tolist() == [text[-1] for text in texts]
    for row in range(rows):
        parents = {child: node for node in range(nodes) for child in tree.child_table_BNK[row, node].tolist() if child}
        for node in range(nodes):
            above, one = {node, 0}, node
            while one in parents:
                assert parents[one] < one
                one = parents[one]
                above.add(one)
            assert one == 0 or one == node, "a path begins at the root"
            assert set(tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()) == above or tree.tokens_BN[row, node] != NO_TOKEN
            assert tree.depths_BN[row, node] == tree.ancestors_BNN[row, node].sum() - 1 <= DEPTH


def test_reading_in_parts_is_reading_at_once(options):
    text = random_text(5, 90, vocabulary=5)
    parts, _ = built(["suffix", "corpus"], options, [text[:20], text[:21]], nodes=12)
    place = torch.tensor([20, 21])
    generator = torch.Generator().manual_seed(0)
    while int(place.max()) < 80:
        counts_B = torch.randint(0, 5, (2,), generator=generator)
        new = [[*text[at : at + 5]] for at in place.tolist()]
        parts.source.texts.append(torch.tensor(new), counts_B)
        place += counts_B
    whole, _ = built(["suffix", "corpus"], options, [text[:at] for at in place.tolist()], nodes=12)
    for row in range(2):
        assert chances_in(parts, row) == chances_in(whole, row)


def test_options_say_how_long_matches_are():
    assert GRAM_CACHES.get("lookup")(GramOptions(max_match=3)).longest_match == 3
    assert not GRAM_CACHES.get("context")(GramOptions()).has_tensors
