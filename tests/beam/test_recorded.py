"""Passes of beams that are recorded and replayed, shown without a GPU: the same texts and scores, request after request."""

import gc
import logging
import random
import threading
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import polydraft.beam.bank as bank
import polydraft.beam.slots as slots
import polydraft.beam.workspace as workspace
import polydraft.models.language_model as language_model
from polydraft.beam import BeamDecoder
from polydraft.beam.node import Node
from polydraft.beam.run import BeamRun
from polydraft.beam.workspace import BeamMemory, BeamWorkspace
from polydraft.drafters import HeadTree, ModelTree
from polydraft.engine import Decoder, StopReason
from polydraft.engine.recorder import Recorder
from polydraft.errors import FailureError
from polydraft.models import FeatureHead, TabularModel
from polydraft.models.early_exit import early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree
from stand_in import StandIn

from .test_hugging_face import models
from .test_memory import target_and_head

TRUNCATED = SamplingParams(temperature=0.9, top_k=12, top_p=0.95)
WAYS = {
    "search": dict(mode="search", early_stopping=True),
    "coupled": dict(mode="sample", sampling=TRUNCATED),
    "hf": dict(mode="sample", draws="hf"),
    "layers": dict(mode="sample", verification="layers", sampling=TRUNCATED),
    "iid": dict(mode="sample", draws="iid", sampling=TRUNCATED),
    "dynamic": dict(mode="sample", width_threshold=0.6, sampling=TRUNCATED),
    "one cache": dict(mode="sample", one_cache=True, sampling=TRUNCATED),
    "penalty": dict(mode="search", sampling=SamplingParams(temperature=0, repetition_penalty=1.3)),
}
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 60) for _ in range(length)] for length in (3, 40, 1)]


@cache
def pair(name):
    """A target and a drafter."""
    if name == "table":
        target = TabularModel.random(64, 2, seed=3, sharpness=2.5)
        return target, ModelTree(target.mixed_with(TabularModel.random(64, 2, seed=4), 0.7), parse_tree("1"))
    if name in ("head", "near head"):
        target, head = target_and_head(window=512 if name == "head" else 12)
        return target, HeadTree(head, parse_tree("1"))
    family, _, draft = name.partition("/")
    target, noisy = models(family)
    if draft == "none":
        return target, None
    return target, ModelTree(early_exit(target, 2) if draft == "early" else noisy, parse_tree("1"))


def beams(name, **options):
    target, drafter = pair(name)
    return BeamDecoder(Decoder(target, drafter, eos_token_ids=(2, 5, 7), **options))


def outcome(decoder, prompt, **options):
    chosen = {
        "beams": 3,
        "draft_width": 6,
        "draft_depth": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 10,
        "seed": len(prompt),
        **options,
    }
    stream = decoder.stream(prompt, **chosen)
    for _ in stream:
        pass
    return stream.result()


def assert_same(got, expected):
    assert [text.token_ids for text in got.texts] == [text.token_ids for text in expected.texts]
    for one, other in zip(got.texts, expected.texts, strict=True):
        assert (one.sources, one.stop_reason) == (other.sources, other.stop_reason)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert got.stats.rounds == expected.stats.rounds
    assert expected.stats.replayed_rounds == 0


@pytest.fixture(autouse=True)
def recorders(monkeypatch):
    """Give every memory that may record a stand-in, and return those given out."""
    given = []
    original = BeamMemory.__init__

    def with_stand_in(memory, model, graphs):
        original(memory, model, graphs)
        if graphs:
            memory.recorder = StandIn(lambda: [memory.context, memory.bank])
            given.append(memory.recorder)

    monkeypatch.setattr(BeamMemory, "__init__", with_stand_in)
    began = BeamWorkspace.__init__

    def with_what_heads_read(self, target, draft, graphs):
        began(self, target, draft, graphs)
        if graphs and isinstance(draft, FeatureHead):
            self.draft_memory.recorder.owners = lambda: [
                self.draft_memory.context,
                self.draft_memory.bank,
                self.target_memory.bank,
            ]

    monkeypatch.setattr(BeamWorkspace, "__init__", with_what_heads_read)
    # As on a GPU: passes have the laws in them.
    monkeypatch.setattr(BeamRun, "_laws_together", True)
    return given


