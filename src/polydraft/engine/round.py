"""A round: propose, extend, verify, commit, as one function of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.draft import DraftSession
from polydraft.engine.outcome import Outcome, conclude
from polydraft.engine.stats import Stats
from polydraft.models import LanguageModel, Memory
from polydraft.rows import ByRow
from polydraft.sampling import RowParams, Warper
from polydraft.transfers import assign
from polydraft.trees import DraftTree
from polydraft.verify import TargetDistributions, Walk
from polydraft.verify.node import greedy_verdict

_LOGITS_BYTES = 2**28
"""Most room for the logits of a whole tree."""
_FEW_NODES = 16


@dataclass(eq=False)
class State(ByRow):
    """All that rounds read and write: tensors that stay where they are from one round to the next."""

    ROW_STATE = ("tail_B2", "active_B", "greedy_B")

    target: LanguageModel
    session: DraftSession
    memory: Memory
    """The target's."""
    warper: Warper
    """Turns the target's logits into the distributions of the rows' sampling parameters."""
    tail_B2: Tensor
    """The last two tokens of each text; the second is pending."""
    active_B: Tensor
    """Rows that take part."""
    greedy_B: Tensor
    """Rows that take the likeliest token."""
    watched: bool = False
    """Whether the two fields below are kept for the host."""
    path_features_BDF: Tensor | None = None
    """The target's, of the nodes that the last round's path goes through."""
    tree: DraftTree | None = None
    """The last round's."""

    def row_parts(self) -> Iterable[ByRow]:
        """Return the warper; memory and session are the workspace's."""
        return (self.warper,)

    def use(self, params: RowParams) -> None:
        """Take the parameters that the rows have from now on: there are more or fewer of them than before."""
        assign(self.greedy_B, params.greedy)
        self.warper.use(params)


def run_round(state: State, walk: Walk, uniforms_BU: Tensor, stats: Stats, host_tree: DraftTree | None = None) -> Outcome:
    """Draft, score, verify and commit, without a look at the values: a function of tensors that can be captured.

    Parameters
    ----------
    state : State
        Its memories, `tail_B2` and what the session keeps are moved on in place.
    walk : Walk
    uniforms_BU : Tensor
        The session's random numbers, then the walk's.
    stats : Stats
        Its clocks run; they mean something only where rounds are not captured.
    host_tree : DraftTree, optional
        What the host has proposed already.
    """
    session, target_context = state.session, state.memory.context
    own_BU, walk_BU = uniforms_BU[:, : session.num_uniforms], uniforms_BU[:, session.num_uniforms :]
    with stats.clock("draft"):
        draft = session.propose(state.tail_B2, own_BU, host_tree)
    foreseen = state.warper.params.has_processors and not is_host(state.target.device)
    paths = draft.without_riders().paths().tolist() if foreseen else []  # before the pass is launched, or it is waited for
    with stats.clock("target"):
        features_BNF = target_context.extend(draft.tokens_BN, draft.block())
    with stats.clock("verify"):
        if foreseen:
            state.warper.foresee(paths)
        candidates = draft.without_riders()
        nodes = candidates.tokens_BN.shape[1]
        # A long path is one that is likely to be followed: n-grams, and what a request predicts.
        target_distributions = distributions(state, features_BNF[:, :nodes], draft.reach == nodes - 1)
        verdict = walk.run(session.scheme, candidates, target_distributions, walk_BU)
        if state.warper.params.mixed:
            verdict = greedy_verdict(candidates, target_distributions).where(state.greedy_B, verdict)
    with stats.clock("commit"):
        outcome, keep_B = conclude(draft, verdict, state.tail_B2, state.active_B)
        longest = draft.depth if draft.reach is None else draft.reach
        target_context.commit(verdict.path_BD[:, : longest + 1], keep_B, in_place=draft.chain)
        report_BX = session.commit(verdict, keep_B, features_BNF)
        if state.watched:
            path_BDF = verdict.path_BD[..., None].expand(-1, -1, features_BNF.shape[-1])
            state.path_features_BDF, state.tree = features_BNF.gather(1, path_BDF), candidates
        return outcome if report_BX is None else Outcome(torch.cat([outcome.packed_BX, report_BX], dim=1), outcome.depth)


def distributions(state: State, features_BNF: Tensor, likely: bool = False) -> TargetDistributions:
    """Return the target's distributions at the nodes, as the walk asks for them; `likely` if it may well visit them all."""
    batch_size, nodes, _ = features_BNF.shape
    # The output head is large: reading it once for all nodes is cheaper than once for each node that is visited, as long
    # as multiplying is cheaper than reading: with matrix units (half precision), or for few nodes.
    cheap = features_BNF.dtype in (torch.bfloat16, torch.float16) or nodes <= _FEW_NODES or likely
    small = 4 * batch_size * nodes * state.target.vocab_size <= _LOGITS_BYTES
    return TargetDistributions(features_BNF, state.target.head, state.warper, whole=cheap and small)
