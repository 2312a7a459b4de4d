"""What a captured round relies on, shown without a GPU: tensors that stay where they are, passes of a fixed span."""

from collections.abc import Callable

import pytest
import torch

import polydraft.models.language_model as language_model
from covering import all_slow, covering, some_slow
from families import FAMILIES
from polydraft.draft import DRAFTERS, Combination, Drafter, Parts, Plain
from polydraft.draft.gram_options import GramTreeOptions
from polydraft.draft.grams import gram_tree
from polydraft.engine import Decoder
from polydraft.engine.workspace import Workspace, device_failure
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import parse_tree
from stand_in import round_graphs

from .setups import DRAFT, HEAD, RAGGED_PROMPTS, TARGET
from .shipped import SHIPPED, make_shipped_decoder

UNIONS = ["lookup+model", "lookup+head", "self-draft+head"]
ALIKE = [*UNIONS, "suffix"]


def drafter(name: str, tree: str = "3x2x1") -> Drafter:
    parts = Parts(draft=HEAD if name.endswith("head") else DRAFT, topology=parse_tree(tree))
    grams, _, own = name.rpartition("+")
    if grams:
        return Combination(DRAFTERS.get(own)(parts), gram_tree([grams], GramTreeOptions()))
    return DRAFTERS.get(name)(parts)


def captured_drafters() -> list[str]:
    """Names of drafters whose rounds are captured, at least in part."""
    found = []
    for name in [*DRAFTERS, *UNIONS]:
        try:
            session = drafter(name).start(RowParams((SamplingParams(),)), TARGET)
        except UsageError:  # it needs parts of its own
            continue
        if session.capturable.never is None:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("name", "temperature"),
    # Unions are captured as their parts are, and what a text repeats in one way.
    [
        *covering([name for name in captured_drafters() if name not in ALIKE], [0.0, 1.0]),
        *all_slow([name for name in captured_drafters() if name in ALIKE], [0.0, 1.0]),
    ],
)
def test_rounds_of_a_fixed_span_give_the_same_texts(monkeypatch: pytest.MonkeyPatch, name: str, temperature: float) -> None:
    check_captured(monkeypatch, lambda: Decoder(TARGET, drafter(name)), temperature)


@pytest.mark.parametrize("temperature", some_slow([0.0, 1.0], [0.0]))
@pytest.mark.parametrize("kind", SHIPPED)
def test_what_is_published_for_a_target_too(monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float) -> None:
    settings = {"scheme": "auto", "walk": "auto", "tree": "3x2x1", "drafter": "head"}
    check_captured(monkeypatch, lambda: make_shipped_decoder(**settings, kind=kind), temperature)


def check_captured(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Decoder], temperature: float, size: int = 30) -> None:
    sampling = SamplingParams(temperature=temperature, repetition_penalty=1.2)
    expected = make().generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=size, seed=3)
    workspaces: list[Workspace] = []
    original = Workspace.__init__

    def with_stand_in(workspace: Workspace, *arguments: object) -> None:
        original(workspace, *arguments)
        workspace.launcher.graphs = round_graphs(workspace, before=0)
        workspaces.append(workspace)

    monkeypatch.setattr(Workspace, "__init__", with_stand_in)
    decoder = make()
    for _ in range(2):
        results = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=size, seed=3)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        assert results[0].stats.replayed_rounds == results[0].stats.rounds
    assert len(workspaces) == 1, "the second request must find the first one's captures"
    if workspaces[0].session.capturable.host_tree is None:
        assert len(set(workspaces[0].launcher.graphs.kinds)) == 1, "one capture must serve for both"


