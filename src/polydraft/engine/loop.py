"""The engine's loop: sequences in slots, round after round, until every text has ended."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from polydraft.engine.graphs import DeviceClock, Launched
from polydraft.engine.logprobs import token_logprobs
from polydraft.engine.outcome import RowOutcome
from polydraft.engine.sequence import Emitted, StopReason, TokenSequence
from polydraft.engine.slots import Slots
from polydraft.engine.stats import TARGET, ReadingPace, Stats
from polydraft.engine.workspace import Workspace, device_failure
from polydraft.errors import FailureError, PolydraftError
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.verify import AUTO, Fault, Walk

_DEVICE_ERRORS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_LEAST_TEXT = 2
"""Tokens of a prompt to read at first: drafts treat a text of one token as a special case."""


class Engine:
    """Generate for sequences that come and go, one round at a time.

    A *slot* is one row of the workspace's tensors; a *sequence* lives in a slot from its admission to its end. A round is a
    function of tensors; the host sees its outcome once, at the end, and settles it. Empty slots and ended sequences take part
    in rounds without effect. A text depends on its own prompt, parameters and generator alone.

    Where the workspace allows it, the next round is launched before the host has seen the last one's outcome, so that the
    device never waits for the host (docs/decisions/017-rounds-run-ahead-by-one.md). The texts are the same, but a generator may
    have drawn the numbers of one round more than was used.

    Parameters
    ----------
    workspace : Workspace
        Target, drafter and memory; its rows are the slots.
    walk : str or Walk
        How trees are verified; ``"auto"`` for what suits the drafter. A walk of your own is used if it fits the scheme.
    sequences : sequence of TokenSequence
        The first ones; `add` takes more.
    keep : bool
        Reuse what the workspace holds of the first sequences' texts.
    prefixes : Prefixes, optional
        Cache of prompt prefixes: where to look up what other texts have read, and to keep what these read. Several engines may
        share it. Drafters that learn from texts learn from each text alone.
    chunk : int, optional
        Most prompt tokens that a step reads, so that long prompts do not delay other texts; no limit if not given.
    stall : float, optional
        Seconds that a step may spend on prompts while running texts wait, or the time of a round if that is longer. Steps read
        fewer tokens to keep to it. Not for processes that share a model: their steps must be alike.
    elastic : bool
        Let the number of slots follow the number of texts, up to the workspace's rows.
    isolate : bool
        If the model or a logits processor fails for a sequence, end that one (`StopReason.FAILED`) instead of raising.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        walk: str | Walk = AUTO,
        sequences: Sequence[TokenSequence] = (),
        keep: bool = False,
        prefixes: Prefixes | None = None,
        chunk: int | None = None,
        stall: float | None = None,
        elastic: bool = False,
        isolate: bool = False,
    ) -> None:
        self.slots = Slots(workspace, elastic=elastic, prefixes=prefixes)
        self.waiting: deque[TokenSequence] = deque(sequences)
        self.stats = Stats()
        self._pace, self._isolate = ReadingPace(chunk, stall), isolate
        self._faulty: list[int] = []
        """Slots of failed sequences, which may hold NaNs."""
        self._started = time.perf_counter()
        self._asked_walk = walk
        self.walk: Walk | None = None
        """Verifies the trees; None until a sequence is admitted."""
        self.workspace, self.session = workspace, workspace.session
        self._launched: list[Launched] = []
        """Rounds whose outcomes are not known yet; between steps, at most the one launched ahead."""
        self._reading = DeviceClock(workspace.target.device)
        self._retiring = False
        """Whether sequences have ended that the round launched ahead still treats as active."""
        self._interrupted = False
        """Whether a round was interrupted, so that the state of the caches is unknown."""
        with workspace.ownership.taken_by(self), torch.inference_mode(), _device_errors():
            self._admit(keep=keep)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.waiting and not any(self.slots.running())

    @property
    def free_slots(self) -> int:
        """How many more sequences fit."""
        return max(self.slots.most - sum(1 for _ in self.slots.running()) - len(self.waiting), 0)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a free slot."""
        self.waiting.append(sequence)

    @torch.inference_mode()
    def step(self, awaited: bool = False) -> list[Emitted]:
        """Read prompts of new sequences and run one round; return the new tokens of every sequence that took part in it.

        `awaited` says that texts of another engine wait for this step.
        """
        with self.workspace.ownership.held_by(self), _device_errors():
            if self._interrupted:
                raise FailureError("a round of this text was interrupted, so its state is unknown; start the request again")
            was_ahead, started = bool(self._launched), time.perf_counter()
            with self.undivided():
                if not self._launched:
                    self._admit(awaited)
                    self._make_room()
                    ended = self._end_read()
                    if ended or not any(self.slots.active()):
                        return ended
                    self._launched.append(self._launch())
                now = self._launched[0]
                if len(self._launched) == 1 and self._runs_ahead(now):
                    self._launched.append(self._launch())
            waited = -time.perf_counter()
            with self.stats.clock("verify"):
                outcome, reports = now.wait()  # if interrupted here, the next step waits for the same round
            waited += time.perf_counter()
            self.stats.move_time(min(self._reading.take(), waited), "verify", "prefill")
            self._pace.timed(self.stats.seconds["prefill"], time.perf_counter() - started)
            with self.undivided():
                del self._launched[0]
                self.stats.replayed_rounds += now.replayed
                self.stats.rounds_ahead += was_ahead
                return self._settle(outcome, reports)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Mark the engine as interrupted if this block raises: texts and caches no longer match, so it cannot go on."""
        try:
            yield
        except BaseException:
            self._interrupted = True
            raise

    def _admit(self, awaited: bool = False, *, keep: bool = False) -> None:
        """Let waiting sequences into free slots, and read prompts."""
        starved = bool(self.waiting) and not self.slots.can_take(self.waiting[0])
        fresh, changed = self.slots.fit(() if starved else self.waiting)
        if changed and self.walk is not None:
            self.walk = self._chosen_walk()  # the scheme changes when only greedy texts are left
            self.workspace.activate(self.slots.active())
        rows, new = self._choose_prompts(awaited)
        if rows:
            rows += sorted(slot for slot in set(fresh).difference(rows) if self.slots[slot] is None)
            self._read_prompts(rows, new, keep=keep)

    def _choose_prompts(self, awaited: bool) -> tuple[list[int], list[int]]:
        """Choose which prompts this step reads, and how far; return their slots, and which of these have just been taken.

        First come, first served, but short prompts need not wait for a long one: they may have half of what is read.
        """
        free, room = self.slots.free(), self._pace.room(awaited or any(self.slots.active()))
        begun = [slot for slot in self.slots.reading if slot not in free]
        rows, new, passing = list[int](), list[int](), room // 2 if begun else 0
        while room > 0 and (begun or (self.waiting and free)):
            fitting = (one for one in self.waiting if free and (not begun or len(one.prompt) <= passing))
            first_come = next((one for one in fitting if not self.slots.awaits(one)), None)
            if first_come is not None and not self.slots.hold(free[0], first_come):
                first_come, free = None, []  # no memory until other texts end
            if first_come is not None:
                self.waiting.remove(first_come)
                passing -= len(first_come.prompt)
                slot, start = self.slots.take(first_come, free)
                new.append(slot)
            elif begun:
                slot = begun.pop(0)
                start = self.slots.reading.pop(slot)
            else:
                break  # every waiting text needs memory, or a prefix that another text is reading
            sequence = self.slots[slot]
            assert sequence is not None
            length = min(len(sequence.tokens), start + room)
            room -= length - start
            self._pace.read(length - start)
            if length < len(sequence.tokens):
                self.slots.reading[slot] = max(length, _LEAST_TEXT)
            rows.append(slot)
        return rows, new

    def _read_prompts(self, rows: Sequence[int], new: Sequence[int], *, keep: bool) -> None:
        """Read the prompts of these slots, as far as `slots.reading` says, and set the parameters of all rows."""
        first = self.walk is None
        active = self.slots.active()
        at_work = {slot: one for slot, one in enumerate(self.slots) if one is not None and active[slot]}
        for slot, sequence in at_work.items():
            self.slots.noise.seat(slot, sequence.generator)
        # Idle slots decode greedily, but draw if all others do and rounds are captured: a mixed batch needs its own capture.
        working = RowParams(tuple(one.row_params for one in at_work.values()))
        drawing = self.workspace.captures and not any(working.greedy) and not any(working.coupled)
        idle = SamplingParams() if drawing else IDLE
        params = {slot: at_work[slot].row_params if slot in at_work else idle for slot in range(len(self.slots))}
        longest = max(sequence.end for sequence in self.slots.running())
        self._share()
        read = ((slot, self.slots[slot]) for slot in rows)
        with_logprobs = {slot: one for slot, one in read if one and one.prompt_top_logprobs is not None and one.is_fresh}
        unread = [slot for slot in new if slot in with_logprobs]
        if not (keep or self.slots.recalls):
            unread = list(range(len(self.slots))) if first else list(new)
        with self.stats.clock("prefill"), self._reading.running():
            self.workspace.begin(
                self.slots.texts(),
                longest,
                rows=range(len(self.slots)) if first else rows,
                unread=unread,
                keep=keep,
                params=self.workspace.params.replaced(params),
                with_logprobs=with_logprobs,
            )
            for slot in rows:
                if active[slot]:
                    self.slots.restore(slot)
            self.workspace.activate(active)
            self.workspace.begun.watched = any(
                one is not None and (one.traced or one.top_logprobs is not None) for one in self.slots
            )
        self.walk = self._chosen_walk()

    def _make_room(self) -> None:
        """Get memory for the next round; if there is too little, evict the youngest texts."""
        while not self.slots.have_room(1):
            self._evict()

    def _evict(self) -> None:
        """Evict the youngest text; it waits until there is memory for all of it."""
        self.waiting.appendleft(self.slots.evict())
        self.workspace.retire(self.slots.texts(), self.slots.active())
        self.slots.rest()

    def _end_read(self) -> list[Emitted]:
        """End texts whose prompts are read and that ask for no new tokens."""
        ended = list[Emitted]()
        for slot, (sequence, active) in enumerate(zip(self.slots, self.slots.active(), strict=True)):
            if sequence is None or not active or sequence.max_new_tokens:
                continue
            if any(math.isnan(one.logprob) for one in sequence.prompt_logprobs):
                ended.append(self._failed(slot, sequence, Fault.TARGET))
            else:
                sequence.cut(StopReason.LENGTH, 0)
                ended.append(Emitted(sequence.row, [], [], [], sequence.stop_reason))
        if ended:
            self._release()
        return ended

    def _chosen_walk(self) -> Walk:
        if isinstance(self._asked_walk, Walk):
            return self._asked_walk if self._asked_walk.fits(self.session.scheme) else self.session.resolve_walk(AUTO)
        return self.session.resolve_walk(self._asked_walk)

    def _launch(self) -> Launched:
        assert self.walk is not None, "a sequence was admitted"
        self._share()
        with self.stats.clock("draft"):
            count = self.workspace.num_uniforms(self.walk)
            uniforms_BU = self.slots.noise.uniforms(count)
        workspace = self.workspace
        ahead = bool(self._launched)
        return workspace.launcher.launch(workspace.begun, workspace.contexts, self.walk, uniforms_BU, self.stats, ahead=ahead)

    def _share(self) -> None:
        """Tell the drafter how many texts share the rounds."""
        load = sum(self.slots.active())
        self.session.share([1 if one is None or one.done else load for one in self.slots])

    def _runs_ahead(self, now: Launched) -> bool:
        """Whether to launch another round before this one's outcome is known; not if it could be for nothing."""
        most = self.session.reach + 1
        goes_on = any(len(sequence.tokens) + most < sequence.end for sequence in self.slots.running())
        reads = any(slot not in self.slots.free() for slot in self.slots.reading)
        if not goes_on or self.waiting or reads or self._retiring or not self.slots.have_room(2):
            return False
        return self.workspace.launcher.runs_ahead(self.workspace.begun, self.workspace.contexts, now)

    def _settle(self, outcome: list[RowOutcome], reports: list[list[int]]) -> list[Emitted]:
        """Give every running sequence its new tokens, up to its end, and release those that ended."""
        active = self.slots.active()
        accepted = [row.tokens[:-1] if runs else [] for row, runs in zip(outcome, active, strict=True)]
        sources = self.session.receive(reports, accepted)
        by_slot: list[list[int]] = [[] for _ in self.slots]
        emitted, kept = list[Emitted](), list[int]()
        why_none = self.session.rest_reason
        for slot, (sequence, row) in enumerate(zip(self.slots, outcome, strict=True)):
            if sequence is None or not active[slot]:
                continue
            if row.fault:
                emitted.append(self._failed(slot, sequence, Fault(row.fault)))
                continue
            fresh = sequence.is_fresh
            one = replace(sequence.take(row.tokens, [*sources[slot], TARGET]), accepted=row.accepted, drafted=row.drafted)
            if sequence.top_logprobs is not None:
                logits_DV = self.workspace.path_logits(slot, len(one.token_ids))
                one.logprobs.extend(token_logprobs(logits_DV, one.token_ids, sequence.top_logprobs))
            if sequence.traced:
                one.tree.extend(self.workspace.last_tree(slot))
            sequence.speculation.rounds += 1
            for stats in (self.stats, sequence.speculation):
                stats.count(row.accepted, row.offered, row.longest, row.branch)
                stats.saw_candidates(row.drafted, why_none)
            self.stats.keep(one.sources)
            by_slot[slot] = one.token_ids
            if fresh or sequence.done:
                kept.append(slot)
            emitted.append(one)
        self.stats.rounds += 1
        self.workspace.settle(self.slots.texts(), by_slot)
        self.slots.keep(kept)
        if self._retiring or any(one.stop_reason for one in emitted):
            self._release()
        self.stats.total_seconds = time.perf_counter() - self._started
        if self.stats.first_token_seconds is None and any(one.token_ids for one in emitted):
            self.stats.first_token_seconds = self.stats.total_seconds
        return emitted

    def end(self, sequence: TokenSequence, reason: StopReason, new_tokens: int) -> None:
        """End a sequence from outside (a criterion, a cancellation), keeping its first `new_tokens` new tokens."""
        self.stats.drop(sequence.cut(reason, new_tokens))
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        with torch.inference_mode():
            self._release(kept=[slot for slot, one in enumerate(self.slots) if one is sequence and one.new_tokens])

    def _release(self, kept: Sequence[int] = ()) -> None:
        """Release ended sequences, or wait with it until the round launched ahead is over, if others need its tokens."""
        with self.workspace.ownership.settled_by(self) as own:
            if not own or self.workspace.state is None:  # no sequence was admitted yet
                return
            if not self._interrupted:
                self.slots.keep(kept)
            if not any(self.slots.running()):
                self._launched.clear()  # rounds launched ahead of finished rows are discarded
            self._retiring = bool(self._launched)
            if not self._retiring:
                self.slots.vacate_ended()
                self.workspace.retire(self.slots.texts(), self.slots.active())
                while self._faulty:
                    self.workspace.clear(self._faulty.pop())
                self.slots.rest()

    def _failed(self, slot: int, sequence: TokenSequence, fault: Fault) -> Emitted:
        """End a sequence whose round failed, or raise the failure if the engine does not isolate them."""
        processing = self.workspace.begun.warper.processing
        raised = (processing.errors or {}).get(slot) if fault == Fault.TARGET else None
        if raised is not None and not self._isolate:
            raise raised
        error = self._failure(fault, len(sequence.tokens), raised, processing.emptied_by)
        if not self._isolate:
            raise error
        self.slots.vacate(slot)
        self._faulty.append(slot)
        return sequence.fail(error)

    def _failure(self, fault: Fault, length: int, raised: Exception | None, emptied_by: str | None) -> PolydraftError:
        if fault == Fault.SCHEME:
            return FailureError(
                f"scheme {self.session.scheme.name!r} emitted no token after {length} tokens; please report this, and use "
                "another --scheme"
            )
        if isinstance(raised, PolydraftError):  # from a grammar: it says everything already
            return raised
        if raised is not None:
            return FailureError(
                f"a logits processor failed after {length} tokens ({type(raised).__name__}: {raised}); fix or remove it"
            )
        if fault == Fault.TARGET and emptied_by is not None:
            return FailureError(
                f"logits processor {emptied_by!r} left no token to go on with after {length} tokens; leave at least one with "
                "a finite score"
            )
        who = f"the target {self.workspace.target.name!r}" if fault == Fault.TARGET else "the draft"
        return FailureError(
            f"{who} returned logits that are not numbers after {length} tokens; try dtype float32, or check the weights"
        )


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except _DEVICE_ERRORS as error:
        raise device_failure(error) from error
