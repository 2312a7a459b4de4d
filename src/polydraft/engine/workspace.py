"""Memories of a batch, and the round that works on them."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from polydraft.compilation import compiled as compiled_form
from polydraft.drafters import Drafter
from polydraft.engine.outstanding import Outstanding
from polydraft.engine.ownership import Ownership
from polydraft.engine.recorder import Recorder, tell_obstacle
from polydraft.engine.stats import Stats
from polydraft.errors import FailureError
from polydraft.models import Context, LanguageModel, Memory
from polydraft.models.language_model import assign
from polydraft.sampling import RowParams, Warper
from polydraft.trees import DraftTree
from polydraft.walks import TargetLaws, Walk
from polydraft.walks.node import greedy_verdict

_LOGITS_BYTES = 2**28
"""Most room for the logits of a whole tree."""
_FEW_NODES = 16


class Workspace:
    """All that a batch keeps on the device from round to round; kept, it lets a later run reuse the text they share.

    A round (`round`) is a function of tensors that stay where they are. The host decides nothing inside it, so on a GPU
    it is recorded once and then replayed as one CUDA graph.

    Parameters
    ----------
    target : LanguageModel
    drafter : Drafter
    params : RowParams
        One `SamplingParams` per row.
    graphs : bool
        Record rounds where the device can.
    compiled : bool
        Compile drawing and verification before they are recorded: a third of their launches, for some seconds once.
    ahead : bool
        Allow a replayed round to be launched before the outcome of the last one is known.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        params: RowParams,
        graphs: bool = True,
        compiled: bool = False,
        ahead: bool = True,
    ) -> None:
        self.target, self.params = target, params
        self.session = drafter.start(params, target)
        batch_size = len(params)
        self.memory = Memory(target, batch_size, behind=1, places=self.session.num_nodes)
        self.ownership = Ownership()
        """Whose texts are in the memories."""
        self.warper: Warper | None = None
        self.tail_B2 = torch.zeros(batch_size, 2, dtype=torch.long, device=target.device)
        """The last two tokens of each text; the second is pending."""
        self.active_B = torch.ones(batch_size, dtype=torch.bool, device=target.device)
        self._greedy_B = torch.zeros_like(self.active_B)
        """Rows that take the likeliest token."""
        self._ahead = ahead
        self._compiled = compiled and graphs and target.device.type == "cuda"
        if self._compiled and self.session.recordable:
            self.session.compile()
        # Compilation takes a second run to see what varies.
        self._recorder = Recorder(before=3 if compiled else 1) if graphs and target.device.type == "cuda" else None

    def begin(self, texts: Sequence[Sequence[int]], longest: int, keep: bool, rows: Sequence[int], params: RowParams) -> None:
        """Read new texts, which may grow to `longest` tokens.

        Parameters
        ----------
        texts : sequence of token-id lists, one per row
        longest : int
        keep : bool
            Read only what is not in the memories already.
        rows : sequence of int
            Rows whose texts are new; the others go on.
        params : RowParams
            Of all rows, from now on.
        """
        self.params = params
        for context in self._contexts:
            context.span = None
        if not keep:
            self.session.forget(rows)
        limits = self.session.prepare(texts, longest, rows)
        if not keep:
            new = set(rows)
            known = [len(text) for text in texts] if limits is None else limits
            limits = [0 if row in new else limit for row, limit in enumerate(known)]
        observer = self.session.observe if self.session.reads_features else None
        self.memory.align(texts, longest, limits, observer)
        self.session.begin(texts, longest, rows, params)
        if self.warper is None:
            self.warper = Warper(params, self.target.vocab_size, texts, self.target.device)
        else:
            self.warper.admit(params, rows, [texts[row] for row in rows])
        self._greedy_B.copy_(torch.tensor(params.greedy))
        self.tail_B2.copy_(torch.tensor([[0, *text[-2:]][-2:] for text in texts]))

    def activate(self, active: Sequence[bool]) -> None:
        """Say which rows take part in rounds."""
        assign(self.active_B, active)

    def num_uniforms(self, walk: Walk) -> int:
        """Random numbers a row that the next round uses."""
        return self.session.num_uniforms + walk.uniforms(self.session.scheme, self.session.depth)

    def runs_ahead(self, last: Outstanding) -> bool:
        """Whether a round may follow before the host has seen the last one's outcome.

        It needs nothing from the host then but random numbers, and is a replay of the same recording, with room enough,
        however many tokens the last one yields.
        """
        # Penalties depend on emitted tokens, which `settle` adds to what they count.
        alone = self._ahead and last.replayed and not self.session.needs_outcome and not self.params.needs_history
        return alone and all(context.steady(self.session.depth + 1) for context in self._contexts)

    def round(self, walk: Walk, uniforms_BU: Tensor, stats: Stats) -> Outstanding:
        """Launch a round: draft, score, walk and commit, without a look at the values.

        Returns
        -------
        Outstanding
            Its outcome, a row each: the emitted tokens; accepted and offered nodes, the fault, the longest drafted path,
            the root's child that was kept; then the drafter's report.
        """
        if self._recorder is None or self._obstacle():
            for context in self._contexts:
                context.span = None
            return Outstanding.send(self._round(walk, uniforms_BU, stats), replayed=False)
        spans = tuple(context.fix_span() for context in self._contexts)
        stored = tuple((context.capacity, context.address) for context in self._contexts)
        assert self.warper is not None, "begin() comes first"
        shape = (self.session.depth, self.session.num_nodes, uniforms_BU.shape[1], self.session.scheme.name, *self.warper.kind)
        kind: tuple[Hashable, ...] = (type(walk), *vars(walk).values(), shape, spans, stored)
        inputs: tuple[Tensor, ...] = (uniforms_BU,)
        if self.session.drafts_on_host:
            with stats.clock("draft"):
                draft = self.session.host_tree(self.tail_B2, uniforms_BU[:, : self.session.num_uniforms])
            inputs += (draft.tokens_BN, draft.depths_BN, draft.ancestors_BNN, draft.child_table_BNK)
            kind += (draft.depth, *draft.child_table_BNK.shape)

        def function(values_BU: Tensor, *tables: Tensor) -> Tensor:
            if not tables:
                return self._round(walk, values_BU, Stats())
            tokens_BN, depths_BN, ancestors_BNN, child_table_BNK = tables
            static = replace(
                draft,
                tokens_BN=tokens_BN,
                depths_BN=depths_BN,
                ancestors_BNN=ancestors_BNN,
                child_table_BNK=child_table_BNK,
                reach=None,  # later replays may reach further
            )
            own_BU = values_BU[:, : self.session.num_uniforms]
            return self._score(walk, self.session.with_host_tree(static, self.tail_B2, own_BU), values_BU, Stats())

        with stats.clock("graph"):
            outcome_BX, replayed = self._recorder.run(kind, function, *inputs)
        return Outstanding.send(outcome_BX, replayed)

    def _round(self, walk: Walk, uniforms_BU: Tensor, stats: Stats) -> Tensor:
        with stats.clock("draft"):
            draft = self.session.propose(self.tail_B2, uniforms_BU[:, : self.session.num_uniforms])
        return self._score(walk, draft, uniforms_BU, stats)

    def _score(self, walk: Walk, draft: DraftTree, uniforms_BU: Tensor, stats: Stats) -> Tensor:
        session = self.session
        with stats.clock("target"):
            features_BNF = self.memory.context.extend(draft.tokens_BN, draft.block())
        with stats.clock("verify"):
            target_law = self._target_law(features_BNF[:, : features_BNF.shape[1] - draft.riders])
            run = partial(compiled_form(type(walk).run), walk) if self._compiled else walk.run
            candidates = draft.without_riders()
            verdict = run(session.scheme, candidates, target_law, uniforms_BU[:, session.num_uniforms :])
            if self.params.mixed:
                verdict = greedy_verdict(candidates, target_law).where(self._greedy_B, verdict)
        with stats.clock("commit"):
            keep_B = torch.where(self.active_B, verdict.accepted_B + 1, 0)
            self.memory.context.commit(verdict.path_BD, keep_B)
            report_BX = session.commit(verdict, keep_B, features_BNF)
            recent_BX = torch.cat([self.tail_B2[:, 1:], verdict.tokens_BD], dim=1)
            last_B2 = verdict.accepted_B[:, None] + torch.arange(2, device=recent_BX.device)
            self.tail_B2.copy_(recent_BX.gather(1, last_B2))
            branch_B = draft.branch(verdict.path_BD[:, min(1, session.depth)])
            numbers = (verdict.accepted_B, verdict.offered_B, verdict.fault_B, draft.longest(), branch_B)
            reports = () if report_BX is None else (report_BX,)
            return torch.cat([verdict.tokens_BD, *(number[:, None] for number in numbers), *reports], dim=1)

    def _target_law(self, features_BNF: Tensor) -> TargetLaws:
        """Return the target's laws at the nodes, as the walk asks for them."""
        assert self.warper is not None, "begin() comes first"
        batch_size, nodes, _ = features_BNF.shape
        # The output head is large: reading it once for all nodes is cheaper than once for each node that is visited, as long
        # as multiplying is cheaper than reading: with matrix units (half precision), or for few nodes.
        cheap = features_BNF.dtype in (torch.bfloat16, torch.float16) or nodes <= _FEW_NODES
        small = 4 * batch_size * nodes * self.target.vocab_size <= _LOGITS_BYTES
        return TargetLaws(features_BNF, self.target.head, self.warper, whole=cheap and small)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Take note on the host of the texts after a round, and of what it added."""
        assert self.warper is not None, "begin() comes first"
        self.warper.advance(emitted)
        self.memory.settle(texts)
        self.session.settle(texts, emitted)

    def retire(self, texts: Sequence[Sequence[int]], active: Sequence[bool]) -> None:
        """Let ended rows idle: memories drop what was cut off at the end and grow no more."""
        self.activate(active)
        self.memory.rewind(texts)
        self.session.rewind(texts)

    @property
    def records(self) -> bool:
        """Whether rounds are recorded, in whole or behind a draft of the host's, and worth keeping for other texts."""
        return self._recorder is not None and (self.session.recordable or self.session.drafts_on_host)

    @property
    def _contexts(self) -> tuple[Context, ...]:
        return (self.memory.context, *self.session.contexts())

    def _obstacle(self) -> str | None:
        """Return why the next round cannot be recorded, and log what will not pass."""
        lasting = self.target.graph_obstacle
        if not (self.session.recordable or self.session.drafts_on_host):
            lasting = self.session.obstacle() or "the drafter works on the host"
        elif self.params.has_processors:
            lasting = "logits processors work on the host"
        if lasting:
            tell_obstacle(self.target, lasting)
        return lasting or self.session.obstacle()


def device_failure(error: RuntimeError) -> FailureError:
    """Say in one line what a GPU's error means."""
    if isinstance(error, torch.OutOfMemoryError):
        return FailureError("out of GPU memory; use a smaller batch, fewer new tokens, a smaller tree, or another dtype")
    return FailureError(f"the GPU failed: {str(error).splitlines()[0]}; try again, or use --device cpu")
