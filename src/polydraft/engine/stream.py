"""Tokens of a batch, as rounds emit them."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from polydraft.engine.loop import Engine
from polydraft.engine.sequence import Generation, StopReason, TokenEvent, TokenSequence
from polydraft.engine.stats import Stats


class Stream(Iterator[TokenEvent]):
    """Iterates over the tokens of a batch as rounds emit them; `close` or a `cancel` event ends it early."""

    def __init__(
        self, engine: Engine, sequences: Sequence[TokenSequence], settings: dict[str, Any], cancel: threading.Event | None
    ) -> None:
        self.settings, self.stats = settings, engine.stats
        self.engine, self._sequences, self._cancel = engine, list(sequences), cancel
        self._queue: deque[TokenEvent] = deque()

    def __next__(self) -> TokenEvent:
        while not self._queue:
            if self.engine.done:
                raise StopIteration
            if self._cancel is not None and self._cancel.is_set():
                self.close()
                raise StopIteration
            self._advance()
        return self._queue.popleft()

    def _advance(self) -> None:
        """Run one round and queue its tokens."""
        this_round = self.stats.rounds
        emitted = self.engine.step()
        with self.engine.undivided():
            for one in emitted:
                last = len(one.token_ids) - 1
                for index, token in enumerate(one.token_ids):
                    reason = one.stop_reason if index == last else None
                    self._queue.append(TokenEvent(one.row, token, one.pieces[index], one.sources[index], this_round, reason))

    def close(self) -> None:
        """Stop generating; `results()` keeps the texts so far."""
        for sequence in self._sequences:
            if not sequence.done:
                self.engine.end(sequence, StopReason.CANCELLED, len(sequence.sources))

    @property
    def speculations(self) -> list[Stats]:
        """What drafting did for each text so far."""
        return [sequence.speculation for sequence in self._sequences]

    def results(self) -> list[Generation]:
        """Return the texts so far, complete once the stream is exhausted."""
        return [
            Generation(
                text=sequence.assembler.text,
                token_ids=sequence.new_tokens,
                sources=list(sequence.sources),
                stop_reason=sequence.stop_reason or StopReason.CANCELLED,
                stats=self.stats,
                settings=dict(self.settings),
            )
            for sequence in self._sequences
        ]
