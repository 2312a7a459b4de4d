"""One batch from its prompts to its last token."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from polydraft.drafters import Drafter
from polydraft.engine.outstanding import Outstanding
from polydraft.engine.result import StopReason
from polydraft.engine.stats import TARGET, Stats
from polydraft.engine.workspace import Workspace, device_failure
from polydraft.errors import FailureError
from polydraft.models import LanguageModel
from polydraft.sampling import Noise
from polydraft.walks import Fault, Walk

_DEVICE_ERRORS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_NUMBERS = 5
"""Of a verdict that the host wants beside its tokens."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """New tokens of one row from one round."""

    row: int
    token_ids: list[int]
    sources: list[str]
    stop_reason: StopReason | None


class Run:
    """Generate for a batch, one round at a time.

    A round is a function of the workspace's tensors; the host sees its outcome once, at the end, and does the book-keeping:
    ends of text, limits, statistics. Rows that are done idle along.

    Where the workspace allows it the next round is launched before the host looks at the last one's outcome, so that the
    device never waits for the host (docs/decisions/017-rounds-run-ahead-by-one.md). The texts are the same; only the
    generators, which belong to the run, may have been asked for one round more than was used.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        drafter: Drafter,
        workspace: Workspace,
        walk: Walk,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        max_new_tokens: Sequence[int],
        eos_token_ids: frozenset[int],
        keep: bool = False,
    ) -> None:
        self.target, self.drafter, self.walk = target, drafter, walk
        self.texts = [list(prompt) for prompt in prompts]
        self.sources: list[list[str]] = [[] for _ in prompts]
        """Where each new token came from."""
        self.stats = Stats()
        self._started = time.perf_counter()
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._eos, self._device = eos_token_ids, target.device
        self._ends = [
            _end(len(prompt), limit, target.max_positions) for prompt, limit in zip(prompts, max_new_tokens, strict=True)
        ]
        self._longest = max(end for end, _ in self._ends)
        self._noise = Noise(generators, self._device)
        self._session = workspace.session
        self._workspace = workspace
        self.stop_reasons: list[StopReason | None] = [None] * len(prompts)
        self._launched: list[Outstanding] = []
        """Rounds whose outcomes are not known yet: between steps the one ahead, if there is one."""
        self._retiring = False
        """Whether rows have ended that the round ahead still takes for active ones."""
        self._torn = False
        """Whether a round broke off half-way, so that nobody knows how far the memories got."""
        taken = workspace.ownership.taken_by(self)
        with taken, torch.inference_mode(), self.stats.clock("prefill"), _device_errors():
            workspace.begin(self.texts, self._longest, keep)

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
        with self._workspace.ownership.held_by(self), _device_errors():
            if self._torn:
                raise FailureError(
                    "a round of this text was interrupted, and nobody knows how far it got; start the request again"
                )
            depth, was_ahead = self._session.depth, bool(self._launched)
            with self.undivided():
                if not self._launched:
                    self._launched.append(self._launch())
                now = self._launched[0]
                if len(self._launched) == 1 and self._runs_ahead(now):
                    self._launched.append(self._launch())
            with self.stats.clock("verify"):
                outcome = now.wait()  # an interruption here loses no round
            with self.undivided():
                del self._launched[0]
                self.stats.replayed_rounds += now.replayed
                self.stats.rounds_ahead += was_ahead
                return self._take(outcome, depth)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Take note if what is done here breaks off half-way, which leaves text and memory apart: there is no going on."""
        try:
            yield
        except BaseException:
            self._torn = True
            raise

    def _take(self, outcome: list[list[int]], depth: int) -> list[Emitted]:
        """Settle a round whose outcome has arrived."""
        told = depth + 1 + _NUMBERS
        if len(outcome[0]) > told:
            self._session.receive([values[told:] for values in outcome])
        emitted = [
            self._settle_row(row, values[: depth + 1], *values[depth + 1 : told])
            for row, values in enumerate(outcome)
            if self.stop_reasons[row] is None
        ]
        self._settle(emitted)
        return emitted

    def _launch(self) -> Outstanding:
        with self.stats.clock("draft"):
            uniforms_BU = self._noise.uniforms(self._workspace.num_uniforms(self.walk))
        return self._workspace.round(self.walk, uniforms_BU, self.stats)

    def _runs_ahead(self, now: Outstanding) -> bool:
        """Whether to launch one more round, because a row goes on after this one unless it meets an end that is not a limit."""
        most = self._session.depth + 1
        goes_on = any(
            reason is None and len(text) + most < end
            for reason, text, (end, _) in zip(self.stop_reasons, self.texts, self._ends, strict=True)
        )
        return goes_on and not self._retiring and self._workspace.runs_ahead(now)

    def _settle_row(self, row: int, tokens: list[int], accepted: int, offered: int, fault: int, *shape: int) -> Emitted:
        """Take what one row got, up to its end."""
        if fault == Fault.SCHEME:
            raise FailureError(
                f"scheme {self._session.scheme.name!r} emitted no token after {len(self.texts[row])} tokens; please report "
                "this, and use another --scheme"
            )
        warper = self._workspace.warper
        if fault == Fault.TARGET and warper is not None and warper.emptied_by is not None:
            raise FailureError(
                f"logits processor {warper.emptied_by!r} left no token to go on with after {len(self.texts[row])} tokens; "
                "leave at least one with a finite score"
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
        self._workspace.settle(self.texts, by_row)
        if self._retiring or any(item.stop_reason for item in emitted):
            self._retire()
        self.stats.total_seconds = time.perf_counter() - self._started

    @torch.inference_mode()
    def end_row(self, row: int, reason: StopReason, new_tokens: int) -> None:
        """End a row from outside (a stop string, a criterion, a cancellation), keeping that many new tokens."""
        self.stats.drop(self.sources[row][new_tokens:])
        del self.texts[row][self._prompt_lengths[row] + new_tokens :]
        del self.sources[row][new_tokens:]
        self.stop_reasons[row] = reason
        self._retire()

    def _retire(self) -> None:
        """Let ended rows idle, unless a round is at work whose tokens other rows still want: then after it."""
        with self._workspace.ownership.settled_by(self) as own:
            if not own:
                return
            if self.done:
                self._launched.clear()  # what runs, runs in vain; the device cuts the memories behind it
            self._retiring = bool(self._launched)
            if not self._retiring:
                self._workspace.retire(self.texts, [reason is None for reason in self.stop_reasons])


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except _DEVICE_ERRORS as error:
        raise device_failure(error) from error


def _end(prompt_length: int, max_new_tokens: int, max_positions: int | None) -> tuple[int, StopReason]:
    """Return the length at which a text ends, and what that end is called."""
    if max_positions is not None and prompt_length + max_new_tokens > max_positions:
        return max_positions, StopReason.CONTEXT
    return prompt_length + max_new_tokens, StopReason.LENGTH
