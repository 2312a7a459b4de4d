"""Where texts may end: not before `min_tokens`, not at ignored ends, and at tokens of the request's own."""

import numpy as np
import pytest
import torch

from covering import some_slow
from families import FAMILIES
from polydraft.beam import BeamDecoder
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason
from polydraft.engine.workspace import Workspace
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.sampling.grammar import Grammar
from polydraft.sampling.history import History
from polydraft.trees import parse_tree
from stand_in import round_graphs

from .checks import FALSE_ALARM
from .setups import DRAFT, RAGGED_PROMPTS, TARGET, make_decoder
from .small_texts import NEW_TOKENS, PROMPT, Words, distribution_p_value, small_decoder, text_distribution

END, OWN = 1, 2
KINDS = {
    "plain": SamplingParams(min_tokens=2),
    "penalised": SamplingParams(min_tokens=3, temperature=0.8, repetition_penalty=1.6, frequency_penalty=0.4),
    "truncated": SamplingParams(min_tokens=2, top_k=2, temperature=1.4),
    "own end": SamplingParams(min_tokens=3, stop_token_ids=(OWN,), ignore_eos=True),
    "two ends": SamplingParams(min_tokens=2, stop_token_ids=(OWN,)),
    "at once": SamplingParams(stop_token_ids=(OWN,)),
}
DRAFTERS = ["none", "model", "dynamic", "corpus", "lookup+model"]
CASES = [*((drafter, "plain") for drafter in DRAFTERS), *(("model", kind) for kind in list(KINDS)[1:])]


def distribution(kind: str, min_tokens: int | None = None):
    params = KINDS[kind]
    ends = params.ends([END])
    fewest = params.min_tokens if min_tokens is None else min_tokens
    fewer = SamplingParams(
        **{name: getattr(params, name) for name in ("temperature", "top_k", "repetition_penalty", "frequency_penalty")},
        min_tokens=fewest,
        stop_token_ids=tuple(ends),
    )
    return text_distribution(fewer, lambda tokens: tokens[-1] in ends)


def generated(drafter: str, kind: str, samples: int = 600):
    decoder = small_decoder(drafter, eos_token_ids=[END])
    return decoder.generate([PROMPT] * samples, sampling=KINDS[kind], max_new_tokens=NEW_TOKENS, seed=3)


@pytest.mark.parametrize(("drafter", "kind"), some_slow(CASES, [("corpus", "plain"), ("model", "truncated")]))
def test_texts_follow_the_targets_distribution_without_early_ends(drafter: str, kind: str) -> None:
    results = generated(drafter, kind)
    assert distribution_p_value(results, distribution(kind)) > FALSE_ALARM / len(CASES)
    ended = [result for result in results if result.stop_reason == StopReason.EOS]
    lengths = {len(result.token_ids) for result in ended}
    assert min(lengths) == KINDS[kind].min_tokens + 1 if KINDS[kind].min_tokens else 1
    # An end after drafted tokens of its own round: the mask was lifted, or held, inside of a tree.
    assert drafter == "none" or any(source != "target" for result in ended for source in result.sources)


@pytest.mark.parametrize("off", [-1, 1])
def test_an_end_allowed_a_token_too_early_or_too_late_shows(off: int) -> None:
    results = generated("model", "plain")
    assert distribution_p_value(results, distribution("plain", KINDS["plain"].min_tokens + off)) < 1e-12


def test_a_mask_that_forgets_the_path_inside_the_tree_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node masked as the root is: an error that plain decoding never meets."""
    penalised = History.penalised
    monkeypatch.setattr(History, "penalised", lambda self, scores, paths: penalised(self, scores, paths[..., :0]))
    assert distribution_p_value(generated("none", "plain"), distribution("plain")) > FALSE_ALARM
    assert distribution_p_value(generated("model", "plain"), distribution("plain")) < 1e-12


@pytest.fixture(scope="module")
def pair() -> tuple[HFModel, HFModel]:
    """A tiny Llama, and one with noise in its weights."""
    target, draft = FAMILIES.get("llama").build(), FAMILIES.get("llama").build()
    draft.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return HFModel(target), HFModel(draft)


def theirs(target: HFModel, prompt: list[int], ends: list[int], **options) -> list[list[int]]:
    ids = torch.tensor([prompt])
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": ends or None, "pad_token_id": 0}
    return target.hf_model.generate(ids, **options)[:, len(prompt) :].tolist()


PROMPTS = [[5, 17, 40, 8], [33, 12, 70], [44, 45, 46, 47, 48], [9]]


def test_greedy_texts_are_hugging_faces_with_min_new_tokens(pair: tuple[HFModel, HFModel]) -> None:
    target, draft = pair
    free = [theirs(target, prompt, [], max_new_tokens=20)[0] for prompt in PROMPTS]
    ends = sorted({text[place] for text in free for place in (0, 2, 5)})
    fewest = [0, 1, 6, 11]
    expected = [
        theirs(target, prompt, ends, max_new_tokens=20, **({"min_new_tokens": few} if few else {}))[0]
        for prompt, few in zip(PROMPTS, fewest, strict=True)
    ]
    assert len({len(text) for text in expected}) > 1, "they must end in different places"
    sampling = [SamplingParams(temperature=0, min_tokens=few) for few in fewest]
    decoder = Decoder(target, TreeDrafter(draft, parse_tree("3x2x1")), eos_token_ids=ends)
    results = decoder.generate(PROMPTS, sampling=sampling, max_new_tokens=20)
    assert [result.token_ids for result in results] == expected
    assert results[0].stats.tokens_per_pass > 1.2
    for prompt, own, text in zip(PROMPTS, sampling, expected, strict=True):
        assert decoder.generate(prompt, sampling=own, max_new_tokens=20).token_ids == text


def test_beams_are_hugging_faces_with_min_new_tokens(pair: tuple[HFModel, HFModel]) -> None:
    target, draft = pair
    ends = sorted(set(theirs(target, PROMPTS[0], [], max_new_tokens=8, num_beams=4)[0][:3]))
    expected = theirs(target, PROMPTS[0], ends, max_new_tokens=8, num_beams=4, min_new_tokens=5)[0]
    beams = BeamDecoder(Decoder(target, TreeDrafter(draft, parse_tree("1")), eos_token_ids=ends))
    found = beams.search(PROMPTS[0], beams=4, sampling=SamplingParams(min_tokens=5), max_new_tokens=8).texts[0]
    assert found.token_ids == expected and len(expected) > 5


def test_captured_rounds_count_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounds are replayed, the numbers that they read must be in tensors."""
    sampling = [SamplingParams(min_tokens=few, stop_token_ids=tuple(range(0, 32, 2))) for few in (2, 5, 17)]
    options = {"sampling": sampling, "max_new_tokens": 24, "seed": 3}
    drafter = TreeDrafter(DRAFT, parse_tree("3x2x1"))
    expected = Decoder(TARGET, drafter).generate(RAGGED_PROMPTS, **options)
    original = Workspace.__init__

    def with_stand_in(workspace: Workspace, *arguments: object) -> None:
        original(workspace, *arguments)
        workspace.launcher.graphs = round_graphs(workspace, before=0)

    monkeypatch.setattr(Workspace, "__init__", with_stand_in)
    decoder = Decoder(TARGET, drafter)
    for _ in range(2):
        results = decoder.generate(RAGGED_PROMPTS, **options)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        assert results[0].stats.replayed_rounds > 0
    assert [len(result.token_ids) > own.min_tokens for result, own in zip(results, sampling, strict=True)] == [True] * 3


def test_texts_go_on_after_ends_that_are_ignored_and_end_before_their_own() -> None:
    words = Words("a", "b", "c")
    decoder = small_decoder("model", words, eos_token_ids=[END])
    options = {"max_new_tokens": 12, "seed": 4}
    whole = decoder.generate([PROMPT] * 20, sampling=SamplingParams(ignore_eos=True), **options)
    assert {result.stop_reason for result in whole} == {StopReason.LENGTH} and any(END in one.token_ids for one in whole)
    cut = decoder.generate([PROMPT] * 20, sampling=SamplingParams(ignore_eos=True, stop_token_ids=[OWN]), **options)
    for full, short in zip(whole, cut, strict=True):
        ended = OWN in full.token_ids
        assert short.token_ids == full.token_ids[: full.token_ids.index(OWN) + 1 if ended else 12]
        assert short.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
        assert short.text == words.decode(short.token_ids[: -1 if ended else None])


def test_beams_end_before_tokens_that_are_asked_for() -> None:
    words, sampling = Words("a", "b", "c"), SamplingParams(ignore_eos=True, stop_token_ids=[OWN])
    beams, ended = BeamDecoder(small_decoder("model", words, eos_token_ids=[END])), 0
    for stop in ((), "x"):
        stream = beams.stream(PROMPT, beams=3, mode="search", sampling=sampling, max_new_tokens=5, stop=stop)
        pieces = [event.text for event in stream]
        found = stream.result().texts
        assert "".join(pieces) == found[0].text
        for text in found:
            is_over = text.stop_reason == StopReason.EOS
            assert OWN not in text.token_ids[:-1] and is_over == (text.token_ids[-1] == OWN)
            assert text.text == words.decode(text.token_ids[: -1 if is_over else None])
            ended += is_over
    assert ended > 1


@pytest.mark.parametrize(("options", "message"), [
    ({"min_tokens": -1}, "min_tokens=-1 is out of range; allowed: whole numbers from 0"),
    ({"min_tokens": 1.5}, "min_tokens=1.5 is out of range"),
    ({"min_tokens": True}, "min_tokens=True is out of range"),
    ({"ignore_eos": 1}, "ignore_eos=1; allowed: True, False"),
    ({"stop_token_ids": 5}, "stop_token_ids=5; allowed: token ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids=['5']; allowed: token ids"),
    ({"min_tokens": 2, "grammar": Grammar.regex("a")}, "min_tokens=2 cannot be combined with a grammar"),
    ({"ignore_eos": True, "grammar": Grammar.regex("a")}, "ignore_eos=True cannot be combined with a grammar"),
])  # fmt: skip
def test_wrong_values_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**options)
    assert message in str(caught.value)


def test_ends_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="stop_token_ids has token 99; allowed: 0 to 31"):
        make_decoder().generate([1], sampling=SamplingParams(stop_token_ids=(np.int64(99),)))
