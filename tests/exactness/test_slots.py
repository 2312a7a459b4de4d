"""What a server asks of slots: prompts read in parts, beginnings read once, failures of one alone, log-probabilities."""

from collections.abc import Callable, Sequence

import pytest
import torch

from covering import covering, some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

from .setups import DRAFT, TARGET
from .test_admission import open_engine, sequence
from .test_mixed_rows import DECODERS

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams()


def finish(engine: Engine) -> None:
    for _ in range(500):
        if engine.done:
            return
        engine.step()
    raise AssertionError("the loop does not end")


def widths_of(engine: Engine) -> list[int]:
    """Run an engine to its end; return how many slots it had in each step."""
    widths = []
    while not engine.done:
        engine.step()
        widths.append(len(engine.slots))
    return widths


def alone(decoder: Decoder, one: TokenSequence, seed: int) -> list[int]:
    """Return a text as it would be without others; a greedy one as the target's table has it."""
    if one.params == GREEDY and isinstance(decoder.target, TabularModel) and not decoder.eos_token_ids:
        return greedy_text(decoder.target, list(one.prompt), one.end - len(one.prompt), GREEDY)
    result = decoder.generate(list(one.prompt), sampling=one.params, max_new_tokens=one.max_new_tokens, seed=[seed])
    return result.token_ids


def with_a_hole(token: int) -> Decoder:
    """Make a pair whose target knows nothing to say after a certain token."""
    table = TARGET.logits_XV.clone().view(-1, TARGET.vocab_size, TARGET.vocab_size)
    table[:, token] = torch.nan
    target = TabularModel(table.reshape([TARGET.vocab_size] * (TARGET.order + 1)))
    return Decoder(target, TreeDrafter(DRAFT, parse_tree("2x1")))


def force(*tokens: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Make a processor that allows some tokens only."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, list(tokens)] = scores[:, list(tokens)]
        return masked

    return processor


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_model_that_fails_one_text_fails_no_other(params: SamplingParams) -> None:
    decoder = with_a_hole(7).replace(eos_token_ids=())
    sane = SamplingParams(temperature=params.temperature, logit_bias={7: -torch.inf})
    engine = open_engine(decoder, slots=2, isolate=True)
    broken = sequence(decoder, 0, [1, 2, 7], params, limit=9, seed=1)
    others = [sequence(decoder, 1 + n, [3, 4 + n], sane, limit=12, seed=10 + n) for n in range(3)]
    for one in (broken, *others):
        engine.add(one)
    finish(engine)
    assert broken.stop_reason is StopReason.FAILED and broken.new_tokens == []
    assert "not numbers" in str(broken.failure)
    assert [one.new_tokens for one in others] == [alone(decoder, one, 10 + n) for n, one in enumerate(others)]


def test_a_processor_that_raises_fails_its_own_text_alone() -> None:
    decoder = DECODERS["model"]().replace(eos_token_ids=())

    def choosy(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 6:
            raise LookupError("no rule for this")
        return scores

    engine = open_engine(decoder, slots=3, isolate=True)
    bad = sequence(decoder, 0, [1, 2, 3], SamplingParams(processors=(choosy,)), limit=20, seed=0)
    empty = sequence(decoder, 1, [1, 2, 3], SamplingParams(processors=(force(),)), limit=20, seed=0)
    good = sequence(decoder, 2, [5, 6], DRAWN, limit=20, seed=4)
    for one in (bad, empty, good):
        engine.add(one)
    finish(engine)
    assert bad.stop_reason is StopReason.FAILED and "LookupError: no rule for this" in str(bad.failure)
    assert empty.stop_reason is StopReason.FAILED and "left no token" in str(empty.failure)
    assert 3 + len(bad.new_tokens) >= 4 and good.new_tokens == alone(decoder, good, 4)


def test_what_a_failed_text_leaves_behind_reaches_nobody() -> None:
    """The slot's numbers are wiped: even masked ones would come through if they were none."""
    decoder = with_a_hole(7)
    engine = open_engine(decoder, slots=1, isolate=True, reuse=True)
    cleared: list[int] = []
    engine.workspace.clear = cleared.append  # type: ignore[method-assign]
    first = sequence(decoder, 0, [1, 2, 7], GREEDY, limit=9, seed=1)
    engine.add(first)
    finish(engine)
    assert cleared == [0] and list(engine.slots) == [None]


def test_without_isolation_a_failure_is_raised() -> None:
    decoder = with_a_hole(7)
    engine = open_engine(decoder, slots=1)
    engine.add(sequence(decoder, 0, [1, 2, 7], GREEDY, limit=9, seed=1))
    with pytest.raises(RuntimeError, match="not numbers"):
        finish(engine)


@pytest.mark.parametrize(
    ("name", "params"),
    covering(["none", "model", "head", "adaptive model", "lookup+model"], [GREEDY, SamplingParams(temperature=0.7, top_k=9)]),
)
def test_log_probabilities_are_the_targets_own(name: str, params: SamplingParams) -> None:
    decoder = DECODERS[name]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=2)
    one = sequence(decoder, 0, [3, 1, 4, 1, 5], params, limit=24, seed=3)
    one.top_logprobs = 3
    engine.add(one)
    engine.add(sequence(decoder, 1, [2, 7], DRAWN, limit=9, seed=4))
    found = []
    while not engine.done:
        for emitted in engine.step():
            assert len(emitted.logprobs) == (len(emitted.token_ids) if emitted.row == 0 else 0)
            found += emitted.logprobs
    text = list(one.prompt)
    for token, told in zip(one.new_tokens, found, strict=True):
        distribution_V = torch.log_softmax(TARGET.logits_after(text).float(), -1)
        best = distribution_V.topk(3)
        assert told.logprob == pytest.approx(float(distribution_V[token]), abs=1e-5)
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        text.append(token)


@pytest.mark.parametrize("name", some_slow(["none", "model", "head"], ["head"]))
def test_a_long_prompt_keeps_nobody_waiting(name: str) -> None:
    decoder = DECODERS[name]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=2, chunk=8)
    short = sequence(decoder, 0, [1, 2, 3], DRAWN, limit=60, seed=1)
    engine.add(short)
    engine.step()
    long = sequence(decoder, 1, [n % 32 for n in range(43)], DRAWN, limit=10, seed=2)
    engine.add(long)
    for part in range(6):
        before = len(short.new_tokens)
        engine.step()
        assert len(short.new_tokens) > before, part
        assert bool(long.new_tokens) == (part == 5), part
    finish(engine)
    assert (short.new_tokens, long.new_tokens) == (alone(decoder, short, 1), alone(decoder, long, 2))


