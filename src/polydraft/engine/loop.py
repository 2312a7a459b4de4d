"""The one loop: sequences in slots, round after round, until every text has ended."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from polydraft.drafters import Drafter, DraftSession
from polydraft.engine.graphs import Launched
from polydraft.engine.round import RowOutcome
from polydraft.engine.sequence import Emitted, StopReason, TokenSequence
from polydraft.engine.stats import TARGET, Stats
from polydraft.engine.workspace import Workspace, device_failure
from polydraft.errors import FailureError
from polydraft.models import LanguageModel
from polydraft.sampling import IDLE, Noise
from polydraft.walks import AUTO, Fault, Walk

_DEVICE_ERRORS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_NO_TEXT = [0]
"""Stands for the text of an empty slot."""


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
    target : LanguageModel
    drafter : Drafter
    workspace : Workspace
        Its rows are the slots.
    walk : str or Walk
        In which order trees are verified; ``"auto"`` for what suits the drafter. A walk of your own counts where it fits.
    sequences : sequence of TokenSequence
        To begin with; more come by `add`.
    keep : bool
        Reuse what the workspace holds of the first sequences' texts.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        drafter: Drafter,
        workspace: Workspace,
        walk: str | Walk = AUTO,
        sequences: Sequence[TokenSequence] = (),
        keep: bool = False,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.slots: list[TokenSequence | None] = [None] * len(workspace.params)
        self.waiting: deque[TokenSequence] = deque(sequences)
        self.stats = Stats()
        self._started = time.perf_counter()
        self._wish = walk
        self._walk: Walk | None = None
        self._noise = Noise([torch.Generator() for _ in self.slots], target.device)
        self._session, self._workspace = workspace.session, workspace
        self._launched: list[Launched] = []
        """Rounds whose outcomes are not known yet: between steps the one ahead, if there is one."""
        self._retiring = False
        """Whether sequences have ended that the round ahead still takes for active ones."""
        self._torn = False
        """Whether a round broke off half-way, so that nobody knows how far the memories got."""
        with workspace.ownership.taken_by(self), torch.inference_mode(), _device_errors():
            self._admit(keep)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.waiting and not any(self._running())

    @property
    def session(self) -> DraftSession:
        """Who drafts."""
        return self._session

    @property
    def walk_name(self) -> str | None:
        """Who verifies, once somebody was admitted."""
        return None if self._walk is None else self._walk.name

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a free slot."""
        self.waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Run one round and return the new tokens of every sequence that took part."""
        with self._workspace.ownership.held_by(self), _device_errors():
            if self._torn:
                raise FailureError(
                    "a round of this text was interrupted, and nobody knows how far it got; start the request again"
                )
            was_ahead = bool(self._launched)
            with self.undivided():
                if not self._launched:
                    self._admit()
                    self._launched.append(self._launch())
                now = self._launched[0]
                if len(self._launched) == 1 and self._runs_ahead(now):
                    self._launched.append(self._launch())
            with self.stats.clock("verify"):
                outcome, reports = now.wait()  # an interruption here loses no round
            with self.undivided():
                del self._launched[0]
                self.stats.replayed_rounds += now.replayed
                self.stats.rounds_ahead += was_ahead
                return self._settle(outcome, reports)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Take note if what is done here breaks off half-way, which leaves text and memory apart: there is no going on."""
        try:
            yield
        except BaseException:
            self._torn = True
            raise

    def _running(self) -> Iterator[TokenSequence]:
        return (sequence for sequence in self.slots if sequence is not None and not sequence.done)

    def _texts(self) -> list[Sequence[int]]:
        return [_NO_TEXT if sequence is None else sequence.tokens for sequence in self.slots]

    def _admit(self, keep: bool = False) -> None:
        """Let waiting sequences into free slots, and have their prompts read."""
        free = [slot for slot, sequence in enumerate(self.slots) if sequence is None or sequence.done]
        admitted = {slot: self.waiting.popleft() for slot in free[: len(self.waiting)]}
        if not admitted:
            return
        for slot, sequence in admitted.items():
            self.slots[slot] = sequence
            self._noise.generators[slot] = sequence.generator
        first = self._walk is None
        rows = range(len(self.slots)) if first else list(admitted)
        # A slot without a running sequence asks for nothing, whatever it was asked for last.
        idle = {slot: IDLE for slot in free if slot not in admitted}
        params = self._workspace.params.replaced(idle | {slot: sequence.params for slot, sequence in admitted.items()})
        longest = max(sequence.end for sequence in self._running())
        with self.stats.clock("prefill"):
            self._workspace.begin(self._texts(), longest, keep, rows, params)
            self._workspace.activate([sequence is not None and not sequence.done for sequence in self.slots])
        self._walk = self._chosen_walk()

    def _chosen_walk(self) -> Walk:
        if isinstance(self._wish, Walk):
            return self._wish if self._wish.fits(self._session.scheme) else self._session.resolve_walk(AUTO)
        return self._session.resolve_walk(self._wish)

    def _launch(self) -> Launched:
        assert self._walk is not None, "somebody was admitted"
        with self.stats.clock("draft"):
            uniforms_BU = self._noise.uniforms(self._workspace.num_uniforms(self._walk))
        return self._workspace.launch(self._walk, uniforms_BU, self.stats)

    def _runs_ahead(self, now: Launched) -> bool:
        """Whether to launch one more round: some sequence goes on after this one unless it meets an end that is no limit."""
        most = self._session.depth + 1
        goes_on = any(len(sequence.tokens) + most < sequence.end for sequence in self._running())
        return goes_on and not self.waiting and not self._retiring and self._workspace.runs_ahead(now)

    def _settle(self, outcome: list[RowOutcome], reports: list[list[int]]) -> list[Emitted]:
        """Give every running sequence what the round brought it, up to its end; let those that ended go."""
        running = [sequence is not None and not sequence.done for sequence in self.slots]
        accepted = [row.tokens[:-1] if runs else [] for row, runs in zip(outcome, running, strict=True)]
        sources = self._session.receive(reports, accepted)
        by_slot: list[list[int]] = [[] for _ in self.slots]
        emitted: list[Emitted] = []
        for slot, (sequence, row) in enumerate(zip(self.slots, outcome, strict=True)):
            if sequence is None or sequence.done:
                continue
            if row.fault:
                raise self._failure(Fault(row.fault), sequence)
            one = sequence.take(row.tokens, [*sources[slot], TARGET])
            self.stats.count(row.accepted, row.offered, row.longest, row.branch)
            self.stats.keep(one.sources)
            by_slot[slot] = one.token_ids
            emitted.append(one)
        self.stats.rounds += 1
        self._workspace.settle(self._texts(), by_slot)
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
            self._release()

    def _release(self) -> None:
        """Let ended sequences go, unless a round is at work whose tokens others still want: then after it."""
        with self._workspace.ownership.settled_by(self) as own:
            if not own:
                return
            if not any(self._running()):
                self._launched.clear()  # what runs, runs in vain; the device cuts the memories behind it
            self._retiring = bool(self._launched)
            if not self._retiring:
                active = [sequence is not None and not sequence.done for sequence in self.slots]
                self._workspace.retire(self._texts(), active)

    def _failure(self, fault: Fault, sequence: TokenSequence) -> FailureError:
        length = len(sequence.tokens)
        if fault == Fault.SCHEME:
            return FailureError(
                f"scheme {self._session.scheme.name!r} emitted no token after {length} tokens; please report this, and use "
                "another --scheme"
            )
        state = self._workspace.state
        if fault == Fault.TARGET and state is not None and state.warper.emptied_by is not None:
            return FailureError(
                f"logits processor {state.warper.emptied_by!r} left no token to go on with after {length} tokens; "
                "leave at least one with a finite score"
            )
        who = f"the target {self.target.name!r}" if fault == Fault.TARGET else "the draft"
        return FailureError(
            f"{who} returned logits that are not numbers after {length} tokens; try dtype float32, or check the weights"
        )


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except _DEVICE_ERRORS as error:
        raise device_failure(error) from error
