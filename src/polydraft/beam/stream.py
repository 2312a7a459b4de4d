"""Results of beams: scored texts with log-probabilities, and a stream of settled tokens."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polydraft.beam._node import Hypothesis, Node
from polydraft.beam._run import BeamRun
from polydraft.beam._slots import SlotTree
from polydraft.beam._workspace import BeamMemory
from polydraft.engine import Generation, Stats, StopReason, TokenEvent
from polydraft.engine.stats import TARGET
from polydraft.engine.text import TextAssembler
from polydraft.errors import FailureError
from polydraft.models import LanguageModel

_NODES_PER_PASS = 256
_NODES_PER_HEAD = 32
"""Most rows of logits in memory at a time."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """One finished text with its exact log-probabilities."""

    text: str
    """The text, cut before its stop string if one ended it."""
    token_ids: list[int]
    """New tokens, including the end token or the token that completed a stop string."""
    log_probs: list[float]
    """The target's own log-probability of each token, before temperature, truncation and penalties."""
    sources: list[str]
    stop_reason: StopReason
    score: float | None = None
    """Ranks beams: the sum of the tokens' scores, divided by the length to the power of the length penalty."""

    @property
    def log_prob(self) -> float:
        """The target's log-probability of the whole text."""
        return sum(self.log_probs)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "log_probs": self.log_probs,
            "log_prob": self.log_prob,
            "score": self.score,
            "sources": self.sources,
            "stop_reason": self.stop_reason.value,
        }


@dataclass(frozen=True, slots=True)
class BeamGeneration:
    """The finished texts of one prompt, best first."""

    texts: list[ScoredText]
    stats: Stats
    settings: dict[str, Any] = field(default_factory=dict)
    """The options used, including the seed."""

    @property
    def best(self) -> ScoredText:
        """The best text."""
        if not self.texts:
            raise FailureError("there is no text: decoding was cancelled before its first token")
        return self.texts[0]


@torch.inference_mode()
def text_log_probs(target: LanguageModel, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the target's log-probability of every token of texts that follow the same prompt, of at least one token.

    The prompt and common prefixes are read only once.
    """
    memory, root = BeamMemory(target, graphs=False), Node(prompt[-1])
    room = len(prompt) + sum(map(len, texts)) + 1
    memory.restart(room, room)
    memory.context.prefill([prompt[:-1]])
    tree = SlotTree(memory)
    paths = []
    for tokens in texts:
        path = [root]
        for token in tokens:
            path.append(path[-1].child(int(token)))
        paths.append(path)
    inner = list(dict.fromkeys(node for path in paths for node in path[:-1]))
    for start in range(0, len(inner), _NODES_PER_PASS):
        tree.read(inner[start : start + _NODES_PER_PASS])
    for start in range(0, len(inner), _NODES_PER_HEAD):
        nodes = inner[start : start + _NODES_PER_HEAD]
        log_probs_RV = target.head(tree.features(nodes)).float().log_softmax(-1)
        for row, node in enumerate(nodes):
            for child in node.children.values():
                child.log_prob = float(log_probs_RV[row, child.token])
    return [[node.log_prob for node in path[1:]] for path in paths]


def scored(target: LanguageModel, prompt: Sequence[int], generations: Sequence[Generation]) -> list[ScoredText]:
    """Return samples of one prompt with their log-probabilities, likeliest first."""
    log_probs = text_log_probs(target, prompt, [one.token_ids for one in generations])
    texts = [
        ScoredText(one.text, one.token_ids, values, one.sources, one.stop_reason)
        for one, values in zip(generations, log_probs, strict=True)
    ]
    return sorted(texts, key=lambda one: -one.log_prob)


class BeamStream(Iterator[TokenEvent]):
    """Yields the tokens of the best text, each once it is certain that no other text will win; `close` stops early.

    Running beams disagree about their latest tokens, so tokens come late, and the last ones all at once. None is taken back.
    """

    def __init__(
        self,
        run: BeamRun,
        tokenizer: Any,
        assembler: TextAssembler,
        settings: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> None:
        self.settings, self.stats = settings, run.stats
        self._run, self._tokenizer, self._assembler, self._cancel = run, tokenizer, assembler, cancel
        self._queue: deque[TokenEvent] = deque()
        self._sent = 0
        self._finished = False

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
        """Stop decoding; running beams count as finished."""
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
            return  # the rest of the text follows with its end
        for index, node in enumerate(path[self._sent :], start=self._sent):
            ends = last and index == len(path) - 1
            piece = "" if ends and reason == StopReason.EOS else self._assembler.add(node.token)
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
        """Return the finished texts; call it once the stream is exhausted."""
        return BeamGeneration([self._scored(one) for one in self._run.results()], self.stats, dict(self.settings))

    def _scored(self, one: Hypothesis) -> ScoredText:
        tokens, end = one.node.tokens(), one.node
        if one.reason == StopReason.EOS and end.parent is not None:  # the end-of-text token is not part of the text
            end = end.parent
        if self._run.ends.stops.any:
            text = self._run.ends.stops.text(end)
        else:
            text = "" if self._tokenizer is None else self._tokenizer.decode(end.tokens(), skip_special_tokens=True)
        log_probs = [node.log_prob for node in one.node.path()]
        return ScoredText(text, tokens, log_probs, self._sources(one.node), one.reason, one.score)