@pytest.mark.parametrize(("name", "way"), [*(("table", way) for way in WAYS), ("head", "coupled"), ("head", "dynamic")])
def test_every_way_gives_the_same_texts_and_scores(recorders, name, way):
    recorded, plain = beams(name), beams(name, graphs=False)
    for prompt in PROMPTS:
        got, expected = (outcome(one, prompt, **WAYS[way]) for one in (recorded, plain))
        assert_same(got, expected)
    assert len(recorders) == 2, "all requests must have had the first one's memories"
    assert got.stats.replayed_rounds > got.stats.rounds / 2
    assert all(one.replays > len(one.kinds) / 2 for one in recorders)


@pytest.mark.parametrize(
    "name", ["head", "near head", "llama/noisy", "llama/early", "llama/none", "mistral-sliding/noisy", "gemma2/noisy"]
)
def test_every_draft_and_attention_gives_the_same_texts_and_scores(recorders, name):
    recorded, plain = beams(name), beams(name, graphs=False)
    options = {} if name != "llama/none" else {"draft_width": None}
    for prompt in PROMPTS:
        assert_same(*(outcome(one, prompt, **options) for one in (recorded, plain)))
    assert len(recorders) == (1 if name == "llama/none" else 2)
    assert all(one.replays > len(one.kinds) / 2 for one in recorders)


@pytest.mark.parametrize(("name", "width", "tokens"), [("table", 8, 120), ("table", 40, 60), ("head", 8, 30)])
def test_a_long_text_needs_few_recordings(recorders, name, width, tokens):
    recorded, plain = beams(name), beams(name, graphs=False)
    options = {"max_new_tokens": tokens, "beams": 4, "draft_width": width, "draft_depth": 5, "num_return_sequences": 4}
    recorded.decoder.eos_token_ids = plain.decoder.eos_token_ids = ()
    assert_same(*(outcome(one, PROMPTS[1], **options) for one in (recorded, plain)))
    passes = [len(recorder.kinds) for recorder in recorders]
    outcome(recorded, PROMPTS[1], **options)
    # The very first pass of a memory makes its bank, and is no recorder's; the target's may be made by the head's prompt.
    firsts = [0 if name == "head" else 1, 1]
    assert [len(recorder.kinds) for recorder in recorders] == [
        2 * count + first for count, first in zip(passes, firsts, strict=True)
    ]
    for recorder in recorders:
        kinds = set(recorder.kinds)
        assert len(kinds) <= 8
        assert recorder.replays >= len(recorder.kinds) - len(kinds)
        assert len({kind[3:] for kind in kinds}) == 1, "a memory that moves makes its recordings worthless"


@pytest.mark.parametrize("name", ["table", "head"])
def test_requests_with_other_laws_take_turns(recorders, name):
    """A recording has a law in it: another temperature or truncation, or a search, needs one of its own."""
    recorded, plain = beams(name), beams(name, graphs=False)
    colder, wider = SamplingParams(temperature=0.4, top_k=12, top_p=0.95), SamplingParams(temperature=0.9, top_k=20, min_p=0.02)
    ways = [WAYS["coupled"], WAYS["search"], {**WAYS["coupled"], "sampling": colder}, {**WAYS["layers"], "sampling": wider}]
    for way in [*ways, *ways]:
        assert_same(*(outcome(one, PROMPTS[1], max_new_tokens=6, **way) for one in (recorded, plain)))
    assert len(recorders) == 2 and all(recorder.replays > 0 for recorder in recorders)


def test_a_first_request_of_one_token_leaves_no_recording_without_features(recorders):
    """Its drafts are recorded before the target has shown any, and those of later rounds must not be replays of that."""
    recorded, plain = beams("head"), beams("head", graphs=False)
    for prompt in (PROMPTS[2], PROMPTS[1]):
        assert_same(*(outcome(one, prompt, draft_depth=5, max_new_tokens=14) for one in (recorded, plain)))


