"""Passes of beams that are captured and replayed, shown without a GPU: the same texts and scores, request after request."""

from dataclasses import replace

import pytest
import torch

import polydraft.beam._slots as slots
import polydraft.models.language_model as language_model
from covering import covering, keeping
from polydraft.beam._node import Node
from polydraft.beam._workspace import BeamMemory, PassSizes
from polydraft.engine import StopReason
from polydraft.sampling import SamplingParams
from stand_in import StandIn

from .capturing import PROMPTS, WAYS, assert_same, beams, outcome, pair

EVERY_WAY = [("table", way) for way in WAYS]


@pytest.mark.parametrize(("name", "way"), keeping([*EVERY_WAY, ("head", "coupled"), ("head", "dynamic")], *EVERY_WAY))
def test_every_way_gives_the_same_texts_and_scores(name, way):
    captured, plain = beams(name), beams(name, graphs=False)
    for prompt in PROMPTS:
        got, expected = (outcome(one, prompt, **WAYS[way]) for one in (captured, plain))
        assert_same(got, expected)
    assert len(captured.graphs) == 2, "all requests must have had the first one's memories"
    assert got.stats.replayed_rounds > got.stats.rounds / 2
    assert all(one.replays > len(one.kinds) / 2 for one in captured.graphs)


DRAFTS = ["head", "near head", "llama/noisy", "llama/early", "llama/none", "mistral-sliding/noisy", "gemma2/noisy"]


# A head, models that draft, none, a window; the others are of these kinds, too.
@pytest.mark.parametrize("name", keeping(DRAFTS, "head", "llama/early", "llama/none", "mistral-sliding/noisy"))
def test_every_draft_and_attention_gives_the_same_texts_and_scores(name):
    captured, plain = beams(name), beams(name, graphs=False)
    options = {} if name != "llama/none" else {"draft_width": None}
    for prompt in PROMPTS:
        assert_same(*(outcome(one, prompt, **options) for one in (captured, plain)))
    assert len(captured.graphs) == (1 if name == "llama/none" else 2)
    assert all(one.replays > len(one.kinds) / 2 for one in captured.graphs)


@pytest.mark.parametrize(
    ("name", "width", "tokens"), keeping([("table", 8, 120), ("table", 40, 60), ("head", 8, 30)], ("table", 8, 120))
)
def test_a_long_text_needs_few_captures(name, width, tokens):
    captured, plain = beams(name), beams(name, graphs=False)
    options = {"max_new_tokens": tokens, "beams": 4, "draft_width": width, "draft_depth": 5, "num_return_sequences": 4}
    captured.decoder.eos_token_ids = plain.decoder.eos_token_ids = ()
    assert_same(*(outcome(one, PROMPTS[1], **options) for one in (captured, plain)))
    passes = [len(graphs.kinds) for graphs in captured.graphs]
    outcome(captured, PROMPTS[1], **options)
    # The very first pass of a memory allocates its bank and is not captured; a head's prompt may allocate the target's.
    firsts = [0 if name == "head" else 1, 1]
    assert [len(graphs.kinds) for graphs in captured.graphs] == [
        2 * count + first for count, first in zip(passes, firsts, strict=True)
    ]
    for graphs in captured.graphs:
        kinds = set(graphs.kinds)
        assert len(kinds) <= 8
        assert graphs.replays >= len(graphs.kinds) - len(kinds)
        assert len({kind[3:] for kind in kinds}) == 1, "a memory that moves makes its captures worthless"


@pytest.mark.parametrize("name", keeping(["table", "head"], "head"))
def test_requests_with_other_distributions_take_turns(name):
    """A capture has a distribution in it: another temperature or truncation, or a search, needs one of its own."""
    captured, plain = beams(name), beams(name, graphs=False)
    colder, wider = SamplingParams(temperature=0.4, top_k=12, top_p=0.95), SamplingParams(temperature=0.9, top_k=20, min_p=0.02)
    ways = [WAYS["coupled"], WAYS["search"], {**WAYS["coupled"], "sampling": colder}, {**WAYS["layers"], "sampling": wider}]
    for way in [*ways, *ways]:
        assert_same(*(outcome(one, PROMPTS[1], max_new_tokens=6, **way) for one in (captured, plain)))
    assert len(captured.graphs) == 2 and all(graphs.replays > 0 for graphs in captured.graphs)


def test_a_first_request_of_one_token_leaves_no_capture_without_features():
    """Its drafts are captured before the target has shown any, and those of later rounds must not be replays of that."""
    captured, plain = beams("head"), beams("head", graphs=False)
    for prompt in (PROMPTS[2], PROMPTS[1]):
        assert_same(*(outcome(one, prompt, draft_depth=5, max_new_tokens=14) for one in (captured, plain)))


@pytest.mark.parametrize("name", keeping(["table", "head"], "head"))
def test_the_bank_may_move_on_the_way(name):
    captured, plain = beams(name, sizes=PassSizes(rows=3, spare=-20)), beams(name, graphs=False)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        assert_same(*(outcome(one, prompt, max_new_tokens=30 if name == "table" else 12) for one in (captured, plain)))
    for graphs in captured.graphs:
        assert len({kind[5] for kind in graphs.kinds}) > 1, "the bank has not moved: nothing is proven"
        assert graphs.replays > 0


def passed_nodes(monkeypatch, decoder, prompt):
    """Return an outcome, and all nodes that went through either model, in order."""
    nodes, original = [], slots.SlotTree._pass
    with monkeypatch.context() as patch:
        patch.setattr(
            slots.SlotTree, "_pass", lambda tree, own: nodes.extend((tree, one) for one in own) or original(tree, own)
        )
        return outcome(decoder, prompt, max_new_tokens=40, draft_width=9), nodes


@pytest.mark.parametrize(
    ("name", "number"),
    keeping(
        [("table", 0), ("table", 1), ("table", 2), ("head", 1), ("head", 2), ("llama/noisy", 1)],
        *(("table", 1), ("head", 1), ("llama/noisy", 1)),
    ),
)
def test_launching_ahead_changes_neither_texts_nor_figures(monkeypatch, name, number):
    """What lies in slots and memories when a forest is being passed must be what lies there when nothing is."""
    got, nodes = passed_nodes(monkeypatch, beams(name, graphs=False), PROMPTS[number])
    expected, expected_nodes = passed_nodes(monkeypatch, beams(name, ahead=False, graphs=False), PROMPTS[number])
    assert_same(got, expected)
    if name != "head":  # whose guesses are read again in any case
        again, expected_again = (len(all_nodes) - len(set(all_nodes)) for all_nodes in (nodes, expected_nodes))
        assert again <= expected_again, "nodes under way were taken for dead, and read once more"


@pytest.mark.parametrize(("name", "where"), covering(["table", "head"], ["spans", "growth", "large passes"]))
def test_spans_storage_and_large_passes_may_change_on_the_way(monkeypatch, name, where):
    sizes = PassSizes(places=8)
    if where == "growth":
        sizes = replace(sizes, spare=-20)
    else:
        monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    if where == "large passes":
        sizes = replace(sizes, tokens=(8, 16))
    captured, plain = beams(name, sizes=sizes), beams(name, graphs=False)
    passes = 0
    for prompt in (PROMPTS[0], 2 * PROMPTS[1]):
        got, expected = (outcome(one, prompt, max_new_tokens=30 if name == "table" else 12) for one in (captured, plain))
        assert_same(got, expected)
        passes += got.stats.rounds
    assert all(graphs.replays > 0 for graphs in captured.graphs)
    kinds = captured.graphs[0].kinds
    if where == "large passes":
        assert len(kinds) < passes, "none was too large: nothing is proven"
    else:
        assert len({kind[2 if where == "spans" else 3] for kind in kinds}) > 1, "nothing has changed: nothing is proven"


@pytest.mark.parametrize("name", ["head", "llama/noisy"])
def test_a_short_text_leaves_no_narrow_span_behind(monkeypatch, name):
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    captured, plain = beams(name, sizes=PassSizes(places=8)), beams(name, graphs=False)
    outcome(captured, PROMPTS[0], max_new_tokens=3, draft_width=4, draft_depth=1)
    assert all(graphs.kinds[-1][2] <= 64 for graphs in captured.graphs)
    assert_same(*(outcome(one, 3 * PROMPTS[1], max_new_tokens=4) for one in (captured, plain)))
    assert len(captured.graphs) == 2


@torch.inference_mode()
def test_a_pass_too_large_to_be_captured_sees_all_slots(monkeypatch):
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    found = []
    for graphs in (StandIn(lambda: []), None):
        memory = BeamMemory(pair("table")[0], graphs=False, sizes=PassSizes(places=8, tokens=(16,)))
        memory.restart(256, 256)
        memory.context.prefill([[1, 2]])
        memory.graphs = graphs
        tree, root = slots.SlotTree(memory), Node(3)
        for count in (8, 50, 9):
            leaves = [root.child(4 + count % 3).child(token) for token in range(count)]
            tree.read(leaves)
            found.append(tree.features(leaves))
    assert all(torch.equal(one, other) for one, other in zip(found[:3], found[3:], strict=True))


def test_the_end_of_the_context():
    captured, plain = beams("llama/noisy"), beams("llama/noisy", graphs=False)
    for length in (120, 126):
        got, expected = (outcome(one, [9] * length, max_new_tokens=50) for one in (captured, plain))
        assert_same(got, expected)
        assert expected.best.stop_reason in (StopReason.CONTEXT, StopReason.EOS)
    assert len(captured.graphs) == 2


def test_dead_slots_are_reclaimed_as_without_captures(monkeypatch):
    moves = []
    rearrange = language_model.Context.rearrange
    monkeypatch.setattr(
        language_model.Context,
        "rearrange",
        lambda context, places_BD: moves.append(places_BD.shape[1]) or rearrange(context, places_BD),
    )
    counts = []
    for graphs in (True, False):
        outcome(beams("table", graphs=graphs), PROMPTS[0], max_new_tokens=60, beams=4, num_return_sequences=4, draft_width=8)
        counts.append(len(moves))
        moves.clear()
    assert counts[0] == counts[1] > 3