def count_reading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    context = engine.workspace.memory.context
    prefill = context.prefill

    def counted(texts: Sequence[Sequence[int]], observer: object = None) -> None:
        read.append(sum(map(len, texts)))
        prefill(texts, observer)  # type: ignore[arg-type]

    monkeypatch.setattr(context, "prefill", counted)
    return read


@pytest.mark.parametrize("name", ["none", "model", "head", "suffix"])
def test_the_next_turn_reads_only_what_is_new(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = DECODERS[name]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=3, reuse=True, chunk=64)
    read = count_reading(engine, monkeypatch)
    first = sequence(decoder, 0, [n % 32 for n in range(40)], DRAWN, limit=10, seed=1)
    other = sequence(decoder, 1, [5] * 30, DRAWN, limit=10, seed=2)
    engine.add(other)
    engine.add(first)
    finish(engine)
    read.clear()
    second = sequence(decoder, 2, [*first.tokens, 8, 9, 10], DRAWN, limit=10, seed=3)
    engine.add(second)
    finish(engine)
    assert sum(read) <= 6
    assert second.new_tokens == alone(decoder, second, 3)


def test_a_prompt_given_up_half_read_leaves_a_true_beginning() -> None:
    decoder = DECODERS["head"]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=1, reuse=True, chunk=8)
    prompt = [n % 32 for n in range(30)]
    given_up = sequence(decoder, 0, prompt, DRAWN, limit=10, seed=1)
    engine.add(given_up)
    engine.step()
    engine.end(given_up, StopReason.CANCELLED, 0)
    assert engine.done and engine.free_slots == 1
    again = sequence(decoder, 1, prompt, DRAWN, limit=10, seed=2)
    engine.add(again)
    finish(engine)
    assert again.new_tokens == alone(decoder, again, 2)


def test_rounds_of_a_text_are_counted() -> None:
    decoder = DECODERS["model"]().replace(eos_token_ids=())
    one = sequence(decoder, 0, [1, 2, 3], DRAWN, limit=20, seed=1)
    engine = open_engine(decoder, slots=2)
    engine.add(one)
    finish(engine)
    counted = one.speculation
    assert counted.rounds == engine.stats.rounds == sum(counted.acceptance_histogram)
    assert sum(accepted * rounds for accepted, rounds in enumerate(counted.acceptance_histogram)) == sum(
        counted.accepts_by_depth
    )
    assert counted.candidates == counted.rounds * (engine.session.num_nodes - 1) and counted.resting_passes == 0
    assert counted.tokens_per_pass == pytest.approx(engine.stats.tokens_per_pass)


@pytest.mark.parametrize("name", some_slow(["model", "head", "adaptive model", "lookup+model"], ["head", "lookup+model"]))
def test_a_batch_may_shrink_to_greedy_texts_alone(name: str) -> None:
    decoder = DECODERS[name]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=4, elastic=True)
    texts = [sequence(decoder, n, [3, 1, 4 + n], GREEDY if n == 0 else DRAWN, limit=40 - 9 * n, seed=n) for n in range(4)]
    for one in texts:
        engine.add(one)
    widths = widths_of(engine)
    assert widths[0] == 4 and widths[-1] == 1 and widths == sorted(widths, reverse=True)
    assert [one.new_tokens for one in texts] == [alone(decoder, one, n) for n, one in enumerate(texts)]
