"""The one loop: sequences in slots, round after round, until every text has ended."""

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
from polydraft.sampling import IDLE, SamplingParams
from polydraft.verify import AUTO, Fault, Walk

_DEVICE_ERRORS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_LEAST_TEXT = 2
"""Tokens of a prompt to begin with: a text of one token is a case of its own."""


class Engine:
    """Generate for sequences that come and go, one round at a time.

    A *slot* is one row of the workspace's tensors; a *sequence* lives in a slot from its admission to its end. A round is a
    function of the tensors; the host sees its outcome once, at the end, and settles it. Empty slots and ended sequences take
    part in rounds without effect. What a sequence gets depends on its own prompt, parameters and generator alone.

    Where the workspace allows it the next round is launched before the host looks at the last one's outcome, so that the
    device never waits for the host (docs/decisions/017-rounds-run-ahead-by-one.md). The texts are the same; only the
    generators may have been asked for one round more than was used.

    Parameters
    ----------
    workspace : Workspace
        Target, drafter and memory; its rows are the slots.
    walk : str or Walk
        In which order trees are verified; ``"auto"`` for what suits the drafter. A walk of your own counts where it fits.
    sequences : sequence of TokenSequence
        To begin with; more come by `add`.
    keep : bool
        Reuse what the workspace holds of the first sequences' texts.
    prefixes : Prefixes, optional
        Where to find beginnings that other texts have read, and to keep those of these texts; several engines may share it.
        Drafters that learn from texts do so from each one's own alone.
    chunk : int, optional
        Most prompt tokens that a step reads, so that long prompts do not delay other texts; all if not given.
    stall : float, optional
        Seconds that a step may spend on prompts while texts at work wait, but at least as long as a round takes. Steps then
        read fewer tokens, by measured speed. Not for processes that share a model, whose steps must be alike.
    elastic : bool
        Have about as many slots as there are texts, up to the workspace's rows.
    isolate : bool
        Let a sequence whose model or logits processor fails end alone (`StopReason.FAILED`); raised otherwise.
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
        self._spoilt: list[int] = []
        """Slots whose sequences have failed, and which may hold NaNs."""
        self._started = time.perf_counter()
        self._wish = walk
        self.walk: Walk | None = None
        """Verifies the trees; set once a sequence is admitted."""
        self.workspace, self.session = workspace, workspace.session
        self._launched: list[Launched] = []
        """Rounds whose outcomes are not known yet: between steps the one ahead, if there is one."""
        self._reading = DeviceClock(workspace.target.device)
        self._retiring = False
        """Whether sequences have ended that the round ahead still takes for active ones."""
        self._torn = False
        """Whether a round was interrupted, so that the state of the caches is unknown."""
        with workspace.ownership.taken_by(self), torch.inference_mode(), _device_errors():
            self._admit(keep=keep)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.waiting and not any(self.slots.running())

    @property
    def free_slots(self) -> int:
        """How many more sequences could be at work."""
        return max(self.slots.most - sum(1 for _ in self.slots.running()) - len(self.waiting), 0)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a free slot."""
        self.waiting.append(sequence)

    @torch.inference_mode()
    def step(self, awaited: bool = False) -> list[Emitted]:
        """Run one round and return the new tokens of every sequence that took part: of none while prompts are read.

        `awaited` if texts of another engine wait for its end.
        """
        with self.workspace.ownership.held_by(self), _device_errors():
            if self._torn:
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
                outcome, reports = now.wait()  # an interruption here loses no round
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
        """Note if this block is interrupted: text and caches no longer match, so the engine cannot go on."""
        try:
            yield
        except BaseException:
            self._torn = True
            raise

    def _admit(self, awaited: bool = False, *, keep: bool = False) -> None:
        """Let waiting sequences into free slots, and read on in prompts, first come, first served.

        Short prompts need not wait for a long one: half of what is read may be theirs.
        """
        starved = bool(self.waiting) and not self.slots.can_take(self.waiting[0])
        fresh, changed = self.slots.fit(() if starved else self.waiting)
        if changed and self.walk is not None:
            self.walk = self._chosen_walk()  # where all that is left is greedy, trees are drawn in another way
            self.workspace.activate(self.slots.active())
        free, room = self.slots.free(), self._pace.room(awaited or any(self.slots.active()))
        reading = [slot for slot in self.slots.known if slot not in free]
        rows, new, passing = list[int](), list[int](), room // 2 if reading else 0
        while room > 0 and (reading or (self.waiting and free)):
            fitting = (one for one in self.waiting if free and (not reading or len(one.prompt) <= passing))
            first_come = next((one for one in fitting if not self.slots.awaits(one)), None)
            if first_come is not None and not self.slots.hold(free[0], first_come):
                first_come, free = None, []  # until others leave some memory
            if reading and first_come is None:
                slot = reading.pop(0)
                start = self.slots.known.pop(slot)
            elif first_come is None:
                break  # all that wait will find more once another prompt is read, or memory once another text ends
            else:
                self.waiting.remove(first_come)
                passing -= len(first_come.prompt)
                slot, start = self.slots.take(first_come, free)
                new.append(slot)
            sequence = self.slots[slot]
            assert sequence is not None
            length = min(len(sequence.tokens), start + room)
            room -= length - start
            self._pace.read(length - start)
            if length < len(sequence.tokens):
                self.slots.known[slot] = max(length, _LEAST_TEXT)
            rows.append(slot)
        if not rows:
            return
        rows += sorted(slot for slot in set(fresh).difference(rows) if self.slots[slot] is None)
        first = self.walk is None
        active = self.slots.active()
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and active[slot]:
                self.slots.noise.seat(slot, sequence.generator)
        # A slot without a sequence at work asks for nothing, whatever it was asked for last. Where rounds are captured it
        # draws if all others do: a batch of both kinds would be captured by itself.
        wanted = [sequence.row_params for slot, sequence in enumerate(self.slots) if sequence is not None and active[slot]]
        drawing = self.workspace.captures and all(own.temperature > 0 for own in wanted)
        idle = SamplingParams() if drawing else IDLE
        params = {
            slot: sequence.row_params if sequence is not None and active[slot] else idle
            for slot, sequence in enumerate(self.slots)
        }
        longest = max(sequence.end for sequence in self.slots.running())
        self._share()
        read = {slot: self.slots[slot] for slot in rows}
        wishes = {slot: own for slot, own in read.items() if own and own.prompt_top_logprobs is not None and own.is_fresh}
        unread = [slot for slot in new if slot in wishes]
        if not (keep or self.slots.recalls):
            unread = list(range(len(self.slots))) if first else new
        with self.stats.clock("prefill"), self._reading.running():
            self.workspace.begin(
                self.slots.texts(),
                longest,
                rows=range(len(self.slots)) if first else rows,
                unread=unread,
                keep=keep,
                params=self.workspace.params.replaced(params),
                wishes=wishes,
            )
            for slot in rows:
                if active[slot]:
                    self.slots.come_back(slot)
            self.workspace.activate(active)
            at_work = [one for one in self.slots if one is not None]
            self.workspace.begun.watched = any(one.traced or one.top_logprobs is not None for one in at_work)
        self.walk = self._chosen_walk()

    def _make_room(self) -> None:
        """Have memory for the next round: where there is too little, the youngest texts give theirs up."""
        while not self.slots.have_room(1):
            self._put_back()

    def _put_back(self) -> None:
        """Let the youngest text wait until there is memory for it up to its end."""
        self.waiting.appendleft(self.slots.put_back())
        self.workspace.retire(self.slots.texts(), self.slots.active())
        self.slots.rest()

    def _end_read(self) -> list[Emitted]:
        """End texts that ask for nothing after their prompts."""
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
        if isinstance(self._wish, Walk):
            return self._wish if self._wish.fits(self.session.scheme) else self.session.resolve_walk(AUTO)
        return self.session.resolve_walk(self._wish)

    def _launch(self) -> Launched:
        assert self.walk is not None, "a sequence was admitted"
        self._share()
        with self.stats.clock("draft"):
            count = self.workspace.num_uniforms(self.walk)
            uniforms_BU = self.slots.noise.uniforms(count, self.session.own_uniforms(count))
        workspace = self.workspace
        ahead = bool(self._launched)
        return workspace.launcher.launch(workspace.begun, workspace.contexts, self.walk, uniforms_BU, self.stats, ahead=ahead)

    def _share(self) -> None:
        """Tell the drafter how many texts are at work."""
        active = self.slots.active()
        load = sum(active)
        loads = [1 if one is None or one.steady or one.done else load for one in self.slots]
        steady = [one.steady if one is not None and works else None for one, works in zip(self.slots, active, strict=True)]
        self.session.share(loads, steady)

    def _runs_ahead(self, now: Launched) -> bool:
        """Whether to launch one more round: some sequence goes on after this one unless it meets an end that is no limit."""
        most = self.session.reach + 1
        goes_on = any(len(sequence.tokens) + most < sequence.end for sequence in self.slots.running())
        reads = any(slot not in self.slots.free() for slot in self.slots.known)
        if not goes_on or self.waiting or reads or self._retiring or not self.slots.have_room(2):
            return False
        return self.workspace.launcher.runs_ahead(self.workspace.begun, self.workspace.contexts, now)

    def _settle(self, outcome: list[RowOutcome], reports: list[list[int]]) -> list[Emitted]:
        """Give every running sequence what the round brought it, up to its end; let those that ended go."""
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
            counted = row.accepted, row.offered, row.longest, row.branch
            sequence.speculation.count(counted, row.drafted, why_none)
            self.stats.count(*counted)
            self.stats.saw_candidates(row.drafted, why_none)
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
        """End a sequence from outside (a criterion, a cancellation), keeping that many new tokens."""
        self.stats.drop(sequence.cut(reason, new_tokens))
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        with torch.inference_mode():
            self._release(kept=[slot for slot, one in enumerate(self.slots) if one is sequence and one.new_tokens])

    def _release(self, kept: Sequence[int] = ()) -> None:
        """Let ended sequences go; after the round ahead, if there is one whose tokens others still need."""
        with self.workspace.ownership.settled_by(self) as own:
            if not own or self.workspace.state is None:  # no sequence was admitted yet
                return
            if not self._torn:
                self.slots.keep(kept)
            if not any(self.slots.running()):
                self._launched.clear()  # rounds launched ahead of finished rows are discarded
            self._retiring = bool(self._launched)
            if not self._retiring:
                self.slots.vacate_ended()
                self.workspace.retire(self.slots.texts(), self.slots.active())
                while self._spoilt:
                    self.workspace.clear(self._spoilt.pop())
                self.slots.rest()

    def _failed(self, slot: int, sequence: TokenSequence, fault: Fault) -> Emitted:
        """End a sequence whose round failed; raise the failure unless sequences fail alone."""
        processing = self.workspace.begun.warper.processing
        raised = (processing.errors or {}).get(slot) if fault == Fault.TARGET else None
        if raised is not None and not self._isolate:
            raise raised
        error = self._failure(fault, len(sequence.tokens), raised, processing.emptied_by)
        if not self._isolate:
            raise error
        self.slots.vacate(slot)
        self._spoilt.append(slot)
        return sequence.fail(error)

    def _failure(self, fault: Fault, length: int, raised: Exception | None, emptied_by: str | None) -> PolydraftError:
        if fault == Fault.SCHEME:
            return FailureError(
                f"scheme {self.session.scheme.name!r} emitted no token after {length} tokens; please report this, and use "
                "another --scheme"
            )
        if isinstance(raised, PolydraftError):  # a grammar's, which says all
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
