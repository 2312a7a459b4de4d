"""Drafts with tokens of their own: texts of the target's distribution, and a draft that reads the right text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import keeping
from polydraft.certify.reference import greedy_text
from polydraft.draft.translated_source import TranslatedSource
from polydraft.engine import Decoder, Engine
from polydraft.engine.graphs import Launched
from polydraft.engine.workspace import Workspace
from polydraft.models import LanguageModel
from polydraft.models.translation import Translated, Translation
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES
from stand_in import StandIn, round_graphs

from .checks import TOLERANCE, drawings, enumeration_error, largest_count
from .configurations import SCHEMES_AND_WALKS, THRESHOLD, Configuration
from .setups import PROMPT, RAGGED_PROMPTS, TARGET, make_decoder, tree_for
from .translated import translated_draft, translated_network

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = SamplingParams(temperature=0)
VARIED = SamplingParams(temperature=10, logit_bias={1: 300.0, 2: 300.0, 3: 300.0})
"""Texts of three letters, about which any draft is often right; its tokenizer joins some of them with what was there."""
TREES = ["chain:3", "3x2x1"]
WRONG = ["one token too few", "nothing taken back", "other numbers in trees"]


@dataclass(frozen=True, kw_only=True)
class TranslatedConfiguration(Configuration):
    """One whose draft has another tokenizer."""

    samples: int = 800

    def decoder(self) -> Decoder:
        """Build it."""
        return make_decoder(scheme=self.scheme, walk=self.walk, tree=self.tree, drafter=self.drafter, draft=translated_draft())


CONFIGURATIONS = [
    *(
        TranslatedConfiguration(label=f"{scheme} {walk}", scheme=scheme, walk=walk, tree=tree_for(scheme))
        for scheme, walk in SCHEMES_AND_WALKS
    ),
    TranslatedConfiguration(label="dynamic", drafter="dynamic", scheme="auto"),
    TranslatedConfiguration(label="lookup+model", drafter="lookup+model", scheme="auto", samples=400),
    TranslatedConfiguration(
        label="race block, truncated", scheme="race", walk="block", sampling=SamplingParams(top_p=0.85, repetition_penalty=1.3)
    ),
]
SLOW = {one.label for one in CONFIGURATIONS} - {"lookup+model", "race block, truncated"}
"""How schemes verify what a draft does not know all tokens of is tested with heads; here each is enumerated, below."""


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(one, id=one.label, marks=pytest.mark.slow if one.label in SLOW else ()) for one in CONFIGURATIONS],
)
def test_texts_follow_the_target_distribution(configuration: TranslatedConfiguration) -> None:
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    assert results[0].stats.tokens_per_pass > 1.3


def restricted() -> tuple[Tensor, Tensor]:
    """Return the target's distributions after a few texts, and the draft's over what both have."""
    draft, texts = translated_draft(), [[*PROMPT, token] for token in range(24)]
    ids = [draft.translation.translate(text, Translated()).ids for text in texts]
    own_CV = torch.stack([draft.model.logits_after(list(one)) for one in ids])
    target_CV = torch.stack([TARGET.logits_after(text) for text in texts]).double().softmax(-1)
    return target_CV, draft.vocabulary.spread(draft.head(own_CV).softmax(-1))


@pytest.mark.parametrize("name", list(SCHEMES))
def test_enumerated_distributions_are_the_target_s(name: str) -> None:
    scheme = SCHEMES.get(name)()
    assert max(enumeration_error(scheme, *restricted(), largest_count(scheme, 2))) < TOLERANCE


@pytest.mark.parametrize("name", ["rrs-wor", "rrs-wr", "race", "kseq", "speculative"])
def test_a_token_that_two_of_the_draft_s_stand_for_would_be_caught(name: str) -> None:
    """It would be drawn by both, and verified as one of them."""
    scheme, (target_CV, draft_CV) = SCHEMES.get(name)(), restricted()
    verified_CV = draft_CV.clone()
    verified_CV[:, draft_CV.sum(0).argmax()] /= 2
    case_R, children_RK, chance_R = drawings(scheme, draft_CV, 1)
    emitted_RV = scheme.distribution(target_CV[case_R], verified_CV[case_R], children_RK)
    emitted_CV = torch.zeros_like(target_CV).index_add_(0, case_R, chance_R[:, None] * emitted_RV)
    assert (emitted_CV - target_CV).abs().max() > 1e-2
    shared = translated_draft().shared
    assert len(set(shared.values())) == len(shared) and list(shared) == sorted(shared)


@pytest.mark.parametrize("tree", TREES)
def test_greedy_texts_are_the_target_s(tree: str) -> None:
    results = make_decoder(draft=translated_draft(), tree=tree).generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=30)
    for prompt, result in zip(RAGGED_PROMPTS, results, strict=True):
        assert result.token_ids == greedy_text(TARGET, prompt, 30, GREEDY)
    assert results[0].stats.tokens_per_pass > 1.5


class Witness:
    """Compares what the draft says at each root with a fresh pass over the text, tokenized anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[float] = []
        texts: list[Sequence[int] | None] = []
        launch, root = Engine._launch, TranslatedSource.root

        def launching(engine: Engine) -> Launched:
            at_work = zip(engine.slots.texts(), engine.slots.active(), strict=True)
            texts[:] = [list(text) if active else None for text, active in at_work]
            return launch(engine)

        def compared(source: TranslatedSource, tail_B2: Tensor) -> Tensor:
            features_B1F = root(source, tail_B2)
            for text, logits_1V in zip(texts, source.logits(features_B1F), strict=True):
                if text is not None:
                    expected_V = translated_network().model.plain(torch.tensor([fresh(text)]))[0, -1]
                    known_D = list(translated_network().shared.values())
                    self.errors.append(float((logits_1V[0] - expected_V[known_D]).abs().max()))
            return features_B1F

        monkeypatch.setattr(Engine, "_launch", launching)
        monkeypatch.setattr(TranslatedSource, "root", compared)