@pytest.mark.parametrize("name", ["table", "head"])
def test_the_bank_may_move_on_the_way(monkeypatch, recorders, name):
    monkeypatch.setattr(bank, "_FIRST_ROWS", 3)
    monkeypatch.setattr(workspace, "_FIRST_PLACES", -20)
    recorded, plain = beams(name), beams(name, graphs=False)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        assert_same(*(outcome(one, prompt, max_new_tokens=30 if name == "table" else 12) for one in (recorded, plain)))
    for recorder in recorders:
        assert len({kind[5] for kind in recorder.kinds}) > 1, "the bank has not moved: nothing is proven"
        assert recorder.replays > 0


def passed_nodes(monkeypatch, decoder, prompt):
    """Return an outcome, and all nodes that went through either model, in order."""
    nodes, original = [], slots.SlotTree._pass
    with monkeypatch.context() as patch:
        patch.setattr(
            slots.SlotTree, "_pass", lambda tree, own: nodes.extend((tree, one) for one in own) or original(tree, own)
        )
        return outcome(decoder, prompt, max_new_tokens=40, draft_width=9), nodes


@pytest.mark.parametrize(
    ("name", "number"), [("table", 0), ("table", 1), ("table", 2), ("head", 1), ("head", 2), ("llama/noisy", 1)]
)
def test_launching_ahead_changes_neither_texts_nor_figures(monkeypatch, name, number):
    """What lies in slots and memories when a forest is being passed must be what lies there when nothing is."""
    got, nodes = passed_nodes(monkeypatch, beams(name, graphs=False), PROMPTS[number])
    monkeypatch.setattr(BeamRun, "_runs_ahead", False)
    expected, expected_nodes = passed_nodes(monkeypatch, beams(name, graphs=False), PROMPTS[number])
    assert_same(got, expected)
    if name != "head":  # whose guesses are read again in any case
        again, expected_again = (len(all_nodes) - len(set(all_nodes)) for all_nodes in (nodes, expected_nodes))
        assert again <= expected_again, "nodes under way were taken for dead, and read once more"


@pytest.mark.parametrize("name", ["table", "head"])
@pytest.mark.parametrize("where", ["spans", "growth", "large passes"])
def test_spans_storage_and_large_passes_may_change_on_the_way(monkeypatch, recorders, name, where):
    monkeypatch.setattr(slots, "FEWEST_PLACES", 8)
    if where == "growth":
        monkeypatch.setattr(workspace, "_FIRST_PLACES", -20)
    else:
        monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    if where == "large passes":
        monkeypatch.setattr(slots, "_PASS_SIZES", (8, 16))
    recorded, plain = beams(name), beams(name, graphs=False)
    passes = 0
    for prompt in (PROMPTS[0], 2 * PROMPTS[1]):
        got, expected = (outcome(one, prompt, max_new_tokens=30 if name == "table" else 12) for one in (recorded, plain))
        assert_same(got, expected)
        passes += got.stats.rounds
    assert all(recorder.replays > 0 for recorder in recorders)
    kinds = recorders[0].kinds
    if where == "large passes":
        assert len(kinds) < passes, "none was too large: nothing is proven"
    else:
        assert len({kind[2 if where == "spans" else 3] for kind in kinds}) > 1, "nothing has changed: nothing is proven"


@pytest.mark.parametrize("name", ["head", "llama/noisy"])
def test_a_short_text_leaves_no_narrow_span_behind(monkeypatch, recorders, name):
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    monkeypatch.setattr(slots, "FEWEST_PLACES", 8)
    recorded, plain = beams(name), beams(name, graphs=False)
    outcome(recorded, PROMPTS[0], max_new_tokens=3, draft_width=4, draft_depth=1)
    assert all(recorder.kinds[-1][2] <= 64 for recorder in recorders)
    assert_same(*(outcome(one, 3 * PROMPTS[1], max_new_tokens=4) for one in (recorded, plain)))
    assert len(recorders) == 2


@torch.inference_mode()
def test_a_pass_too_large_to_be_recorded_sees_all_slots(monkeypatch):
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    monkeypatch.setattr(slots, "FEWEST_PLACES", 8)
    monkeypatch.setattr(slots, "_PASS_SIZES", (16,))
    found = []
    for recorder in (StandIn(lambda: []), None):
        context = pair("table")[0].start(1, 256)
        context.prefill([[1, 2]])
        tree, root = slots.SlotTree(context, recorder=recorder), Node(3)
        for count in (8, 50, 9):
            leaves = [root.child(4 + count % 3).child(token) for token in range(count)]
            tree.read(leaves)
            found.append(tree.features(leaves))
    assert all(torch.equal(one, other) for one, other in zip(found[:3], found[3:], strict=True))


