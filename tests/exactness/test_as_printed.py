"""Self-Draft as its paper prints it: its own branches, context cache, retrieval and verification."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from polydraft.certify.reference import greedy_text
from polydraft.draft import GramTreeOptions, Parts, RiderOptions, make_drafter
from polydraft.draft.gram_source import GramSource
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.loading import load
from polydraft.models import TabularModel
from polydraft.ngrams import ContextCache, GramOptions
from polydraft.options import NgramOptions
from polydraft.papers.flat_blocks import FlatBlocksBuilder
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import parse_tree

from .checks import FALSE_ALARM, chi_square_p_value
from .setups import TARGET, VOCABULARY

PRINTED = GramTreeOptions(riders=RiderOptions(branches=4, length=3), caches=GramOptions(corpus="none", gram=2)).as_printed()
PROMPT = [1, 2, 3, 1, 2, 3, 1]


def decoder(target: TabularModel = TARGET, options: GramTreeOptions = PRINTED) -> Decoder:
    parts = Parts(topology=parse_tree("none"), grams=options)
    return Decoder(target, make_drafter(parts, "self-draft"), lossless=False)


def test_the_context_cache_learns_from_branches_alone() -> None:
    memory = ContextCache(PRINTED.caches).open()
    memory.read(PROMPT)
    assert memory.matches(8, 4) == [], "neither prompt nor output"
    memory.learn([1, 8, 9])
    memory.learn([9, 5, 6])
    assert [list(match.tokens) for match in memory.matches(8, 4)] == [[8, 9]], "by one token, and no further than G"


def test_only_full_branches_teach() -> None:
    session = decoder().drafter.start(RowParams((SamplingParams(),)), TARGET)
    session.begin([[30, 21]], 50, [0], RowParams((SamplingParams(),)))
    source = session._certain.source
    assert isinstance(source, GramSource)
    source.receive([[*[21, 5, -1, 5, 6, -1] * 4, 2]])
    assert source.rows[0].memories[0].matches(4, 4) == []
    source.receive([[*[21, 5, 6, 7, 7, 8] * 4, 3]])
    assert [list(match.tokens) for match in source.rows[0].memories[0].matches(4, 4)] == [[5, 7]]


def test_it_is_the_papers_own_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is a chain of G tokens at most that a branch has taught."""
    tries, taught = [], set[tuple[int, ...]]()
    build, receive = FlatBlocksBuilder.build, GramSource.receive

    def building(builder: FlatBlocksBuilder, *arguments: torch.Tensor) -> object:
        tree = build(builder, *arguments)
        tries.extend(builder._tries)
        return tree

    def receiving(source: GramSource, reports: Sequence[Sequence[int]]) -> None:
        taught.update(tuple(gram) for report in reports for gram in source.riders.grams(report, 2))
        receive(source, reports)

    monkeypatch.setattr(FlatBlocksBuilder, "build", building)
    monkeypatch.setattr(GramSource, "receive", receiving)
    result = decoder().generate(PROMPT, max_new_tokens=60, seed=1)
    assert result.settings["walk"] == "flat-blocks"
    chains = 0
    for trie in tries:
        for node, depth in enumerate(trie.depths):
            if depth == 2:
                chain = (trie.tokens[0], trie.tokens[trie.parents[node]], trie.tokens[node])
                chains += chain in taught
                assert chain in taught
        assert max(trie.depths) <= 2
    assert chains > 5


def test_drafts_are_drawn_as_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft after a branch token follows the target's distribution after text and branch, at the row's temperature."""
    table_VV = TabularModel.random(6, 1, seed=4, sharpness=2.0)
    drawn = np.zeros((6, 6))
    receive = GramSource.receive

    def receiving(source: GramSource, reports: Sequence[Sequence[int]]) -> None:
        for report in reports:
            for start in range(0, len(report) - 1, 6):
                for place in range(report[-1]):
                    drawn[report[start + place], report[start + 3 + place]] += 1
        receive(source, reports)

    monkeypatch.setattr(GramSource, "receive", receiving)
    hot = SamplingParams(temperature=1.7)
    decoder(table_VV).generate([[1, 2]] * 40, max_new_tokens=12, seed=list(range(40)), sampling=hot)
    for last in range(6):
        distribution = (table_VV.logits_after([last]) / 1.7).softmax(-1).double().numpy()
        assert chi_square_p_value(drawn[last], distribution) > FALSE_ALARM / 6
    drawn[:] = 0
    decoder(table_VV).generate([1, 2], max_new_tokens=12, sampling=SamplingParams(temperature=0))
    for last in range(6):
        best = int(table_VV.logits_after([last]).argmax())
        assert drawn[last].sum() == drawn[last, best], "the best token at temperature 0"


def test_it_is_exact_at_temperature_zero_also_beside_others() -> None:
    greedy, prompts = SamplingParams(temperature=0), [PROMPT, [4, 5], [6, 6, 6]]
    results = decoder().generate(prompts, sampling=[greedy, SamplingParams(), greedy], max_new_tokens=30, seed=3)
    for index in (0, 2):
        assert results[index].token_ids == greedy_text(TARGET, prompts[index], 30, greedy)


def test_no_branches_teach_nothing() -> None:
    options = GramTreeOptions(riders=RiderOptions(branches=0), caches=GramOptions(corpus="none")).as_printed()
    result = decoder(options=options).generate(PROMPT, max_new_tokens=20, seed=1)
    assert result.stats.passes == 20 and VOCABULARY > 6


def test_what_the_paper_does_not_have_is_refused(tiny: str) -> None:
    for given in ({"ngram_prefix": 4}, {"ngram_depth": 12}, {"branch_seeds": "prompt"}):
        with pytest.raises(UsageError, match="does not work with --lossy self-draft, whose paper has"):
            NgramOptions(**given).grams_asked_for(lossy="self-draft")
    assert NgramOptions(ngram_prefix=1, ngram_depth=4).grams_asked_for(lossy="self-draft").caches.max_prefix == 1
    for drafter in ("auto", "lookup", "self-draft+lookup", "self-draft+model"):
        with pytest.raises(UsageError, match="--lossy self-draft does not work with drafter"):
            load(tiny, drafter=drafter, lossy="self-draft")
    printed = load(tiny, drafter="self-draft", lossy="self-draft").drafter
    assert not printed.lossless and printed.options.riders.drawn and printed.options.depth == 4
