"""The tests bite: machinery broken in one place is caught, by the checkers that the real tests use.

Which layer catches what: the distribution of texts (chi-square) all that changes texts; greedy identity all of it that does not
need sampling or penalties; full acceptance of a draft equal to the target what costs nothing but speed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polydraft.certify.reference import greedy_text
from polydraft.draft.model_source import ModelSource
from polydraft.engine.graphs import Launcher
from polydraft.engine.round import State
from polydraft.models import Context
from polydraft.sampling import Noise, SamplingParams, Warper
from polydraft.trees import DraftTree
from polydraft.verify import NodeWalk, Scheme, Verdict

from .checks import unequal_texts
from .configurations import THRESHOLD, Configuration
from .setups import PENALTIES, RAGGED_PROMPTS, TARGET, make_decoder

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = SamplingParams(temperature=0)


# Below: the machinery, broken by replacing one method. Each takes the original and its arguments.


def commit_keeps_the_first_nodes(
    original: Callable, context: Context, places_BD: Tensor, counts_B: Tensor, **how: bool
) -> None:
    original(context, torch.arange(places_BD.shape[1]).expand_as(places_BD), counts_B, **how)


def positions_off_by_one_after_commit(
    original: Callable, context: Context, places_BD: Tensor, counts_B: Tensor, **how: bool
) -> None:
    original(context, places_BD, counts_B, **how)
    context.positions_BS += (context.positions_BS == context.lengths_B[:, None] - 1).long()


def one_token_too_few_committed(original: Callable, context: Context, places_BD: Tensor, counts_B: Tensor, **how: bool) -> None:
    original(context, places_BD, (counts_B - 1).clamp(min=1), **how)


def every_tree_taken_for_a_chain(original: property, tree: DraftTree) -> bool:
    raise AssertionError("never called: in place of a property, the method itself is true")


def bonus_token_from_the_root(
    original: Callable, walk: NodeWalk, scheme: Scheme, draft: DraftTree, target_distribution: Callable, uniforms_BU: Tensor
) -> Verdict:
    def wrong_distribution(node_B: Tensor, path_BP: Tensor) -> Tensor:
        return target_distribution(torch.zeros_like(node_B) if path_BP.shape[1] == draft.depth else node_B, path_BP)

    return original(walk, scheme, draft, wrong_distribution, uniforms_BU)


def first_child_always_taken(original: Callable, draft: DraftTree, node_B: Tensor) -> tuple[Tensor, Tensor]:
    nodes_BK, tokens_BK = original(draft, node_B)
    return nodes_BK[:, :1].expand_as(nodes_BK), tokens_BK


def siblings_seen(original: Callable, draft: DraftTree) -> Any:
    block = original(draft)
    nodes = block.visible_BTU.shape[1]
    return type(block)(0, block.depths_BT, torch.ones(nodes, nodes, dtype=torch.bool).tril().expand_as(block.visible_BTU))


def distribution_of_the_first_node_of_the_level(original: Callable, draft: DraftTree, level: int, node_B: Tensor) -> Tensor:
    return draft.distributions[level][:, 0]


def verification_shares_the_drafts_numbers(original: Callable, noise: Noise, count: int) -> Tensor:
    uniforms_BU = original(noise, count)
    uniforms_BU[:, -4:] = uniforms_BU[:, :4]  # the walk takes the last four, one a level and one for the bonus
    return uniforms_BU


def ancestors_forgotten(original: Callable, warper: Warper, logits_BGV: Tensor, paths_BGP: Tensor) -> Tensor:
    return original(warper, logits_BGV, paths_BGP[..., :0])


def output_forgotten(original: Callable, warper: Warper, emitted: Any) -> None:
    return None


def pending_token_of_the_round_before(
    original: Callable, launcher: Launcher, state: State, *arguments: Any, **named: Any
) -> Any:
    pending_B = state.tail_B2[:, 1].clone()
    result = original(launcher, state, *arguments, **named)
    state.tail_B2[:, 0] = pending_B
    return result


def draft_memory_not_moved(
    original: Callable, source: ModelSource, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor
) -> None:
    straight_BD = 1 + torch.arange(places_BD.shape[1]).expand_as(places_BD)
    original(source, verdict, straight_BD, keep_B, features_BNF)


def spelled(value: Any) -> str:
    return getattr(value, "__name__", "") if value is not None else "plain"


def break_method(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable) -> None:
    original = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *arguments, **named: wrong(original, *arguments, **named))


CHANGES_GREEDY_TEXTS = [
    (Context, "commit", commit_keeps_the_first_nodes),
    (Context, "commit", positions_off_by_one_after_commit),
    (DraftTree, "chain", every_tree_taken_for_a_chain),
    (NodeWalk, "run", bonus_token_from_the_root),
    (DraftTree, "children", first_child_always_taken),
    (DraftTree, "block", siblings_seen),
]
CHANGES_TEXTS = [
    # Identity, below, shows the same of these by default.
    *(pytest.param(*broken, None, marks=pytest.mark.slow) for broken in CHANGES_GREEDY_TEXTS),
    (DraftTree, "draft_distribution", distribution_of_the_first_node_of_the_level, None),
    (Noise, "uniforms", verification_shares_the_drafts_numbers, None),
    (Warper, "probs", ancestors_forgotten, PENALTIES),
    (Warper, "advance", output_forgotten, PENALTIES),
]


@pytest.mark.parametrize(("owner", "method", "wrong", "sampling"), CHANGES_TEXTS, ids=spelled)
def test_texts_catch_broken_machinery(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable, sampling: SamplingParams | None
) -> None:
    break_method(monkeypatch, owner, method, wrong)
    configuration = Configuration(label=method, sampling=sampling or SamplingParams())
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD


@pytest.mark.parametrize(("owner", "method", "wrong"), CHANGES_GREEDY_TEXTS, ids=spelled)
def test_greedy_identity_catches_broken_machinery(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable
) -> None:
    break_method(monkeypatch, owner, method, wrong)
    results = make_decoder().generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=20)
    expected = [greedy_text(TARGET, prompt, 20, GREEDY) for prompt in RAGGED_PROMPTS]
    assert unequal_texts([result.token_ids for result in results], expected) > 0


# These cost speed and not exactness, since drafts are verified against the distributions they were drawn from.
COSTS_ACCEPTANCE = [
    (ModelSource, "commit", draft_memory_not_moved),
    (Launcher, "launch", pending_token_of_the_round_before),
]


@pytest.mark.parametrize(("owner", "method", "wrong"), COSTS_ACCEPTANCE, ids=spelled)
def test_an_identical_draft_catches_a_broken_draft_memory(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, wrong: Callable
) -> None:
    break_method(monkeypatch, owner, method, wrong)
    results = make_decoder(draft=TARGET).generate(RAGGED_PROMPTS * 5, max_new_tokens=40, seed=1)
    assert results[0].stats.acceptance_rate < 1.0