def test_the_end_of_the_context(recorders):
    recorded, plain = beams("llama/noisy"), beams("llama/noisy", graphs=False)
    for length in (120, 126):
        got, expected = (outcome(one, [9] * length, max_new_tokens=50) for one in (recorded, plain))
        assert_same(got, expected)
        assert expected.best.stop_reason in (StopReason.CONTEXT, StopReason.EOS)
    assert len(recorders) == 2


def test_dead_slots_are_reclaimed_as_without_recordings(monkeypatch):
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


@pytest.mark.parametrize("name", ["table", "head"])
def test_streams_side_by_side_do_not_meet(recorders, name):
    recorded, plain = beams(name), beams(name, graphs=False)
    options = dict(beams=3, draft_width=6, max_new_tokens=8)
    alone = [plain.search(prompt, **options).best.token_ids for prompt in PROMPTS]
    for _ in range(2):
        streams = [recorded.stream(prompt, mode="search", **options) for prompt in PROMPTS]
        texts = [[] for _ in streams]
        for _ in range(9):
            for text, stream in zip(texts, streams, strict=True):
                text.extend(event.token_id for event in [next(stream, None)] if event)
        assert texts == alone


@pytest.mark.parametrize(("name", "end"), [("table", "close"), ("table", "cancel"), ("table", "drop"), ("head", "drop")])
def test_a_request_that_is_left_half_way_gives_its_memories_back(recorders, name, end):
    recorded, plain = beams(name), beams(name, graphs=False)
    cancel = threading.Event()
    stream = recorded.stream(PROMPTS[1], beams=4, draft_width=9, max_new_tokens=40, cancel=cancel)
    next(stream)
    if end == "drop":
        del stream
        gc.collect()
    elif end == "close":
        stream.close()
    else:
        cancel.set()
        list(stream)
    for prompt in PROMPTS[:2]:
        assert_same(*(outcome(one, prompt) for one in (recorded, plain)))
    assert len(recorders) == 2


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("name", ["head", "llama/noisy"])
@torch.inference_mode()
def test_what_a_failure_leaves_behind_reaches_nobody(recorders, name, broken):
    """Keys and values that are no numbers come through every mask."""
    recorded, plain = beams(name), beams(name, graphs=False)
    outcome(recorded, PROMPTS[0])
    stream = recorded.stream(PROMPTS[0], beams=3, draft_width=6, max_new_tokens=40)
    stream._run.step()
    held = stream._run._workspace
    memory = held.target_memory if broken == "target" else held.draft_memory
    memory.context.cache.values_LBHSC.fill_(float("nan"))
    with pytest.raises(FailureError, match="not numbers"):
        list(stream)
    stream.close()
    for prompt in PROMPTS[:2]:
        assert_same(*(outcome(one, prompt) for one in (recorded, plain)))
    assert held not in recorded._spare and len(recorders) == 4


class Interrupted(BaseException):
    """As by a key, which pytest would take for its own."""


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("way", ["search", "iid"])
@pytest.mark.parametrize("where", ["pass", "step"])
def test_an_interrupted_request_does_not_go_on(monkeypatch, where, way, number):
    """Nodes that were about to be passed, or beams that were about to step, would be taken for done."""
    decoder, calls = beams("table", graphs=False), []
    stream = decoder.stream(PROMPTS[1], beams=3, draft_width=6, max_new_tokens=30, seed=1, **WAYS[way])
    owner, name = (stream._run.tree, "_forward") if where == "pass" else (stream._run, "_finish_step")
    original = getattr(owner, name)

    def interrupted(*given):
        calls.append(1)
        if len(calls) == number:
            raise Interrupted
        return original(*given)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupted):
        list(stream)
    with pytest.raises(FailureError, match="start the request again"):
        list(stream)
    stream.close()
    assert stream.result().texts is not None


