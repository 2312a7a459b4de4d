"""Passes of beams replayed from CUDA graphs: the same texts as without."""

import pytest
import torch

from polydraft.beam import BeamDecoder
from polydraft.draft import Plain
from polydraft.engine import Decoder
from polydraft.sampling import SamplingParams

from .test_graphs import build
from .test_round import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WAYS = {"search": {"mode": "search"}, "coupled": {"mode": "sample", "sampling": SamplingParams(top_k=20), "seed": 3}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["none", "model", "head"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_replayed_passes_give_the_same_texts(name: str, kind: str, way: str) -> None:
    target, drafter = build(name, kind)
    captured, eager = (BeamDecoder(Decoder(target, drafter, graphs=graphs)) for graphs in (True, False))
    options = {"beams": 4, "num_return_sequences": 4, "max_new_tokens": 40, **WAYS[way]}
    for prompt in [*PROMPTS, [7], list(range(3, 60))]:
        streams = [decoder.stream(prompt, **options) for decoder in (captured, eager)]
        for stream in streams:
            list(stream)
        results, expected = (stream.result() for stream in streams)
        assert [text.token_ids for text in results.texts] == [text.token_ids for text in expected.texts]
        assert [text.score for text in results.texts] == pytest.approx([text.score for text in expected.texts], abs=1e-3)
        assert results.stats.replayed_rounds > results.stats.rounds / 2, "passes were not replayed"
        assert expected.stats.replayed_rounds == 0
    (workspace,) = captured._spare
    memories = [workspace.target_memory, *([] if isinstance(drafter, Plain) else [workspace.draft_memory])]
    assert all(memory is not None and memory.graphs is not None and len(memory.graphs) > 0 for memory in memories)
    assert all(memory.graphs.obstacle is None for memory in memories)


def test_a_second_request_captures_nothing_new() -> None:
    target, drafter = build("llama", "head")
    decoder = BeamDecoder(Decoder(target, drafter))
    first = decoder.search(PROMPTS[0], max_new_tokens=40)
    (workspace,) = decoder._spare
    # A third one, because a kind that came once in the first is captured in the second.
    decoder.search(PROMPTS[0], max_new_tokens=40)
    known = [len(memory.graphs) for memory in (workspace.target_memory, workspace.draft_memory)]
    again = decoder.search(PROMPTS[0], max_new_tokens=40)
    assert [len(memory.graphs) for memory in (workspace.target_memory, workspace.draft_memory)] == known
    assert all(count > 0 for count in known)
    assert again.best.token_ids == first.best.token_ids
    assert again.stats.replayed_rounds > first.stats.replayed_rounds


def test_streams_side_by_side_do_not_meet() -> None:
    target, drafter = build("llama", "model")
    captured, eager = (BeamDecoder(Decoder(target, drafter, graphs=graphs)) for graphs in (True, False))
    expected = [eager.search(prompt, max_new_tokens=25).best.token_ids for prompt in PROMPTS]
    for _ in range(2):
        streams = [captured.stream(prompt, max_new_tokens=25) for prompt in PROMPTS]
        texts: list[list[int]] = [[] for _ in PROMPTS]
        for _ in range(26):
            for text, stream in zip(texts, streams, strict=True):
                text.extend(event.token_id for event in [next(stream, None)] if event)
        assert texts == expected
