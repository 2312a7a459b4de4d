"""One batch from its prompts to its last token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.drafters import Drafter, DraftSession
from polydraft.engine.result import StopReason
from polydraft.engine.stats import TARGET, Stats
from polydraft.errors import FailureError, UsageError
from polydraft.models import LanguageModel, Memory
from polydraft.sampling import Noise, SamplingParams, Warper
from polydraft.walks import Fault, Walk
from polydraft.walks.walk import TargetLaw

_LOGITS_BYTES = 2**28
"""Most room for the logits of a whole tree."""
_FEW_NODES = 16
_NUMBERS = 5
"""Of a verdict that the host wants beside its tokens."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens of one row from one round."""

    row: int
    token_ids: list[int]
    sources: list[str]
    stop_reason: StopReason | None


class Workspace:
    """Memories of target and drafter for a batch; kept, they let a later run reuse the text they share."""

    def __init__(self, target: LanguageModel, drafter: Drafter, batch_size: int, params: SamplingParams) -> None:
        self.batch_size = batch_size
        self.session = drafter.start(batch_size, params, target)
        self.memory = Memory(target, batch_size, behind=1, places=self.session.num_nodes)
        self.claim = object()
        """Mark of the run whose texts are in the memories; a later one puts its own."""


class Run:
    """Generate for a batch, one round at a time.

    A round (`step`) is a pure function of tensors on the device; the host sees its outcome once, at the end, and does
    the book-keeping: ends of text, limits, statistics. Rows that are done idle along.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        drafter: Drafter,
        workspace: Workspace,
        walk: Walk,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        generators: Sequence[torch.Generator],
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.target, self.drafter, self.walk = target, drafter, walk
        self.texts = [list(prompt) for prompt in prompts]
        self.sources: list[list[str]] = [[] for _ in prompts]
        """Where each new token came from."""
        self.stats = Stats()
        self._started = time.perf_counter()
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._eos, self._device = eos_token_ids, target.device
        self._ends = [_end(len(prompt), max_new_tokens, target.max_positions) for prompt in prompts]
        self._longest = max(end for end, _ in self._ends)
        self._noise = Noise(generators, self._device)
        self._warper = Warper(params, target.vocab_size, prompts, self._device)
        self._memory, self._session = workspace.memory, workspace.session
        self._workspace, self._claim = workspace, object()
        workspace.claim = self._claim
        self.stop_reasons: list[StopReason | None] = [None] * len(prompts)
        with torch.inference_mode(), self.stats.clock("prefill"):
            limits = self._session.prepare(self.texts, self._longest)
            observer = self._session.observe if self._session.reads_features else None
            self._memory.align(self.texts, self._longest, limits, observer)
            self._session.begin(self.texts, self._longest)
        self._tail_B2 = torch.tensor([[0, *text][-2:] for text in self.texts], device=self._device)
        self._active_B = torch.ones(len(prompts), dtype=torch.bool, device=self._device)

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return all(reason is not None for reason in self.stop_reasons)

    def new_tokens(self, row: int) -> list[int]:
        """Return what a row has got so far."""
        return self.texts[row][self._prompt_lengths[row] :]

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Run one round and return the new tokens of every row that was not done."""
        if self._workspace.claim is not self._claim:
            raise UsageError(
                "a later call with keep=True has taken over the memory of this stream; finish one stream before the next, "
                "or leave keep out"
            )
        outcome_BX, depth = self._round(self._session)
        with self.stats.clock("verify"):
            outcome = outcome_BX.tolist()  # the round's only device-to-host copy
        told = depth + 1 + _NUMBERS
        if outcome_BX.shape[1] > told:
            self._session.receive([values[told:] for values in outcome])
        emitted = [
            self._settle_row(row, values[: depth + 1], *values[depth + 1 : told])
            for row, values in enumerate(outcome)
            if self.stop_reasons[row] is None
        ]
        self._settle(emitted)
        return emitted

    def _round(self, session: DraftSession) -> tuple[Tensor, int]:
        """Draft, score, walk and commit, without a look at the values."""
        stats, depth = self.stats, session.depth
        with stats.clock("draft"):
            uniforms_BU = self._noise.uniforms(session.num_uniforms + self.walk.uniforms(session.scheme, depth))
            draft = session.propose(self._tail_B2, uniforms_BU[:, : session.num_uniforms])
        with stats.clock("target"):
            features_BNF = self._memory.context.extend(draft.tokens_BN, draft.block())
        with stats.clock("verify"):
            target_law = self._target_law(features_BNF)
            verdict = self.walk.run(session.scheme, draft, target_law, uniforms_BU[:, session.num_uniforms :])
        with stats.clock("commit"):
            keep_B = torch.where(self._active_B, verdict.accepted_B + 1, 0)
            self._memory.context.commit(verdict.path_BD, keep_B)
            report_BX = session.commit(verdict, keep_B, features_BNF)
            recent_BX = torch.cat([self._tail_B2[:, 1:], verdict.tokens_BD], dim=1)
            last_B1 = verdict.accepted_B[:, None]
            self._tail_B2 = torch.cat([recent_BX.gather(1, last_B1), recent_BX.gather(1, last_B1 + 1)], dim=1)
            branch_B = draft.branch(verdict.path_BD[:, min(1, depth)])
            numbers = (verdict.accepted_B, verdict.offered_B, verdict.fault_B, draft.longest(), branch_B)
            reports = () if report_BX is None else (report_BX,)
            outcome_BX = torch.cat([verdict.tokens_BD, *(number[:, None] for number in numbers), *reports], dim=1)
        return outcome_BX, depth

    def _target_law(self, features_BNF: Tensor) -> TargetLaw:
        """Return the target's law at one node a row, as the walk asks for it."""
        batch_size, nodes, _ = features_BNF.shape
        rows_B = torch.arange(batch_size, device=self._device)
        # The output head is large: reading it once for all nodes is cheaper than once for each node that is visited, as long
        # as multiplying is cheaper than reading: with matrix units (half precision), or for few nodes.
        cheap = features_BNF.dtype in (torch.bfloat16, torch.float16) or nodes <= _FEW_NODES
        small = 4 * batch_size * nodes * self.target.vocab_size <= _LOGITS_BYTES
        logits_BNV = self.target.head(features_BNF) if cheap and small else None

        def target_law(node_B: Tensor, path_BP: Tensor) -> Tensor:
            visited = (rows_B, node_B)
            logits_BV = self.target.head(features_BNF[visited]) if logits_BNV is None else logits_BNV[visited]
            return self._warper.probs(logits_BV[:, None], path_BP[:, None])[:, 0]

        return target_law

    def _settle_row(self, row: int, tokens: list[int], accepted: int, offered: int, fault: int, *shape: int) -> Emitted:
        """Take what one row got, up to its end."""
        if fault == Fault.SCHEME:
            raise FailureError(
                f"scheme {self._session.scheme.name!r} emitted no token after {len(self.texts[row])} tokens; please report "
                "this, and use another --scheme"
            )
        if fault:
            who = f"the target {self.target.name!r}" if fault == Fault.TARGET else "the draft"
            raise FailureError(
                f"{who} returned logits that are not numbers after {len(self.texts[row])} tokens; "
                "try dtype float32, or check the weights"
            )
        text, kept, reason = self.texts[row], [], None
        end, end_reason = self._ends[row]
        for token in tokens[: accepted + 1]:
            kept.append(token)
            if token in self._eos:
                reason = StopReason.EOS
            elif len(text) + len(kept) >= end:
                reason = end_reason
            if reason:
                break
        text.extend(kept)
        drafted = kept[:accepted]
        sources = [*(self._session.sources(row, drafted) or [self.drafter.name] * len(drafted))]
        sources += [TARGET] * (len(kept) - len(drafted))
        self.sources[row].extend(sources)
        self.stats.count(accepted, offered, *shape)
        self.stats.keep(sources)
        self.stop_reasons[row] = reason
        return Emitted(row, kept, sources, reason)

    def _settle(self, emitted: list[Emitted]) -> None:
        by_row: list[list[int]] = [[] for _ in self.texts]
        for item in emitted:
            by_row[item.row] = item.token_ids
        self.stats.rounds += 1
        self._warper.advance(by_row)
        self._memory.settle(self.texts)
        self._session.settle(self.texts, by_row)
        if any(item.stop_reason for item in emitted):
            self._retire()
        self.stats.total_seconds = time.perf_counter() - self._started

    def end_row(self, row: int, reason: StopReason, new_tokens: int) -> None:
        """End a row from outside (a stop string, a criterion, a cancellation), keeping that many new tokens."""
        self.stats.drop(self.sources[row][new_tokens:])
        del self.texts[row][self._prompt_lengths[row] + new_tokens :]
        del self.sources[row][new_tokens:]
        self.stop_reasons[row] = reason
        self._retire()

    def _retire(self) -> None:
        """Let ended rows idle: memories drop what was cut off at the end and grow no more."""
        self._active_B = torch.tensor([reason is None for reason in self.stop_reasons], device=self._device)
        if self._workspace.claim is self._claim:
            self._memory.rewind(self.texts)
            self._session.rewind(self.texts)


def _end(prompt_length: int, max_new_tokens: int, max_positions: int | None) -> tuple[int, StopReason]:
    """Return the length at which a text ends, and what that end is called."""
    if max_positions is not None and prompt_length + max_new_tokens > max_positions:
        return max_positions, StopReason.CONTEXT
    return prompt_length + max_new_tokens, StopReason.LENGTH
