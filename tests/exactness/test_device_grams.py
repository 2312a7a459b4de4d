"""N-grams looked up on the device: the distribution of texts, captured rounds, rows of their own, nothing from the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from covering import all_slow, covering, some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import GRAM_DRAFTERS
from polydraft.draft.device_trie import DeviceGramSource, DeviceTrieBuilder
from polydraft.engine import Decoder, Stats, StopReason
from polydraft.engine.round import run_round
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from stand_in import StandIn

from .configurations import THRESHOLD, Configuration
from .setups import GRAM_PROMPT, PENALTIES, RAGGED_PROMPTS, TARGET, VOCABULARY, make_decoder
from .test_captured_dynamic import Sealed

GREEDY = SamplingParams(temperature=0)
SAMPLINGS: dict[str, Any] = {
    "greedy": GREEDY,
    "drawn": SamplingParams(),
    "penalties": PENALTIES,
    "mixed": [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9)],
}
PROMPTS = [[*prompt, *GRAM_PROMPT] for prompt in RAGGED_PROMPTS]
SEEDS = [7, 8, 9]
ALONE = [name for name in GRAM_DRAFTERS if name in ("lookup", "suffix", "corpus")]
UNIONS = ["suffix+corpus", "lookup+model", "suffix+corpus+head", "corpus+head"]

# By default a text's own n-grams, and a corpus beside a draft, have their distribution tested; unions take longest in the rest.
every_drafter = pytest.mark.parametrize("drafter", some_slow([*ALONE, *UNIONS], ["lookup", "corpus", *UNIONS[:-1]]))
QUICK = [*ALONE, "lookup+model"]
each_with_some_sampling = pytest.mark.parametrize(
    ("drafter", "sampling"),
    [*covering(QUICK, SAMPLINGS), *all_slow([name for name in UNIONS if name not in QUICK], SAMPLINGS)],
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, hide_values: Callable[[], None], short_blocks: None) -> None:
    """N-grams are tensors, nobody looks at values, and rounds may be captured."""
    monkeypatch.setattr("polydraft.draft.device_trie.captures", lambda device: True)
    hide_values()


def decoder_of(drafter: str, **options: Any) -> Decoder:
    own = make_decoder(drafter=drafter, scheme="auto")
    return Decoder(own.target, own.drafter, **options)


def texts(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


@every_drafter
def test_texts_follow_the_target_distribution(drafter: str) -> None:
    configuration = Configuration(label=f"device {drafter}", drafter=drafter, scheme="auto", prompt=GRAM_PROMPT, samples=800)
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    assert set(results[0].stats.tokens_by_source) - {"target", "model", "head", "dynamic"}, "no n-gram was accepted"


@each_with_some_sampling
def test_captured_rounds_that_run_ahead_give_the_same_texts(caches: list[StandIn], drafter: str, sampling: str) -> None:
    makers = [decoder_of(drafter), decoder_of(drafter, ahead=False), decoder_of(drafter, graphs=False)]
    for prompts, limit in ((PROMPTS, 40), (PROMPTS[::-1], 9)):
        options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": limit, "seed": SEEDS}
        ahead, captured, eager = (decoder.generate(prompts, **options) for decoder in makers)
        assert texts(ahead) == texts(captured) == texts(eager)
        assert [one.sources for one in ahead] == [one.sources for one in captured] == [one.sources for one in eager]
        figures = [results[0].stats for results in (ahead, captured, eager)]
        assert len({one.rounds for one in figures}) == 1
        assert figures[0].accepts_by_depth == figures[1].accepts_by_depth == figures[2].accepts_by_depth
        if limit == 40:
            assert figures[1].replayed_rounds > figures[1].rounds / 2 and figures[2].replayed_rounds == 0
            # A draft model must read what n-grams added, and penalties count what was emitted, before the next round.
            waits = drafter == "lookup+model" or sampling == "penalties"
            assert waits == (figures[0].rounds_ahead == 0)


@each_with_some_sampling
def test_rows_are_their_own(drafter: str, sampling: str) -> None:
    decoder, params = decoder_of(drafter), SAMPLINGS[sampling]
    together = decoder.generate(PROMPTS, sampling=params, max_new_tokens=25, seed=SEEDS)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        own = params[row] if isinstance(params, list) else params
        assert decoder.generate(prompt, sampling=own, max_new_tokens=25, seed=[seed]).token_ids == together[row].token_ids
        if own is GREEDY:
            assert together[row].token_ids == greedy_text(TARGET, prompt, 25, GREEDY)


@pytest.mark.parametrize("drafter", some_slow(["lookup", "suffix+corpus", "suffix+corpus+head"], ["lookup", "suffix+corpus"]))
def test_kept_texts_are_those_of_fresh_ones(caches: list[StandIn], drafter: str) -> None:
    decoder, prompts = decoder_of(drafter, eos_token_ids=[13]), PROMPTS
    for turn in range(4):
        fresh = decoder_of(drafter, eos_token_ids=[13], graphs=False).generate(prompts, max_new_tokens=9, seed=[turn] * 3)
        kept = decoder.generate(prompts, max_new_tokens=9, seed=[turn] * 3, keep=True)
        assert [(row.token_ids, row.sources) for row in kept] == [(row.token_ids, row.sources) for row in fresh]
        prompts = [text + row.token_ids[: -1 - turn % 2] + [5, turn] for text, row in zip(prompts, fresh, strict=True)]


@pytest.mark.parametrize("drafter", some_slow(["suffix", "suffix+corpus+head"], ["suffix+corpus+head"]))
def test_an_end_token_ends_the_text_wherever_it_falls(caches: list[StandIn], drafter: str) -> None:
    whole = decoder_of(drafter).generate(PROMPTS, max_new_tokens=24, seed=SEEDS)
    inside = 0
    for end in range(0, VOCABULARY, 4):
        results = decoder_of(drafter, eos_token_ids=[end]).generate(PROMPTS, max_new_tokens=24, seed=SEEDS)
        for full, short in zip(whole, results, strict=True):
            ended = end in full.token_ids
            length = full.token_ids.index(end) + 1 if ended else 24
            assert (short.token_ids, short.sources) == (full.token_ids[:length], full.sources[:length])
            assert short.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
            inside += ended and full.sources[length - 1] != "target"
    assert inside > 0


@pytest.mark.parametrize("drafter", ["lookup", "suffix"])
def test_texts_are_never_offered_to_other_rows_or_requests(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    # Two models' worth of tokens in one: each half never leads to the other, so a token of the other half has leaked.
    table_VV = TabularModel.random(VOCABULARY, 1, seed=3).logits_XV.clone()
    half = VOCABULARY // 2
    table_VV[:half, half:] = table_VV[half:, :half] = -1e9
    seen: list[list[set[int]]] = []
    original = DeviceTrieBuilder.build

    def noting(builder: DeviceTrieBuilder, *inputs: Any) -> Any:
        tree = original(builder, *inputs)
        seen.append([set(row) - {-1} for row in tree.tokens_BN[:, 1:].tolist()])
        return tree

    monkeypatch.setattr(DeviceTrieBuilder, "build", noting)
    decoder = Decoder(TabularModel(table_VV), make_decoder(drafter=drafter).drafter)
    decoder.generate([[1, 2, 1, 2], [17, 18, 17, 18]], max_new_tokens=40, seed=1, keep=True)
    first = len(seen)
    decoder.generate([[17, 18, 17], [1, 2, 1, 2]], max_new_tokens=40, seed=1, keep=True)
    for number, rows in enumerate(seen):
        low, high = rows if number < first else rows[::-1]
        assert max(low, default=0) < half <= min(high, default=half)
    assert first > 10 and any(tokens for rows in seen for tokens in rows)


@pytest.mark.parametrize(("drafter", "sampling"), [
    *covering(["suffix+corpus", "suffix+corpus+head"], ["penalties", "mixed"]),
    *all_slow(["suffix+corpus", "suffix+corpus+head"], ["greedy", "drawn"]),
])  # fmt: skip
def test_drafting_takes_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch, drafter: str, sampling: str) -> None:
    stream = decoder_of(drafter).stream(PROMPTS, sampling=SAMPLINGS[sampling], max_new_tokens=40, seed=0)
    next(stream)  # tables are made once
    run = stream.engine
    session = run.session
    assert isinstance(session._certain.source, DeviceGramSource)
    can = session.capturable
    assert can.never is None and can.host_tree is None and not can.waits
    uniforms_BU = run.slots.noise.uniforms(run.workspace.num_uniforms(run.walk))
    originals = {"propose": session.propose, "commit": session.commit}

    def sealed(name: str) -> Callable[..., Any]:
        def work(*inputs: Any) -> Any:
            with Sealed():
                return originals[name](*inputs)

        return work

    with torch.inference_mode(), monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(session, name, sealed(name))
        run_round(run.workspace.state, run.walk, uniforms_BU, Stats())


def test_branches_and_context_caches_stay_on_the_host() -> None:
    for drafter in ("self-draft", "ngram", "ngram+corpus"):
        decoder = decoder_of(drafter)
        stream = decoder.stream(PROMPTS[0], max_new_tokens=4)
        assert stream.engine.session._certain.on_host