def test_a_draft_catches_up_with_n_grams_beyond_the_span_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads between two rounds may reach past the slots that the captured ones looked at; it must see all of it."""
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 1)
    prompt = [5, 6, 7, 8, 9, 10, 11] * 3
    found = []
    for captured in (True, False):
        decoder = Decoder(TARGET, drafter("lookup+model", "1"))
        workspace = decoder._lend(decoder.drafter, RowParams((SamplingParams(temperature=0),)), keep=False)
        monkeypatch.setattr(decoder, "_lend", lambda *_, workspace=workspace: workspace)
        if captured:
            workspace.launcher.graphs = round_graphs(workspace, before=0)
        context = workspace.session.contexts[0]
        read: list[object] = []
        prefill = context.prefill
        noted = lambda texts, *others, prefill=prefill, read=read: read.append(texts) or prefill(texts, *others)  # noqa: E731
        monkeypatch.setattr(context, "prefill", noted)
        result = decoder.generate(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=40)
        assert len(read) > 1, "the draft never had to catch up: nothing is proven"
        found.append((result.token_ids, result.stats.rounds, result.stats.accepts_by_depth))
    assert found[0] == found[1]


def test_the_usual_drafters_are_captured() -> None:
    assert {"none", "model", "head", "lookup", "ngram", "self-draft", *UNIONS} <= set(captured_drafters())


def test_a_hugging_face_model_sees_no_more_through_a_wide_span(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFModel(FAMILIES.get("llama").build())
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4]]
    expected = Decoder(target).generate(prompts, sampling=SamplingParams(temperature=0), max_new_tokens=12)
    workspace = Workspace(target, Plain(), RowParams.of(SamplingParams(temperature=0), 3))
    workspace.launcher.graphs = round_graphs(workspace, before=0)
    decoder = Decoder(target)
    monkeypatch.setattr(decoder, "_lend", lambda *_: workspace)
    workspace.memory.context.reserve(1024)
    results = decoder.generate(prompts, sampling=SamplingParams(temperature=0), max_new_tokens=12)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


def test_a_workspace_in_use_is_not_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "captures", True)
    decoder = Decoder(TARGET, drafter("model"))
    alone = [decoder.generate(prompt, max_new_tokens=9, seed=2).token_ids for prompt in RAGGED_PROMPTS]
    streams = [decoder.stream(prompt, max_new_tokens=9, seed=2) for prompt in RAGGED_PROMPTS]
    texts: list[list[int]] = [[] for _ in streams]
    for _ in range(9):
        for text, stream in zip(texts, streams, strict=True):
            text.extend(event.token_id for event in [next(stream, None)] if event)
    assert texts == alone


def test_an_ended_or_forgotten_stream_gives_its_workspace_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "captures", True)
    decoder = Decoder(TARGET, drafter("model"))
    first = decoder.stream(RAGGED_PROMPTS[0], max_new_tokens=9, seed=2)
    workspace = first.engine.workspace
    next(first)
    assert decoder.stream(RAGGED_PROMPTS[0], max_new_tokens=9).engine.workspace is not workspace
    del first
    assert decoder.stream(RAGGED_PROMPTS[0], max_new_tokens=9).engine.workspace is workspace


def test_a_request_without_keep_reads_its_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lent workspace must not show, by its speed or otherwise, what an earlier request was about."""
    monkeypatch.setattr(Workspace, "captures", True)
    decoder = Decoder(TARGET, drafter("model"))
    decoder.generate(RAGGED_PROMPTS[1], max_new_tokens=4, seed=0)
    context = decoder._spare[0][1].memory.context
    passed: list[int] = []
    extend = context.extend
    monkeypatch.setattr(
        context, "extend", lambda tokens_BT, block: passed.append(tokens_BT.shape[1]) or extend(tokens_BT, block)
    )
    decoder.stream(RAGGED_PROMPTS[1], max_new_tokens=4, seed=0)
    assert sum(passed) == len(RAGGED_PROMPTS[1]) - 1


@pytest.mark.parametrize("name", ["lookup", "ngram"])
def test_a_lent_workspace_has_read_nothing_of_earlier_texts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Workspace, "captures", True)
    decoder = Decoder(TARGET, drafter(name))
    first = decoder.generate(RAGGED_PROMPTS[1], max_new_tokens=12, seed=0)
    source = decoder._spare[0][1].session._certain.source
    assert [row.read for row in source.rows] == [[*RAGGED_PROMPTS[1], *first.token_ids]]
    read: list[int] = []
    for memory in source.rows[0].memories:
        monkeypatch.setattr(memory, "read", lambda tokens, read_by=memory.read: read.extend(tokens) or read_by(tokens))
    # Not even where the new text continues the old one.
    longer = [*RAGGED_PROMPTS[1], *first.token_ids, 3]
    decoder.stream(longer, max_new_tokens=4, seed=0)
    assert read == len(source.rows[0].memories) * longer


def test_errors_of_the_device_are_one_line() -> None:
    assert "smaller batch" in str(device_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB")))
    lost = str(device_failure(RuntimeError("CUDA error: device lost\nmore\nlines")))
    assert "device lost" in lost and "\n" not in lost
