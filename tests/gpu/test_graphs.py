"""Rounds replayed from a CUDA graph: the same texts as without, and what happens when there can be none."""

import logging
import warnings

import pytest
import torch

from families import FAMILIES
from polydraft.draft import Combination, Drafter, Plain, TreeDrafter
from polydraft.draft.gram_options import GramTreeOptions
from polydraft.draft.grams import gram_tree
from polydraft.engine import Decoder, TokenSequence
from polydraft.engine.graphs import GraphCache
from polydraft.models import Context, TabularModel
from polydraft.models.hf import HFModel
from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.request import Request
from polydraft.trees import DynamicShape, parse_tree

from .test_round import COSTS, PROMPTS, head_tree, parallel_tree, perturbed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2),
    "late end": SamplingParams(min_tokens=35, stop_token_ids=tuple(range(0, 60, 3))),
}


def build(name: str, kind: str) -> tuple[HFModel, Drafter]:
    target = HFModel(FAMILIES.get(name).build().to("cuda"))
    grams, _, kind = kind.rpartition("+")
    drafter: Drafter
    if kind == "none":
        drafter = Plain()
    elif kind in ("lookup", "self-draft"):
        drafter = gram_tree([kind], GramTreeOptions())
    else:
        tree = DynamicShape(nodes=24, depth=4) if kind.startswith("dynamic") else parse_tree("4x2x1")
        own = kind.endswith("head")
        if kind.endswith(("peagle", "dflash")):
            return target, parallel_tree(target, kind.removeprefix("dynamic-"), tree)
        drafter = head_tree(target, tree) if own else TreeDrafter(perturbed(name, "cuda"), tree, costs=COSTS)
    return target, Combination(drafter, gram_tree([grams], GramTreeOptions())) if grams else drafter


