"""A drawn tree and n-grams in one round: exact whatever the scheme, and neither loses what the other knows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from covering import some_slow
from polydraft.draft import Parts, make_drafter
from polydraft.draft.static_builder import StaticBuilder
from polydraft.draft.trie import as_draft_tree
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.sampling import SamplingParams
from polydraft.trees import DraftTree, parse_tree, union
from polydraft.verify import SCHEMES
from small_tries import trie_of

from .checks import FALSE_ALARM, chi_square_p_value
from .configurations import THRESHOLD, Configuration
from .setups import DRAFT, GRAM_PROMPT, HEAD, RAGGED_PROMPTS, TARGET, gram_options, make_decoder, tree_for

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[*prompt, *GRAM_PROMPT] for prompt in RAGGED_PROMPTS]


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_schemes_follow_the_target_where_they_drew_nothing(scheme: str) -> None:
    # So it is at nodes that only n-grams propose, beside rows in which something was drawn.
    generator = torch.Generator().manual_seed(2)
    target_V, draft_V = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.5, 0.1, 0.1, 0.2])
    verifier, rows = SCHEMES.get(scheme)(), 8000
    width = 1 if verifier.max_children == 1 else 2
    children_RK = torch.full((rows, width), -1)
    children_RK[::2] = torch.tensor([1, 0])[:width]
    target_RV, draft_RV = target_V.expand(rows, -1), draft_V.expand(rows, -1)
    uniforms_RU = torch.rand(rows, verifier.verify_uniforms, generator=generator, dtype=torch.float64)
    tokens_R = verifier.verify(target_RV, draft_RV, children_RK, uniforms_RU)[1::2]
    counts = torch.bincount(tokens_R, minlength=5)
    assert counts[4] == 0
    assert chi_square_p_value(counts[:4].numpy(), target_V[:4].double().numpy()) > FALSE_ALARM / len(list(SCHEMES))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_texts_follow_the_target_distribution_with_every_scheme(scheme: str) -> None:
    configuration = Configuration(
        label=f"lookup+model {scheme}",
        scheme=scheme,
        tree=tree_for(scheme),
        drafter="lookup+model",
        prompt=GRAM_PROMPT,
        samples=3_000,
    )
    results = configuration.generate()
    assert min(configuration.p_values(results)) > FALSE_ALARM / (13 * len(list(SCHEMES)))
    assert {"model", "lookup"} <= set(results[0].stats.tokens_by_source)


@pytest.mark.parametrize("drafter", some_slow(["lookup+model", "corpus+head"], ["corpus+head"]))
def test_both_are_heard(drafter: str) -> None:
    results = make_decoder(drafter=drafter, scheme="auto").generate([list(GRAM_PROMPT)] * 60, max_new_tokens=12, seed=3)
    alone = make_decoder(drafter=drafter.split("+")[1], scheme="auto").generate(
        [list(GRAM_PROMPT)] * 60, max_new_tokens=12, seed=3
    )
    stats = results[0].stats
    assert set(stats.tokens_by_source) == set(drafter.split("+"))
    assert sum(stats.tokens_by_source.values()) == stats.drafted_tokens
    assert stats.tokens_per_pass > alone[0].stats.tokens_per_pass


def test_a_draft_equal_to_the_target_stays_so_after_tokens_it_did_not_propose() -> None:
    # Its memory must take in what n-grams added: errors there cost acceptance and nothing else.
    decoder = make_decoder(drafter="lookup+model", tree="chain:2", scheme="auto", draft=TARGET)
    stats = decoder.generate(PROMPTS, sampling=GREEDY, max_new_tokens=60)[0].stats
    assert stats.tokens_by_source["lookup"] > 10
    assert stats.accepts_by_depth[:2] == stats.offers_by_depth[:2]


def test_a_head_proposes_the_same_after_tokens_it_did_not_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[tuple[int, int], list[int]]] = {"head": {}, "lookup+head": {}}
    original, current = StaticBuilder.build, ""

    def noting(builder: StaticBuilder, *arguments: Any) -> DraftTree:
        tree = original(builder, *arguments)
        for row, text in enumerate(builder.source._texts):
            seen[current].setdefault((row, len(text)), tree.tokens_BN[row].tolist())
        return tree

    monkeypatch.setattr(StaticBuilder, "build", noting)
    taken = 0
    for current in seen:
        results = make_decoder(drafter=current, scheme="auto").generate(PROMPTS, sampling=GREEDY, max_new_tokens=60)
        taken = results[0].stats.tokens_by_source["lookup"]
    shared = seen["head"].keys() & seen["lookup+head"].keys()
    assert taken > 10 and len(shared) > 10
    assert all(seen["head"][place] == seen["lookup+head"][place] for place in shared)


def trie_tree(*paths: list[int]) -> DraftTree:
    trie = trie_of(9, paths)
    return as_draft_tree([trie], len(trie), 4, torch.device("cpu"))


def test_nodes_of_both_trees_on_one_path_share_what_follows() -> None:
    # The drawn tree: 9 -> 1, 2; 1 -> 3.
    drawn = trie_tree([1, 3], [2])
    united = union(drawn, trie_tree([1, 3, 4], [1, 5], [6, 7]))

    def walk(*tokens: int) -> set[int]:
        node_B = torch.zeros(1, dtype=torch.long)
        for token in tokens:
            nodes_BK, tokens_BK = united.followers(node_B)
            node_B = nodes_BK[:, int((tokens_BK[0] == token).nonzero()[0])]
        return {token for token in united.followers(node_B)[1][0].tolist() if token >= 0}

    assert walk() == {1, 2, 6}
    assert walk(1) == {3, 5} and walk(1, 3) == {4} and walk(1, 3, 4) == set() and walk(1, 5) == set()
    assert walk(2) == set() and walk(6) == {7} and walk(6, 7) == set()
    # Only drawn children are the scheme's business.
    assert {int(token) for token in united.children(torch.zeros(1, dtype=torch.long))[1][0] if token >= 0} == {1, 2}
    depths = united.ancestors_BNN.sum(-1) - 1
    assert torch.equal(depths, united.depths_BN)


def test_walks_over_whole_paths_are_refused() -> None:
    for drafter in ("lookup", "lookup+model"):
        with pytest.raises(UsageError, match=r"walk 'block' cannot verify n-grams.*allowed: auto, node"):
            make_decoder(drafter=drafter, walk="block", scheme="auto").generate([1, 2], max_new_tokens=2)
    parts = Parts(draft=DRAFT, topology=parse_tree("2x1"), grams=gram_options())
    result = Decoder(TARGET, make_drafter(parts, "lookup+model")).generate([1, 2], max_new_tokens=2, seed=1)
    assert result.settings["walk"] == "node"


@pytest.mark.parametrize(("name", "message"), [
    ("lookup+model+head", "has 2 that draw from a draft"),
    ("lookup+none", "'none' cannot be combined"),
    ("lookpu", "did you mean 'lookup'"),
    ("lookup+", "unknown drafter ''"),
])  # fmt: skip
def test_wrong_combinations_are_refused(name: str, message: str) -> None:
    parts = Parts(draft=HEAD, topology=parse_tree("2x1"), grams=gram_options())
    with pytest.raises(UsageError) as caught:
        make_drafter(parts, name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_further_children_are_not_the_schemes_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified as if the draft had drawn them, n-grams change the distribution of the text, and the tests notice."""
    original = DraftTree.children

    def all_drawn(draft: DraftTree, node_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nodes_BK, tokens_BK = original(draft, node_B)
        if draft.extra_table_BNK is None:
            return nodes_BK, tokens_BK
        further = original(replace(draft, child_table_BNK=draft.extra_table_BNK), node_B)
        return torch.cat([further[0], nodes_BK], dim=1), torch.cat([further[1], tokens_BK], dim=1)

    monkeypatch.setattr(DraftTree, "children", all_drawn)
    configuration = Configuration(label="mutant", scheme="rrs-wor", drafter="lookup+model", prompt=GRAM_PROMPT, samples=800)
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD
