"""Tokens as they become certain."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from polydraft.engine.result import Generation, StopReason, TokenEvent
from polydraft.engine.run import Emitted, Run
from polydraft.engine.stats import Stats
from polydraft.engine.text import TextAssembler


class Stream(Iterator[TokenEvent]):
    """Tokens of a batch as they become certain; `close` or a `cancel` event ends it early."""

    def __init__(
        self, run: Run, assemblers: Sequence[TextAssembler], settings: dict[str, Any], cancel: threading.Event | None
    ) -> None:
        self.settings = settings
        self._run, self._assemblers, self._cancel = run, list(assemblers), cancel
        self._queue: deque[TokenEvent] = deque()

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._run.stats

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> TokenEvent:
        while not self._queue:
            if self._run.done:
                raise StopIteration
            if self._cancel is not None and self._cancel.is_set():
                self.close()
                raise StopIteration
            self._advance()
        return self._queue.popleft()

    def _advance(self) -> None:
        """Run one round and queue its tokens."""
        this_round = self._run.stats.rounds
        emitted = self._run.step()
        with self._run.undivided():
            self._queue_up(emitted, this_round)

    def _queue_up(self, tokens: Sequence[Emitted], this_round: int) -> None:
        for emitted in tokens:
            assembler = self._assemblers[emitted.row]
            last = len(emitted.token_ids) - 1
            before = len(self._run.sources[emitted.row]) - len(emitted.token_ids)
            for index, (token, source) in enumerate(zip(emitted.token_ids, emitted.sources, strict=True)):
                piece = assembler.add(token)
                reason = emitted.stop_reason if index == last else None
                if assembler.stopped and reason is not StopReason.EOS:
                    reason = StopReason.STOP
                    self._run.end_row(emitted.row, reason, before + index + 1)
                if reason:
                    piece += assembler.finish()
                self._queue.append(TokenEvent(emitted.row, token, piece, source, this_round, reason))
                if reason:
                    break

    def close(self) -> None:
        """Stop generating; what is there so far stays in `results()`."""
        for row, reason in enumerate(self._run.stop_reasons):
            if reason is None:
                self._run.end_row(row, StopReason.CANCELLED, len(self._run.sources[row]))
                self._assemblers[row].finish()

    def results(self) -> list[Generation]:
        """Return the texts so far, complete once the stream is exhausted."""
        run, settings = self._run, dict(self.settings)
        return [
            Generation(
                text=assembler.text,
                token_ids=run.new_tokens(row),
                sources=list(run.sources[row]),
                stop_reason=run.stop_reasons[row] or StopReason.CANCELLED,
                stats=run.stats,
                settings=settings,
            )
            for row, assembler in enumerate(self._assemblers)
        ]
