"""Rows that share out the nodes of a round: the same distribution, and features that were left out are never read."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import covering, keeping
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter
from polydraft.draft.ladder import Ladder
from polydraft.draft.load_builder import LoadBuilder
from polydraft.draft.tree_choice import TreeChoice, sizes_of
from polydraft.engine import Decoder
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, parse_tree
from polydraft.verify import SCHEMES
from stand_in import StandIn

from .configurations import Configuration
from .setups import DRAFT, HEAD, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

TREE = parse_tree("4x2x1")
WIDE_SCHEMES = [name for name in SCHEMES if (SCHEMES.get(name).max_children or 4) >= 4]
SHARED = [place for place, size in enumerate(sizes_of(TREE, shared=True)) if size.mean is not None]
GREEDY = SamplingParams(temperature=0)
SAMPLINGS: dict[str, Any] = {
    "drawn": SamplingParams(),
    "greedy": GREEDY,
    "mixed": [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9)],
    "penalties": SamplingParams(repetition_penalty=1.3, temperature=0.8),
}
SEEDS = [5, 6, 7]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let rounds go round all numbers of nodes that are shared out; the target's features are NaN where they are not kept."""
    monkeypatch.setattr(TARGET, "leaves_out", True)
    context = type(TARGET.start(1, 8))
    extend = context.extend

    def leaving_out(self: Any, tokens_BT: Tensor, block: Block) -> Tensor:
        features_BTF = extend(self, tokens_BT, block)
        if block.kept_K is None or self.owner is not TARGET:
            return features_BTF
        left_out_X = torch.ones(tokens_BT.numel(), dtype=torch.bool).index_fill(0, block.kept_K, value=False)
        assert (tokens_BT.flatten()[left_out_X] < 0).all(), "they have no token either"
        return features_BTF.masked_fill(left_out_X.view(*tokens_BT.shape, 1), torch.nan)

    monkeypatch.setattr(context, "extend", leaving_out)
    monkeypatch.setattr(Ladder, "guess", lambda ladder, rows: SHARED[0])
    for name in ("steady", "alone"):
        monkeypatch.setattr(TreeChoice, name, property(lambda self: False, lambda self, value: None), raising=False)

    def take_turns(rounds: int) -> None:
        def settle(choice: TreeChoice, *_: Any) -> None:
            turns = vars(choice).setdefault("turns", itertools.count(1))
            choice.ladder.place = SHARED[next(turns) // rounds % len(SHARED)]

        monkeypatch.setattr(TreeChoice, "settle", settle)
        monkeypatch.setattr(Ladder, "fit", lambda ladder, *_: setattr(ladder, "place", SHARED[0]))

    take_turns(1)
    return take_turns


def sharing(scheme: str = "auto", **options: Any) -> Decoder:
    return Decoder(TARGET, TreeDrafter(DRAFT, TREE, scheme, by_load=True), **options)


# Each node of a chain has one child, with which schemes are much alike: three stand for the others.
@pytest.mark.parametrize("scheme", keeping(["auto", *WIDE_SCHEMES], "auto", "rrs-wr", "naive"))
def test_texts_follow_the_target_distribution(shared: object, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    configuration = Configuration(label=f"shared nodes: {scheme}", samples=2_000)
    monkeypatch.setattr(Configuration, "decoder", lambda self: sharing(scheme))
    results = configuration.generate()
    # Fifteen tests on each of some dozen decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * 12)
    assert 0 < results[0].stats.drafted_tokens < 2 * 2_000 * results[0].stats.rounds


def test_a_planted_error_is_caught(shared: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """To keep a node by how likely the draft found the token that it drew there is the mistake that this design invites."""
    tree = LoadBuilder.tree

    def peeking(self: LoadBuilder, tokens_BN: Tensor) -> Any:
        levels = enumerate(self._level_probs if self._chances else ())
        self._chances = [probs_B1V[:, 0].gather(1, tokens_BN[:, level + 1, None])[:, 0] for level, probs_B1V in levels]
        return tree(self, tokens_BN)

    monkeypatch.setattr(LoadBuilder, "tree", peeking)
    configuration = Configuration(label="shared nodes, peeking", samples=2_000)
    monkeypatch.setattr(Configuration, "decoder", lambda self: sharing())
    assert min(configuration.p_values(configuration.generate())) < 1e-9


@pytest.mark.parametrize("sampling", ["greedy", "mixed"])
def test_greedy_rows_have_the_greedy_text(shared: object, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    results = sharing().generate(RAGGED_PROMPTS, sampling=params, max_new_tokens=25, seed=SEEDS)
    for row, (prompt, result) in enumerate(zip(RAGGED_PROMPTS, results, strict=True)):
        if (params[row] if isinstance(params, list) else params) is GREEDY:
            assert result.token_ids == greedy_text(TARGET, prompt, 25, GREEDY)


@pytest.mark.parametrize(("sampling", "model"), covering(SAMPLINGS, ["model", "head"]))
def test_captured_rounds_give_the_same_texts(
    shared: Callable[[int], None], caches: list[StandIn], sampling: str, model: str
) -> None:
    shared(5)
    drafter = TreeDrafter({"model": DRAFT, "head": HEAD}[model], TREE, by_load=True)
    options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": 60, "seed": SEEDS}
    results, expected = (
        Decoder(TARGET, drafter, **how).generate(RAGGED_PROMPTS, **options) for how in ({"ahead": False}, {"graphs": False})
    )
    (graphs,) = caches
    # Once the first text has ended, captured rounds have more rows than others, which share out more nodes.
    assert [one.token_ids[:18] for one in results] == [one.token_ids[:18] for one in expected]
    assert {kind[-3][4] for kind in graphs.kinds} == {(place,) for place in SHARED}
    assert results[0].stats.replayed_rounds > results[0].stats.rounds / 2


def test_a_draft_equal_to_the_target_is_always_accepted(shared: object) -> None:
    decoder = Decoder(TARGET, TreeDrafter(TARGET, TREE, by_load=True))
    stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=60)[0].stats
    assert stats.accepts_by_depth == stats.offers_by_depth and stats.passes > stats.offers_by_depth[0] > 0


@pytest.mark.parametrize("row", range(3))
def test_texts_with_a_seed_have_their_own_nodes(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    monkeypatch.setattr(TARGET, "leaves_out", True)
    decoder = sharing()
    together = decoder.generate(RAGGED_PROMPTS, max_new_tokens=40, seed=SEEDS)
    company = decoder.generate([RAGGED_PROMPTS[row], RAGGED_PROMPTS[row - 1]], max_new_tokens=40, seed=[SEEDS[row], 99])
    assert company[0].token_ids == together[row].token_ids
