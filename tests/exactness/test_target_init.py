"""The paper's target-initialised rule is lossy, said to be, and seen to be."""

import pytest
import torch

from polydraft.certify.reference import greedy_text
from polydraft.draft import LOSSY_DRAFTERS, Parts
from polydraft.draft.stopping_builder import Decision
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.papers.target_init import LongestWalk, TargetInit
from polydraft.sampling import SamplingParams
from polydraft.trees import Topology, parse_tree

from .configurations import THRESHOLD, Configuration
from .setups import DRAFT, HEAD, PROMPT, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = SamplingParams(temperature=0)


class StopsNow(Decision):
    """Stop wherever the draft's likeliest token is an odd one, or everywhere."""

    def __init__(self, everywhere: bool = False) -> None:
        self.everywhere, self.asked = everywhere, 0

    def goes_on(self, features_BGF, logits_BGV):
        self.asked += 1
        odd_B = logits_BGV.argmax(-1).remainder(2).bool().all(-1)
        return ~(odd_B | self.everywhere)


def lossy(width: int, depth: int = 3, model=DRAFT, decision: Decision | None = None) -> Decoder:
    return Decoder(TARGET, TargetInit(model, Topology.fork(width, depth), decision), lossless=False)


def watched_rounds(decoder: Decoder, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch, prompt=PROMPT, tokens=30):
    """Return the text before each round, whether its tree begins with the target's tokens, and that tree."""
    rounds, text, run = [], list(prompt), LongestWalk.run

    def spying(self, scheme, draft, *rest):
        verdict = run(self, scheme, draft, *rest)
        rounds.append((list(text), self.given_B is not None and bool(self.given_B[0]), draft))
        text.extend(verdict.tokens_BD[0, : int(verdict.accepted_B[0]) + 1].tolist())
        return verdict

    monkeypatch.setattr(LongestWalk, "run", spying)
    decoder.generate(prompt, sampling=sampling, max_new_tokens=tokens, seed=2)
    return rounds


def p_value(decoder: Decoder, label: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(Configuration, "decoder", lambda self: decoder)
    configuration = Configuration(label=label, samples=1_500)
    return min(configuration.p_values(configuration.generate()))


def test_it_is_refused_without_the_word_for_it() -> None:
    drafter = LOSSY_DRAFTERS.get("target-init")(Parts(draft=DRAFT, topology=parse_tree("fork:2x2")))
    with pytest.raises(UsageError, match=r"target-init.*changes the distribution.*lossless=False"):
        Decoder(TARGET, drafter)
    assert not Decoder(TARGET, drafter, lossless=False).lossless


def test_it_changes_the_distribution_and_with_one_root_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second shows that the first is the rule's doing, not a bug's.
    assert p_value(lossy(4), "target-init 4", monkeypatch) < 1e-12
    assert p_value(lossy(1), "target-init 1", monkeypatch) > THRESHOLD


def test_the_fork_below_one_token_of_the_target_is_lossless_and_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from polydraft.draft import TreeDrafter

    assert parse_tree("target-root:3x3") == parse_tree("fork:3x3")
    decoder = Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("target-root:3x3")))
    assert p_value(decoder, "target-root", monkeypatch) > THRESHOLD


@pytest.mark.parametrize("model", [DRAFT, HEAD], ids=["model", "head"])
def test_greedy_texts_are_other_texts_with_several_roots_only(model) -> None:
    def differing(width: int) -> int:
        results = lossy(width, model=model).generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=20)
        wanted = [greedy_text(TARGET, prompt, 20, GREEDY) for prompt in RAGGED_PROMPTS]
        return sum(result.token_ids != text for result, text in zip(results, wanted, strict=True))

    assert differing(1) == 0
    # The untrained head is never accepted: all paths are equally short, and the first, greedy one is kept.
    assert (differing(3) > 0) == (model is DRAFT)


@pytest.mark.parametrize("bias", [{}, {7: -torch.inf, 3: 4.0}], ids=["plain", "biased"])
def test_at_temperature_0_trees_begin_with_the_targets_likeliest_tokens(bias, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 4
    rounds = watched_rounds(lossy(width), SamplingParams(temperature=0, logit_bias=bias), monkeypatch)
    begun = [(text, draft) for text, given, draft in rounds if given]
    assert len(begun) > 3
    for text, draft in begun:
        scores = TARGET.logits_after(text).clone()
        for token, value in bias.items():
            scores[token] += value
        assert draft.tokens_BN[0, 1 : 1 + width].tolist() == scores.topk(width).indices.tolist()


def test_tokens_that_are_ruled_out_begin_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {3, 11, 20}
    banned = {token: -torch.inf for token in range(TARGET.vocab_size) if token not in allowed}
    rounds = watched_rounds(lossy(5), SamplingParams(temperature=0, logit_bias=banned), monkeypatch)
    begun = [draft.tokens_BN[0, 1:6].tolist() for _, given, draft in rounds if given]
    assert begun and all({*tokens[:3]} == allowed and tokens[3:] == [-1, -1] for tokens in begun)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decision_model_stops_drafting_but_not_before_the_first_draft(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = lossy(3, decision=StopsNow(everywhere=True))
    rounds = watched_rounds(decoder, SamplingParams(temperature=temperature), monkeypatch)
    # First tokens of the draft's own are one level; behind those of the target the draft speaks once.
    assert {(given, int(draft.longest()[0])) for _, given, draft in rounds} == {(False, 1), (True, 2)}


def test_with_one_root_and_a_decision_model_the_distribution_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = StopsNow()
    assert p_value(lossy(1, decision=decision), "target-init 1 decided", monkeypatch) > THRESHOLD
    assert decision.asked > 0


def test_its_rounds_yield_the_accepted_path() -> None:
    stats = lossy(3, depth=3, model=TARGET).generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=40, seed=1)[0].stats
    # A draft equal to the target is always accepted: the target's own token and three drafts, but for the first round.
    assert stats.tokens_per_pass > 3.8


@pytest.mark.parametrize("tree", ["3x2x1", "none", "[[0],[1],[0,0]]"])
def test_it_grows_forks_only(tree: str) -> None:
    with pytest.raises(UsageError, match="forks only"):
        TargetInit(DRAFT, parse_tree(tree))
