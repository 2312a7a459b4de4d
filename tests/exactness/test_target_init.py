"""The paper's target-initialised rule is lossy, said to be, and seen to be."""

import pytest

from polydraft.certify.reference import greedy_text
from polydraft.drafters import LOSSY_DRAFTERS, Parts
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.papers.target_init import TargetInit
from polydraft.sampling import SamplingParams
from polydraft.trees import Topology, parse_tree

from .configurations import THRESHOLD, Configuration
from .setups import DRAFT, HEAD, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = SamplingParams(temperature=0)


def lossy(width: int, depth: int = 3, model=DRAFT) -> Decoder:
    return Decoder(TARGET, TargetInit(model, Topology.fork(width, depth)), lossless=False)


def p_value(decoder: Decoder, label: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(Configuration, "decoder", lambda self: decoder)
    configuration = Configuration(label=label, samples=1_500)
    return min(configuration.p_values(configuration.generate()))


def test_it_is_refused_without_the_word_for_it() -> None:
    drafter = LOSSY_DRAFTERS.get("target-init")(Parts(target=TARGET, draft=DRAFT, topology=parse_tree("fork:2x2")))
    with pytest.raises(UsageError, match=r"target-init.*changes the law.*lossless=False"):
        Decoder(TARGET, drafter)
    assert not Decoder(TARGET, drafter, lossless=False).lossless


def test_it_changes_the_law_and_with_one_root_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second shows that the first is the rule's doing, not a bug's.
    assert p_value(lossy(4), "target-init 4", monkeypatch) < 1e-12
    assert p_value(lossy(1), "target-init 1", monkeypatch) > THRESHOLD


def test_the_fork_below_one_token_of_the_target_is_lossless_and_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from polydraft.drafters import TreeDrafter

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


def test_its_rounds_yield_the_accepted_path() -> None:
    stats = lossy(3, depth=3, model=TARGET).generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=40, seed=1)[0].stats
    # A draft equal to the target is always accepted: the target's own token and three drafts, but for the first round.
    assert stats.tokens_per_pass > 3.8


@pytest.mark.parametrize("tree", ["3x2x1", "none", "[[0],[1],[0,0]]"])
def test_it_grows_forks_only(tree: str) -> None:
    with pytest.raises(UsageError, match="forks only"):
        TargetInit(DRAFT, parse_tree(tree))
