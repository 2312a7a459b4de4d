"""Requests over captured passes, one after another or side by side: ended early, failed, interrupted."""

import gc
import logging
import threading
from types import SimpleNamespace

import pytest
import torch

import polydraft.models.language_model as language_model
from polydraft.beam._workspace import BeamMemory
from polydraft.engine.graphs import GraphCache
from polydraft.errors import FailureError
from stand_in import StandIn

from .capturing import PROMPTS, WAYS, assert_same, beams, outcome


@pytest.mark.parametrize("name", ["table", "head"])
def test_streams_side_by_side_do_not_meet(name):
    captured, plain = beams(name), beams(name, graphs=False)
    options = dict(beams=3, draft_width=6, max_new_tokens=8)
    alone = [plain.search(prompt, **options).best.token_ids for prompt in PROMPTS]
    for _ in range(2):
        streams = [captured.stream(prompt, mode="search", **options) for prompt in PROMPTS]
        texts = [[] for _ in streams]
        for _ in range(9):
            for text, stream in zip(texts, streams, strict=True):
                text.extend(event.token_id for event in [next(stream, None)] if event)
        assert texts == alone


@pytest.mark.parametrize(("name", "end"), [("table", "close"), ("table", "cancel"), ("table", "drop"), ("head", "drop")])
def test_a_request_that_is_left_half_way_gives_its_memories_back(name, end):
    captured, plain = beams(name), beams(name, graphs=False)
    cancel = threading.Event()
    stream = captured.stream(PROMPTS[1], beams=4, draft_width=9, max_new_tokens=40, cancel=cancel)
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
        assert_same(*(outcome(one, prompt) for one in (captured, plain)))
    assert len(captured.graphs) == 2


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("name", ["head", "llama/noisy"])
@torch.inference_mode()
def test_what_a_failure_leaves_behind_reaches_nobody(name, broken):
    """Keys and values that are no numbers come through every mask."""
    captured, plain = beams(name), beams(name, graphs=False)
    outcome(captured, PROMPTS[0])
    stream = captured.stream(PROMPTS[0], beams=3, draft_width=6, max_new_tokens=40)
    stream._run.step()
    held = stream._run._workspace
    memory = held.target_memory if broken == "target" else held.draft_memory
    memory.context.cache.values_LBHSC.fill_(float("nan"))
    with pytest.raises(FailureError, match="not numbers"):
        list(stream)
    stream.close()
    for prompt in PROMPTS[:2]:
        assert_same(*(outcome(one, prompt) for one in (captured, plain)))
    assert held not in captured._spare and len(captured.graphs) == 4


class Interrupted(BaseException):
    """As by a key, which pytest would take for its own."""


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("way", ["search", "iid"])
@pytest.mark.parametrize("where", ["pass", "step"])
def test_an_interrupted_request_does_not_go_on(monkeypatch, where, way, number):
    """Nodes that were about to be passed, or beams that were about to step, would be taken for done."""
    decoder, calls = beams("table", graphs=False), []
    stream = decoder.stream(PROMPTS[1], beams=3, draft_width=6, max_new_tokens=30, seed=1, **WAYS[way])
    owner, name = (stream._run.target.tree, "_forward") if where == "pass" else (stream._run, "_finish_step")
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


def test_closing_a_stream_counts_no_pass_that_is_under_way():
    decoder = beams("table")
    for _ in range(2):
        stream = decoder.stream(PROMPTS[1], beams=3, draft_width=6, max_new_tokens=40)
        next(stream)
        stream.close()
        assert stream.stats.replayed_rounds <= stream.stats.rounds
    assert stream.stats.replayed_rounds == stream.stats.rounds


def test_a_failure_while_the_prompt_is_read_reaches_nobody(monkeypatch):
    captured, plain = beams("table"), beams("table", graphs=False)
    outcome(captured, PROMPTS[0])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(language_model.Context, "prefill", interrupted)
        outcome(captured, PROMPTS[1])
    assert_same(*(outcome(one, PROMPTS[1]) for one in (captured, plain)))
    assert len(captured.graphs) == 4


def test_a_request_reads_its_whole_prompt(monkeypatch):
    """Memories must not show, by their speed or otherwise, what an earlier request was about."""
    captured, read = beams("table"), []
    prefill = language_model.Context.prefill
    monkeypatch.setattr(
        language_model.Context,
        "prefill",
        lambda context, texts, *others: read.append((context.lengths, *texts)) or prefill(context, texts, *others),
    )
    for _ in range(2):
        outcome(captured, PROMPTS[1])
    assert read == 4 * [([0], PROMPTS[1][:-1])] and len(captured.graphs) == 2


def test_without_captures_nothing_is_kept_or_filled_up(monkeypatch):
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


def test_graphs_are_switched_off_for_the_next_request():
    decoder = beams("table")
    outcome(decoder, PROMPTS[0])
    decoder.decoder.graphs = False
    assert outcome(decoder, PROMPTS[0]).stats.replayed_rounds == 0
    assert not decoder._spare and len(decoder.graphs) == 2


def test_what_cannot_be_captured_says_why_once(caplog):
    device = torch.device("cuda")
    whole, spread = (SimpleNamespace(device=device, graph_obstacle=why, start=lambda *_: None) for why in (None, "it is split"))
    spread = _Weak(spread)
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        assert isinstance(BeamMemory(whole, graphs=True).graphs, GraphCache)
        assert BeamMemory(whole, graphs=False).graphs is None and not caplog.text
        assert BeamMemory(spread, graphs=True).graphs is None is BeamMemory(spread, graphs=True).graphs
    assert caplog.text.count("without CUDA graphs: it is split") == 1
    cpu = SimpleNamespace(device=torch.device("cpu"), graph_obstacle=None, start=lambda *_: None)
    assert BeamMemory(cpu, graphs=True).graphs is None


class _Weak:
    """A model that can be told about once."""

    def __init__(self, model):
        self.__dict__.update(vars(model))


@pytest.mark.parametrize("name", ["table", "head"])
def test_a_failed_capture_falls_back_with_a_reason(monkeypatch, caplog, name):
    captured, plain = beams(name), beams(name, graphs=False)
    monkeypatch.setattr(StandIn, "_capture", GraphCache._capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def refuse(*arguments, **options):
        raise RuntimeError("an operation is not permitted\nwhen a stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        for prompt in PROMPTS[:2]:
            got, expected = (outcome(one, prompt) for one in (captured, plain))
            assert_same(got, expected)
            assert got.stats.replayed_rounds == 0
    told = [line for line in caplog.messages if "without CUDA graphs" in line and "an operation is not permitted" in line]
    assert len(told) == sum(len(graphs._refused) for graphs in captured.graphs)
