"""A round: propose, extend, verify, commit, as one function of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.devices import assign, is_host
from polydraft.draft import DraftSession
from polydraft.engine.outcome import Outcome, conclude
from polydraft.engine.stats import Stats
from polydraft.models import LanguageModel, Memory
from polydraft.rows import ByRow
from polydraft.sampling import RowParams, Warper
from polydraft.trees import DraftTree
from polydraft.verify import TargetDistributions, Walk
from polydraft.verify.node import greedy_verdict

_LOGITS_BYTES = 2**28
"""Most bytes for the logits of a whole tree."""
_FEW_NODES = 16


@dataclass(eq=False)
class State(ByRow):
    """All that rounds read and write: tensors that keep their addresses from round to round."""

    ROW_STATE = ("tail_B2", "active_B", "greedy_B")

    target: LanguageModel
    session: DraftSession
    memory: Memory
    """The target's cache."""
    warper: Warper
    """Turns the target's logits into distributions, by the rows' sampling parameters."""
    tail_B2: Tensor
    """The last two tokens of each text; the second is pending."""
    active_B: Tensor
    """Rows that take part in rounds."""
    greedy_B: Tensor
    """Rows at temperature 0."""
    watched: bool = False
    """Whether to keep the two fields below for the host."""
    path_features_BDF: Tensor | None = None
    """The target's features at the nodes of the last round's path."""
    tree: DraftTree | None = None
    """The last round's tree."""

    def row_parts(self) -> Iterable[ByRow]:
        """Return the warper; the workspace takes care of memory and session."""
        return (self.warper,)

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""
        assign(self.greedy_B, params.greedy)
        self.warper.use(params)


def run_round(state: State, walk: Walk, uniforms_BU: Tensor, stats: Stats, host_tree: DraftTree | None = None) -> Outcome:
    """Draft, score, verify and commit without looking at values: a function of tensors that can be captured.

    Parameters
    ----------
    state : State
        Updated in place.
    walk : Walk
    uniforms_BU : Tensor
        The session's random numbers, then the walk's.
    stats : Stats
        Times the phases; meaningless if the round is being captured.
    host_tree : DraftTree, optional
        What the host has already proposed.
    """
    session, target_context = state.session, state.memory.context
    own_BU, walk_BU = uniforms_BU[:, : session.num_uniforms], uniforms_BU[:, session.num_uniforms :]
    with stats.clock("draft"):
        draft = session.propose(state.tail_B2, own_BU, host_tree)
    foreseen = state.warper.params.has_processors and not is_host(state.target.device)
    paths = draft.without_riders().paths().tolist() if foreseen else []  # copied before the pass, so as not to wait for it
    with stats.clock("target"):
        features_BNF = target_context.extend(draft.tokens_BN, draft.block())
    with stats.clock("verify"):
        if foreseen:
            state.warper.foresee(paths)
        candidates = draft.without_riders()
        nodes = candidates.tokens_BN.shape[1]
        # A tree that is one path (n-grams, a predicted output) is likely to be followed to its end.
        target_distributions = distributions(state, features_BNF[:, :nodes], draft.reach == nodes - 1)
        verdict = walk.run(session.scheme, candidates, target_distributions, walk_BU)
        if state.warper.params.mixed:
            verdict = greedy_verdict(candidates, target_distributions).where(state.greedy_B, verdict)
    with stats.clock("commit"):
        outcome, keep_B = conclude(draft, verdict, state.tail_B2, state.active_B)
        longest = draft.depth if draft.reach is None else draft.reach
        target_context.commit(verdict.path_BD[:, : longest + 1], keep_B, in_place=draft.chain)
        state.warper.move(keep_B)
        report_BX = session.commit(verdict, keep_B, features_BNF)
        if state.watched:
            path_BDF = verdict.path_BD[..., None].expand(-1, -1, features_BNF.shape[-1])
            state.path_features_BDF, state.tree = features_BNF.gather(1, path_BDF), candidates
        return outcome if report_BX is None else Outcome(torch.cat([outcome.packed_BX, report_BX], dim=1), outcome.depth)


def distributions(state: State, features_BNF: Tensor, likely: bool = False) -> TargetDistributions:
    """Return the target's distributions at the nodes; `likely` says that the walk will probably visit all of them."""
    batch_size, nodes, _ = features_BNF.shape
    # Reading the large output head once for all nodes beats reading it for each visited node if multiplying is cheaper than
    # reading: with matrix units (half precision), or for few nodes.
    cheap = features_BNF.dtype in (torch.bfloat16, torch.float16) or nodes <= _FEW_NODES or likely
    small = 4 * batch_size * nodes * state.target.vocab_size <= _LOGITS_BYTES
    return TargetDistributions(features_BNF, state.target.head, state.warper, whole=cheap and small)
