"""Predicted outputs: followed and found again, dropped where they are wrong, and never in the way of the distribution."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from polydraft.beam import BeamDecoder
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter
from polydraft.draft.drafter import Drafter
from polydraft.draft.model_source import ModelSource
from polydraft.draft.predicted import with_prediction
from polydraft.draft.session import DraftSession
from polydraft.draft.speedup import Costs
from polydraft.engine import Decoder
from polydraft.engine.workspace import Workspace
from polydraft.errors import UsageError
from polydraft.ngrams.prediction import PredictionCache
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape
from polydraft.verify import Naive
from stand_in import round_graphs

from .configurations import THRESHOLD, Configuration
from .setups import CHEAP, DRAFT, GRAM_PROMPT, RAGGED_PROMPTS, TARGET, make_decoder

GREEDY = SamplingParams(temperature=0)
TEXT = random.Random(4).choices(range(1000), k=300)
EDITS: dict[str, tuple[list[int], int]] = {
    "none": (TEXT, 0),
    "first token": ([2000, *TEXT[1:]], 1),
    "a word": ([*TEXT[:80], 2000, *TEXT[81:]], 1),
    "some words": ([*TEXT[:80], *range(2000, 2004), *TEXT[84:]], 6),
    "a word more": ([*TEXT[:80], 2000, *TEXT[80:]], 3),
    "a line more": ([*TEXT[:80], *range(2000, 2012), *TEXT[80:]], 3),
    "a word less": ([*TEXT[:80], *TEXT[81:]], 2),
    "a line less": ([*TEXT[:80], *TEXT[92:]], 14),
    "two parts swapped": ([*TEXT[:80], *TEXT[200:], *TEXT[80:200]], 8),
}
"""Predictions, and how many tokens of the text may be missed for the edit."""


def proposed(text: Sequence[int], prediction: Sequence[int]) -> tuple[list[bool], list[float]]:
    """Return whether each token was proposed before it came, and the chance of what was proposed."""
    memory = PredictionCache().open()
    memory.read([1, 2, 3])
    memory.expect(SamplingParams(prediction=list(prediction)))
    right, chances = [], []
    for token in text:
        ways = memory.ways(memory.end(), 8)
        right.append([way for way, _ in ways] == [token])
        chances.append(sum(chance for _, chance in ways))
        memory.read([token])
    return right, chances


@pytest.mark.parametrize("edit", EDITS)
def test_a_prediction_is_found_again_after_an_edit(edit: str) -> None:
    prediction, missed = EDITS[edit]
    right, chances = proposed(TEXT, prediction)
    assert len(TEXT) - sum(right) <= missed
    assert chances[-1] > 0.97


def test_of_equal_places_the_next_one_counts() -> None:
    # A file of lines that begin alike: the place that was lost says which one it is.
    lines = [[7, 8, 9, 100 + number, 200 + number] for number in range(30)]
    text = [token for line in lines for token in line]
    prediction = [token if token != 110 else 999 for token in text]
    right, _ = proposed(text, prediction)
    assert len(text) - sum(right) <= 1


def test_of_a_wrong_prediction_less_and_less_is_proposed() -> None:
    chance = random.Random(1)
    text, other = ([chance.randrange(40) for _ in range(600)] for _ in range(2))
    right, chances = proposed(text, other)
    assert sum(chances) < sum(right) + 25
    assert sum(chances[300:]) < sum(right[300:]) + 6  # what is left is right by chance, one in forty times


def test_a_memory_walks_its_path_and_no_other() -> None:
    memory = PredictionCache().open()
    memory.expect(SamplingParams(prediction=[5, 6, 7, 8]))
    place = memory.step(memory.step(memory.end(), 5), 6)
    assert [token for token, _ in memory.ways(place, 8)] == [7]
    assert not memory.ways(memory.step(place, 9), 8)
    memory.read([5, 6, 7, 8])
    assert not memory.ways(memory.end(), 8)


@pytest.mark.parametrize("drafter", ["none", "suffix", "model", "dynamic-head", "suffix+model"])
def test_greedy_texts_of_a_batch_follow_their_own_predictions(drafter: str) -> None:
    plain = make_decoder(drafter="none")
    whole = plain.generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=60)
    expected = [greedy_text(TARGET, prompt, 60, GREEDY) for prompt in RAGGED_PROMPTS]
    decoder = make_decoder(drafter=drafter, scheme="auto", walk="block" if drafter == "model" else "auto")
    decoder = decoder.replace(drafter=with_prediction(decoder.drafter, CHEAP), walk="auto")
    sampling = [SamplingParams(temperature=0, prediction=one) for one in (whole[0].token_ids, None, whole[2].token_ids[::-1])]
    found = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=60)
    assert [one.token_ids for one in found] == expected
    assert found[0].sources.count("prediction") > 20 > found[1].sources.count("prediction") == 0
    stream = decoder.stream(RAGGED_PROMPTS[0], sampling=sampling[0], max_new_tokens=60)
    assert [event.token_id for event in stream] == expected[0] and stream.stats.rounds < 6


def test_a_draft_is_spared_while_a_prediction_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = 0
    original = ModelSource.root

    def counted(source: ModelSource, *arguments: Any) -> Any:
        nonlocal levels
        levels += 1
        return original(source, *arguments)

    monkeypatch.setattr(ModelSource, "root", counted)
    costs = Costs(draft_level=0.3, tree_pass=lambda nodes: 1 + 0.05 * nodes)
    drafter = TreeDrafter(DRAFT, DynamicShape(nodes=16, depth=4), costs=costs)
    prompt = list(GRAM_PROMPT)
    expected = greedy_text(TARGET, prompt, 100, GREEDY)
    decoder = Decoder(TARGET, drafter)
    for prediction, least, most in ((expected, 0, 1), (None, 4, 100), ([*expected[:50], *range(30)], 2, 30)):
        levels = 0
        sampling = SamplingParams(temperature=0, prediction=prediction)
        result = decoder.generate(prompt, sampling=sampling, max_new_tokens=100)
        assert result.token_ids == expected and least <= levels <= most


def first_child_taken(
    original: Callable, scheme: Naive, target_RV: torch.Tensor, draft_RV: torch.Tensor, children_RK: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Take a prediction's word for it."""
    drawn_R = original(scheme, target_RV, draft_RV, children_RK, *rest)
    return torch.where(children_RK[:, 0] >= 0, children_RK[:, 0], drawn_R)