_translate = Translation.translate


def fresh(text: Sequence[int]) -> list[int]:
    return list(_translate(translated_network().translation, text, Translated()).ids)


def network_decoder(**options: Any) -> Decoder:
    draft: LanguageModel = translated_network()
    return make_decoder(draft=draft, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tree", "drafter"), [("chain:6", "model"), ("3x2x1", "lookup+model")])
def test_the_draft_reads_the_text(monkeypatch: pytest.MonkeyPatch, tree: str, drafter: str) -> None:
    witness = Witness(monkeypatch)
    decoder = network_decoder(tree=tree, drafter=drafter)
    results = decoder.generate(RAGGED_PROMPTS, sampling=VARIED, max_new_tokens=40, seed=[3, 4, 5])
    assert len(witness.errors) > 15 and max(witness.errors) < 1e-4
    assert results[0].stats.tokens_per_pass > 1.2, "little was accepted, so little is proven"


@pytest.mark.parametrize("wrong", keeping(WRONG, "nothing taken back", "other numbers in trees"))
def test_reading_another_text_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Texts stay the target's, so that only acceptance and a look at the draft can tell."""
    witness = Witness(monkeypatch)
    if wrong == "one token too few":
        monkeypatch.setattr(Translation, "translate", lambda own, text, known: _translate(own, text[:-1], Translated()))
    if wrong == "nothing taken back":
        monkeypatch.setattr("polydraft.models.memory.common_prefix", lambda first, second: min(len(first), len(second)))
    if wrong == "other numbers in trees":
        monkeypatch.setattr(TranslatedSource, "expand", lambda own, *level: super(TranslatedSource, own).expand(*level))
    decoder = network_decoder(tree="chain:6")
    decoder.generate(RAGGED_PROMPTS, sampling=VARIED, max_new_tokens=20, seed=5)
    assert max(witness.errors) > 1e-2
    for prompt, result in zip(
        RAGGED_PROMPTS, decoder.generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=12), strict=True
    ):
        assert result.token_ids == greedy_text(TARGET, prompt, 12, GREEDY)


def test_a_text_goes_on_in_the_memory_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(monkeypatch)
    decoder, question = network_decoder(tree="3x2x1"), [9, 2, 2]
    first = decoder.stream(PROMPT, sampling=GREEDY, max_new_tokens=8, keep=True)
    text = [*PROMPT, *(token for event in first for token in [event.token_id])]
    second = decoder.stream([*text, *question], sampling=GREEDY, max_new_tokens=6, keep=True)
    assert [event.token_id for event in second] == greedy_text(TARGET, [*text, *question], 6, GREEDY)
    assert max(witness.errors) < 1e-4


@pytest.mark.parametrize("temperature", keeping([0.0, 1.0], 1.0))
def test_rounds_can_be_captured(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    options: Any = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 30, "seed": 3}
    expected = make_decoder(draft=translated_draft()).generate(RAGGED_PROMPTS, **options)
    graphs: list[StandIn] = []
    original = Workspace.__init__

    def with_stand_in(workspace: Workspace, *arguments: Any) -> None:
        original(workspace, *arguments)
        workspace.launcher.graphs = round_graphs(workspace, before=0)
        graphs.append(workspace.launcher.graphs)

    monkeypatch.setattr(Workspace, "__init__", with_stand_in)
    results = make_decoder(draft=translated_draft()).generate(RAGGED_PROMPTS, **options)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert results[0].stats.replayed_rounds == results[0].stats.rounds > 0
    assert results[0].stats.rounds_ahead == 0, "what the draft reads next is known on the host alone"