def test_closing_a_stream_counts_no_pass_that_is_under_way(recorders):
    decoder = beams("table")
    for _ in range(2):
        stream = decoder.stream(PROMPTS[1], beams=3, draft_width=6, max_new_tokens=40)
        next(stream)
        stream.close()
        assert stream.stats.replayed_rounds <= stream.stats.rounds
    assert stream.stats.replayed_rounds == stream.stats.rounds


def test_a_failure_while_the_prompt_is_read_reaches_nobody(monkeypatch, recorders):
    recorded, plain = beams("table"), beams("table", graphs=False)
    outcome(recorded, PROMPTS[0])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(language_model.Context, "prefill", interrupted)
        outcome(recorded, PROMPTS[1])
    assert_same(*(outcome(one, PROMPTS[1]) for one in (recorded, plain)))
    assert len(recorders) == 4


def test_a_request_reads_its_whole_prompt(monkeypatch, recorders):
    """Memories must not show, by their speed or otherwise, what an earlier request was about."""
    recorded, read = beams("table"), []
    prefill = language_model.Context.prefill
    monkeypatch.setattr(
        language_model.Context,
        "prefill",
        lambda context, texts, *others: read.append((context.lengths, *texts)) or prefill(context, texts, *others),
    )
    for _ in range(2):
        outcome(recorded, PROMPTS[1])
    assert read == 4 * [([0], PROMPTS[1][:-1])] and len(recorders) == 2


def test_without_recordings_nothing_is_kept_or_filled_up(monkeypatch):
    plain = beams("table", graphs=False)
    sizes = []
    extend = language_model.Context.extend
    monkeypatch.setattr(
        language_model.Context,
        "extend",
        lambda context, tokens_BT, block: (
            sizes.append((tokens_BT.shape[1], block.places_BT)) or extend(context, tokens_BT, block)
        ),
    )
    outcome(plain, PROMPTS[0], beams=3)
    assert not plain._spare
    assert sizes[0][0] == len(PROMPTS[0]) - 1 and 3 in {size for size, _ in sizes}
    assert all(places_BT is None for _, places_BT in sizes)


def test_graphs_are_switched_off_for_the_next_request(recorders):
    decoder = beams("table")
    outcome(decoder, PROMPTS[0])
    decoder.decoder.graphs = False
    assert outcome(decoder, PROMPTS[0]).stats.replayed_rounds == 0
    assert not decoder._spare and len(recorders) == 2


def test_what_cannot_be_recorded_says_why_once(monkeypatch, caplog):
    monkeypatch.undo()  # the real recorder
    device = torch.device("cuda")
    whole, spread = (SimpleNamespace(device=device, graph_obstacle=why, start=lambda *_: None) for why in (None, "it is split"))
    spread = _Weak(spread)
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        assert isinstance(BeamMemory(whole, graphs=True).recorder, Recorder)
        assert BeamMemory(whole, graphs=False).recorder is None and not caplog.text
        assert BeamMemory(spread, graphs=True).recorder is None is BeamMemory(spread, graphs=True).recorder
    assert caplog.text.count("without CUDA graphs: it is split") == 1
    cpu = SimpleNamespace(device=torch.device("cpu"), graph_obstacle=None, start=lambda *_: None)
    assert BeamMemory(cpu, graphs=True).recorder is None


class _Weak:
    """A model that can be told about once."""

    def __init__(self, model):
        self.__dict__.update(vars(model))


@pytest.mark.parametrize("name", ["table", "head"])
def test_a_failed_recording_falls_back_with_a_reason(monkeypatch, caplog, recorders, name):
    recorded, plain = beams(name), beams(name, graphs=False)
    monkeypatch.setattr(StandIn, "_record", Recorder._record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def refuse(*arguments, **options):
        raise RuntimeError("an operation is not permitted\nwhen a stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        for prompt in PROMPTS[:2]:
            got, expected = (outcome(one, prompt) for one in (recorded, plain))
            assert_same(got, expected)
            assert got.stats.replayed_rounds == 0
    assert caplog.text.count("without CUDA graphs: recording a round failed: an operation is not permitted") == sum(
        len(recorder._refused) for recorder in recorders
    )