def drawn_again(
    original: Callable, scheme: Naive, target_RV: torch.Tensor, draft_RV: torch.Tensor, children_RK: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Draw once more where the first draw misses the prediction."""
    drawn_R = original(scheme, target_RV, draft_RV, children_RK, *rest)
    again_R = original(scheme, target_RV, draft_RV, children_RK, 1 - rest[0])
    return torch.where((children_RK == drawn_R[:, None]).any(-1), drawn_R, again_R)


@pytest.mark.usefixtures("as_if_alone")
@pytest.mark.parametrize("wrong", [first_child_taken, drawn_again], ids=lambda one: one.__name__)
def test_a_rule_that_believes_predictions_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: Callable) -> None:
    original = Naive.verify
    configuration = Configuration(label="prediction", drafter="prediction", prompt=GRAM_PROMPT, samples=800)
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    assert results[0].stats.tokens_by_source["prediction"] > 200
    monkeypatch.setattr(Naive, "verify", lambda *arguments: wrong(original, *arguments))
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD


@pytest.mark.parametrize("drafter", ["prediction", "prediction+model"])
def test_texts_follow_the_target_while_predictions_sleep_and_wake(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    monkeypatch.setattr("polydraft.draft.grams.is_host", lambda device: False)  # no policy, as on a GPU
    awake, propose = Counter[bool](), DraftSession.propose

    def counted(session: Any, *arguments: Any) -> Any:
        awake.update(row.awake for row in session._certain.source.rows)  # by row: others may be awake in the same round
        return propose(session, *arguments)

    monkeypatch.setattr(DraftSession, "propose", counted)
    configuration = Configuration(label=drafter, drafter=drafter, tree="2x1", prompt=GRAM_PROMPT, samples=800)
    assert min(configuration.p_values(configuration.generate())) > THRESHOLD
    assert awake[True] and awake[False]


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_captured_rounds_serve_any_prediction(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    workspaces: list[Workspace] = []
    original = Workspace.__init__

    def with_stand_in(workspace: Workspace, *arguments: object) -> None:
        original(workspace, *arguments)
        workspace.launcher.graphs = round_graphs(workspace, before=0)
        workspaces.append(workspace)

    monkeypatch.setattr(Workspace, "__init__", with_stand_in)
    decoder = Decoder(TARGET, with_prediction(make_decoder(drafter=drafter, scheme="auto").drafter, CHEAP))
    expected = [greedy_text(TARGET, prompt, 40, GREEDY) for prompt in RAGGED_PROMPTS]
    for predictions in (expected, expected[::-1]):
        sampling = [SamplingParams(temperature=0, prediction=one) for one in predictions]
        found = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=40)
        assert [one.token_ids for one in found] == expected
        assert found[0].stats.replayed_rounds == found[0].stats.rounds
        assert "prediction" in found[1].sources
    assert len(workspaces) == 1, "the second request must find the first one's captures"


class Unknown(Drafter):
    name = "mine"

    def start(self, *arguments: Any) -> Any:
        raise AssertionError


def test_what_cannot_be_predicted_is_refused() -> None:
    decoder = make_decoder()
    for prediction in (5, [1, "a"], [-1], [[1]]):
        with pytest.raises(UsageError, match="allowed: text, or token ids"):
            SamplingParams(prediction=prediction)
    with pytest.raises(UsageError, match="needs a tokenizer"):
        decoder.generate([1, 2], sampling=SamplingParams(prediction="text"))
    with pytest.raises(UsageError, match=r"prediction holds token 999; allowed: 0 to \d+"):
        decoder.generate([1, 2], sampling=SamplingParams(prediction=[1, 999]))
    with pytest.raises(UsageError, match="not for beams"):
        BeamDecoder(decoder).search([1, 2], sampling=SamplingParams(temperature=0, prediction=[1]), beams=2)
    with pytest.raises(UsageError, match="drafter 'mine' cannot follow a prediction"):
        decoder.replace(drafter=Unknown()).generate([1, 2], sampling=SamplingParams(prediction=[1]))


def test_a_prediction_is_no_part_of_what_parameters_are() -> None:
    one, other = SamplingParams(prediction=[1, 2]), SamplingParams(prediction="text")
    assert one == other == SamplingParams() and hash(one) == hash(other)
    predicting = with_prediction(make_decoder().drafter, CHEAP)
    assert with_prediction(predicting) is predicting