@pytest.mark.parametrize("kind", ["none", "head"])
def test_prompts_that_captured_passes_read_have_the_same_texts(kind: str) -> None:
    """In float32, where small models are invariant too: every length meets a capture that another one made."""
    target = HFModel(FAMILIES.get("llama").build(max_position_embeddings=512).to("cuda"), invariant=True)
    drafter = Plain() if kind == "none" else head_tree(target, parse_tree("3x1"))
    captured, eager = Decoder(target, drafter), Decoder(target, drafter, graphs=False)
    captured.warm_up(sampling=SAMPLINGS["greedy"], longest=400)
    for length in (1, 2, 31, 33, 34, 90, 97, 150, 256, 257, 300, 33, 5):
        prompt = [(7 * length + 3 * place) % 60 + 2 for place in range(length)]
        for sampling in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
            options = {"sampling": sampling, "max_new_tokens": 12, "seed": length}
            assert captured.generate(prompt, **options).token_ids == eager.generate(prompt, **options).token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "kind",
    [
        *("none", "model", "head", "lookup", "self-draft", "dynamic", "dynamic-head"),
        *("lookup+model", "lookup+head", "self-draft+head", "lookup+dynamic-head"),
        *("peagle", "dflash", "dynamic-peagle", "dynamic-dflash"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_replayed_rounds_give_the_same_texts(name: str, kind: str, sampling: SamplingParams) -> None:
    target, drafter = build(name, kind)
    captured, eager = Decoder(target, drafter), Decoder(target, drafter, graphs=False)
    for prompts, seed in ((PROMPTS, 3), (PROMPTS[::-1], 4), (PROMPTS[:1], 5)):
        results = captured.generate(prompts, sampling=sampling, max_new_tokens=40, seed=seed)
        expected = eager.generate(prompts, sampling=sampling, max_new_tokens=40, seed=seed)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        assert results[0].stats.replayed_rounds > results[0].stats.rounds / 2, "rounds were not replayed"
        assert expected[0].stats.replayed_rounds == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["none", "model", "head", "dynamic", "dynamic-head", "lookup", "lookup+head", "dflash"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounds_that_run_ahead_give_the_same_texts(name: str, kind: str, temperature: float) -> None:
    target, drafter = build(name, kind)
    sampling = SamplingParams(temperature=temperature)
    whole = Decoder(target, drafter, graphs=False).generate(PROMPTS, sampling=sampling, max_new_tokens=36, seed=3)
    ends = [whole[0].token_ids[20], whole[1].token_ids[30]]  # so that rows end at different times
    for eos_token_ids in ([], ends):
        pair = [Decoder(target, drafter, ahead=ahead, eos_token_ids=eos_token_ids) for ahead in (True, False)]
        texts: list[list[int]] = PROMPTS
        for turn in range(3):
            options = {"sampling": sampling, "max_new_tokens": 36, "seed": 3 + turn, "keep": turn > 0}
            results, expected = (decoder.generate(texts, **options) for decoder in pair)
            assert [one.token_ids for one in results] == [one.token_ids for one in expected]
            assert [one.stop_reason for one in results] == [one.stop_reason for one in expected]
            figures, others = (found[0].stats for found in (results, expected))
            assert (figures.rounds, figures.passes) == (others.rounds, others.passes)
            assert figures.offers_by_depth == others.offers_by_depth
            assert figures.accepts_by_depth == others.accepts_by_depth
            assert others.rounds_ahead == 0
            # A round of another size than the last one waits.
            least = 0 if kind.startswith("dynamic") else figures.rounds / 2
            assert eos_token_ids or figures.rounds_ahead > least, "rounds did not run ahead"
            texts = [[*text, *one.token_ids, 5] for text, one in zip(texts, results, strict=True)]


@pytest.mark.parametrize("kind", ["none", "model", "head", "lookup", "lookup+head"])
def test_neither_running_ahead_nor_ending_waits_for_the_device(kind: str) -> None:
    """The host waits for the event of an outcome's copy, which is no look at the device."""
    target, drafter = build("llama", kind)
    stream = Decoder(target, drafter).stream(PROMPTS[0], max_new_tokens=60, seed=0)
    for _ in range(6):
        stream.engine.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            stream.engine.step()
            stream.close()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stream.stats.rounds_ahead > 1


def test_penalties_wait_for_the_outcome() -> None:
    target, drafter = build("llama", "model")
    result = Decoder(target, drafter).generate(PROMPTS[0], sampling=SAMPLINGS["truncated"], max_new_tokens=40, seed=0)
    assert result.stats.replayed_rounds > 0 and result.stats.rounds_ahead == 0


@pytest.mark.parametrize("kind", ["head", "lookup", "lookup+head"])
def test_a_second_request_captures_nothing_new(kind: str) -> None:
    target, drafter = build("llama", kind)
    decoder = Decoder(target, drafter)
    first = decoder.generate(PROMPTS, max_new_tokens=30, seed=1)
    again = decoder.generate(PROMPTS, max_new_tokens=30, seed=1)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    decoder.generate(PROMPTS, max_new_tokens=30, seed=1)  # a kind that came once in the first is captured in the second
    last = decoder.generate(PROMPTS, max_new_tokens=30, seed=1)
    assert last[0].stats.replayed_rounds == last[0].stats.rounds


@torch.inference_mode()
def test_no_prompt_waits_for_plans_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = build("llama", "none")
    used: list[bool] = []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda *given: used.append(torch.backends.cuda.cudnn_sdp_enabled()) or forward(*given)
    )
    before = torch.backends.cuda.cudnn_sdp_enabled()
    context = target.start(1, 256)
    context.prefill([list(range(3, 203)) if target.vocab_size > 203 else [3] * 200])
    assert used and not any(used) and torch.backends.cuda.cudnn_sdp_enabled() == before


def test_streams_side_by_side_do_not_meet() -> None:
    target, drafter = build("llama", "model")
    decoder, alone = Decoder(target, drafter), Decoder(target, drafter, graphs=False)
    streams = [decoder.stream(prompt, max_new_tokens=25, seed=7) for prompt in PROMPTS]
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(25):
        for text, stream in zip(texts, streams, strict=True):
            text.extend(event.token_id for event in [next(stream, None)] if event)
    assert texts == [alone.generate(prompt, max_new_tokens=25, seed=7).token_ids for prompt in PROMPTS]


def test_growing_past_a_span_captures_anew_and_stays_right() -> None:
    target, drafter = build("gpt2", "model")
    prompt = list(range(1, 60))
    sampling = SamplingParams(temperature=0)
    decoder = Decoder(target, drafter)
    for context in decoder._lend(decoder.drafter, RowParams((sampling,)), keep=False).contexts:
        assert context.span is None
    import polydraft.models.language_model as language_model

    smallest, language_model._SMALLEST_SPAN = language_model._SMALLEST_SPAN, 16
    try:
        result = decoder.generate(prompt, sampling=sampling, max_new_tokens=64, seed=0)
    finally:
        language_model._SMALLEST_SPAN = smallest
    expected = Decoder(target, drafter, graphs=False).generate(prompt, sampling=sampling, max_new_tokens=64, seed=0)
    assert result.token_ids == expected.token_ids


def test_the_distribution_of_replayed_texts_is_the_targets() -> None:
    """First tokens of many rows of one captured batch, against the table's own distribution (chi-square, false alarm 1e-4)."""
    table = TabularModel.random(16, 2, seed=0)
    blend = table.mixed_with(TabularModel.random(16, 2, seed=1), 0.6)
    cube = [model.logits_XV.to("cuda").reshape(16, 16, 16) for model in (table, blend)]
    decoder = Decoder(TabularModel(cube[0]), TreeDrafter(TabularModel(cube[1]), parse_tree("3x2x1")))
    results = decoder.generate([[3, 5]] * 4000, max_new_tokens=12, seed=11)
    assert results[0].stats.replayed_rounds > 0
    texts = torch.tensor([[3, 5, *result.token_ids] for result in results])
    # The seventh new token on is emitted by replayed rounds: each is drawn given the two tokens before it.
    statistic, freedom = 0.0, 0
    for place in range(9, texts.shape[1]):
        for one in range(16):
            for other in range(16):
                chosen = texts[(texts[:, place - 2] == one) & (texts[:, place - 1] == other), place]
                expected = torch.softmax(table.logits_XV[one * 16 + other].double().cpu(), -1) * len(chosen)
                large = expected >= 5
                if large.sum() < 2:
                    continue
                counts = torch.bincount(chosen, minlength=16).double()
                pairs = [(counts[large], expected[large])]
                if expected[~large].sum() >= 5:
                    pairs.append((counts[~large].sum()[None], expected[~large].sum()[None]))
                    freedom += int(large.sum())
                else:
                    scale = counts[large].sum() / expected[large].sum()
                    pairs = [(counts[large], expected[large] * scale)]
                    freedom += int(large.sum()) - 1
                statistic += sum(float(((count - mean) ** 2 / mean).sum()) for count, mean in pairs)
    from scipy.stats import chi2

    assert freedom > 100
    assert chi2.sf(statistic, freedom) > 1e-4, (statistic, freedom)


def test_what_cannot_be_recorded_runs_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = build("llama", "model")

    class Wish:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    with caplog.at_level(logging.WARNING, logger="polydraft"):
        result = Decoder(target, drafter).generate(PROMPTS[0], sampling=SamplingParams(processors=(Wish(),)), max_new_tokens=8)
    assert result.stats.replayed_rounds == 0
    assert caplog.text.count("without CUDA graphs: logits processors") == 1


def test_a_failed_recording_falls_back_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    graphs = GraphCache()

    def looks_at_values(values: torch.Tensor) -> torch.Tensor:
        return values * float(values.sum().item())

    values = torch.ones(3, device="cuda")
    with caplog.at_level(logging.WARNING, logger="polydraft"):
        for _ in range(3):
            output, replayed = graphs.run("kind", looks_at_values, values)
            assert not replayed and output.tolist() == [3, 3, 3]
    assert caplog.text.count("without CUDA graphs: capturing a round failed") == 1
    assert torch.ones(2, device="cuda").sum().item() == 2, "the device goes on"


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["none", "model", "head"])
def test_rounds_have_fewer_rows_as_texts_end(kind: str, sampling: str) -> None:
    """Texts move to the first rows; captures of all sizes find what they need where it was."""
    target = HFModel(FAMILIES.get("llama").build(max_position_embeddings=512).to("cuda"), invariant=True)
    drafter = (
        build("llama", kind)[1] if kind == "model" else Plain() if kind == "none" else head_tree(target, parse_tree("3x1"))
    )
    captured, eager = Decoder(target, drafter), Decoder(target, drafter, graphs=False)
    prompts = [[3 + row, 9, 14, 2 + 5 * row] for row in range(8)]
    limits = [9, 300, 4, 60, 320, 7, 50, 3]
    for turn in range(3):
        options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": limits, "seed": [10 * turn + row for row in range(8)]}
        stream = captured.stream(prompts, **options)
        rows = set()
        for _ in stream:
            rows.add(len(stream.engine.slots))
        for row, (prompt, found) in enumerate(zip(prompts, stream.results(), strict=True)):
            alone = eager.generate(prompt, sampling=SAMPLINGS[sampling], max_new_tokens=limits[row], seed=[10 * turn + row])
            assert found.token_ids == alone.token_ids, (turn, row)
        assert {8, 2} <= rows, rows
    assert stream.stats.replayed_rounds > 0.8 * stream.stats.rounds


def test_lanes_hand_their_storage_on() -> None:
    """Whoever drafts next captures anew, in the same memory: greedy texts are those of plain decoding."""
    target = HFModel(FAMILIES.get("llama").build(max_position_embeddings=512).to("cuda"), invariant=True)
    greedy, places, memory, taken = SAMPLINGS["greedy"], (64, 64), list[Context](), list[int]()
    size = LaneOptions(slots=4, slot_tokens=256, chunk_tokens=64, stall_seconds=0.1, places=places)
    prompts = [[(7 * length + 3 * place) % 60 + 2 for place in range(length)] for length in (3, 40, 150, 9, 64, 33)]
    expected = [Decoder(target, graphs=False).generate(prompt, sampling=greedy, max_new_tokens=30) for prompt in prompts]
    draft = perturbed("llama", "cuda")
    for drafter in (TreeDrafter(draft, parse_tree("3x2x1")), Plain(), TreeDrafter(draft, parse_tree("4x1")), Plain()):
        lane = Lane(Decoder(target, drafter), size, memory)
        if not memory:
            lane.reserve()
        texts = [
            TokenSequence(prompt=prompt, params=greedy, generator=row_generator(0), max_new_tokens=30, max_positions=256)
            for prompt in prompts
        ]
        lane.waiting.add(Request(texts))
        while lane.busy:
            lane.step()
        assert [text.new_tokens for text in texts] == [one.token_ids for one in expected], drafter.name
        taken.append(lane.cache_bytes)
        memory = lane.release()
    assert taken == taken[:1] * 4
