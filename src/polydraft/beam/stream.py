"""Beams as they settle: tokens that every text shares which can still come out first."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from polydraft.beam.node import Node
from polydraft.beam.pool import Hypothesis
from polydraft.beam.result import BeamGeneration, ScoredText
from polydraft.beam.run import BeamRun
from polydraft.engine import Stats, StopReason, TokenEvent
from polydraft.engine.stats import TARGET
from polydraft.engine.text import TextAssembler


class BeamStream(Iterator[TokenEvent]):
    """Tokens of the best text as soon as no other text can take their place; `close` ends it early.

    Beams disagree about their latest tokens, so these come late, and at the end all at once. Nothing that was given out is ever
    taken back.
    """

    def __init__(
        self,
        run: BeamRun,
        tokenizer: Any,
        assembler: TextAssembler,
        settings: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> None:
        self.settings = settings
        self._run, self._tokenizer, self._assembler, self._cancel = run, tokenizer, assembler, cancel
        self._queue: deque[TokenEvent] = deque()
        self._sent = 0
        self._finished = False

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._run.stats

    def __iter__(self) -> "BeamStream":
        return self

    def __next__(self) -> TokenEvent:
        while not self._queue:
            if self._finished:
                raise StopIteration
            if self._cancel is not None and self._cancel.is_set():
                self._run.cancel()
            if self._run.done:
                self._finish()
            else:
                self._run.step()
                self._send(self._run.settled(), last=False, reason=None)
        return self._queue.popleft()

    def close(self) -> None:
        """Stop; what the beams have so far counts as finished."""
        self._run.cancel()
        self._finish()

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        found = self._run.results()
        if found:
            self._send(found[0].node.path(), last=True, reason=found[0].reason)
            self.stats.keep(self._sources(found[0].node))

    def _send(self, path: list[Node], *, last: bool, reason: StopReason | None) -> None:
        if self._run.done and not last:
            return  # the whole text follows at once, with its end
        for index, node in enumerate(path[self._sent :], start=self._sent):
            piece = self._assembler.add(node.token)
            ends = last and index == len(path) - 1
            if ends:
                piece += self._assembler.finish()
            self._queue.append(
                TokenEvent(0, node.token, piece, self._source(node), self._run.pass_of_step[index], reason if ends else None)
            )
        self._sent = max(self._sent, len(path))

    def _source(self, node: Node) -> str:
        return self._run.draft_name if node.drafted and self._run.draft_name is not None else TARGET

    def _sources(self, leaf: Node) -> list[str]:
        return [self._source(node) for node in leaf.path()]

    def result(self) -> BeamGeneration:
        """Return the finished texts, once the stream is exhausted."""
        return BeamGeneration([self._scored(one) for one in self._run.results()], self.stats, dict(self.settings))

    def _scored(self, one: Hypothesis) -> ScoredText:
        tokens = one.node.tokens()
        if self._run.stops.any:
            text = self._run.stops.text(one.node)
        else:
            text = "" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        log_probs = [node.log_prob for node in one.node.path()]
        return ScoredText(text, tokens, log_probs, self._sources(one.node), one.reason, one.score)
