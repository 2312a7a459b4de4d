"""From the tokens of a request to the objects that the API answers with, whole or in parts."""

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from polydraft.draft.policy import REST_REASON
from polydraft.engine import StopReason, TokenSequence
from polydraft.engine.sequence import TokenLogprob
from polydraft.engine.stats import TARGET
from polydraft.serve.protocol import Asked
from polydraft.serve.ticket import OFF, Progress, Ticket
from polydraft.serve.token_texts import TokenTexts

_FINISH = {StopReason.EOS: "stop", StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.CONTEXT: "length"}


class Answer:
    """The answer to one request.

    Parameters
    ----------
    asked : Asked
    ticket : Ticket
    model : str
        The name that clients know.
    token_texts : TokenTexts
    drafts : bool
        Whether the server drafts at all.
    """

    def __init__(self, asked: Asked, ticket: Ticket, *, model: str, token_texts: TokenTexts, drafts: bool) -> None:
        self._asked, self._ticket, self._token_texts, self._drafts = asked, ticket, token_texts, drafts
        kind = "chat.completion" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in ticket.sequences]

    def take(self, progress: Progress) -> None:
        """Take note of what a round brought."""
        self._logprobs[progress.index] += progress.emitted.logprobs

    @property
    def usage(self) -> dict[str, int]:
        """Tokens that were read and written."""
        sequences = self._ticket.sequences
        read = sum(len(sequence.prompt) for sequence in sequences[:: self._asked.n])
        written = sum(len(sequence.new_tokens) for sequence in sequences)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for index, sequence in enumerate(self._ticket.sequences):
            text = sequence.assembler.text
            body = {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
            logprobs = self._logprob_object(sequence.new_tokens, self._logprobs[index])
            choices.append({"index": index, **body, "logprobs": logprobs, **self._end(sequence)})
        return {**self._head, "choices": choices, "usage": self.usage}

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that begin a streamed answer."""
        if not self._asked.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": index, "delta": delta}) for index in range(len(self._ticket.sequences))]

    def chunk(self, progress: Progress) -> dict[str, Any]:
        """Return what a round brought, for a streamed answer."""
        emitted, sequence = progress.emitted, self._ticket.sequences[progress.index]
        text = "".join(emitted.pieces)
        choice: dict[str, Any] = {"index": progress.index}
        choice |= {"delta": {"content": text}} if self._asked.chat else {"text": text}
        choice["logprobs"] = self._logprob_object(emitted.token_ids, emitted.logprobs)
        if self._asked.trace:
            pairs = zip(emitted.pieces, emitted.sources, strict=True)
            choice["trace"] = {
                "tokens": [{"text": piece, "source": source} for piece, source in pairs],
                "drafted": emitted.drafted,
                "accepted": emitted.accepted,
                "tree": [[parent, None if token < 0 else self._token_texts(token)[0]] for parent, token in emitted.tree],
            }
        return self._chunk(choice | (self._end(sequence) if emitted.stop_reason is not None else {"finish_reason": None}))

    def closing(self) -> dict[str, Any]:
        """Return the chunk that tells how many tokens there were."""
        return {**self._chunk_head, "choices": [], "usage": self.usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._chunk_head, "choices": [{"finish_reason": None, **choice}], **usage}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._asked.chat else "text_completion"}

    def _end(self, sequence: TokenSequence) -> dict[str, Any]:
        assert sequence.stop_reason is not None
        return {"finish_reason": _FINISH.get(sequence.stop_reason, "stop"), "speculation": self._speculation(sequence)}

    def _speculation(self, sequence: TokenSequence) -> dict[str, Any]:
        """Say what drafting did for a text."""
        found = sequence.speculation
        return {
            "mean_acceptance_length": round(found.mean_acceptance_length, 4),
            "acceptance_histogram": [found.accepted[count] for count in range(max(found.accepted, default=-1) + 1)],
            "rounds": found.rounds,
            "drafted_tokens": found.drafted_tokens,
            "accepted_tokens": Counter(source for source in sequence.sources if source != TARGET),
            "resting_rounds": found.resting_rounds,
            "rested_because": self._reason(sequence) if found.resting_rounds else None,
        }

    def _reason(self, sequence: TokenSequence) -> str:
        if self._asked.speculative == OFF:
            return "the request turned speculation off"
        if not self._drafts:
            return "this server has no draft"
        return sequence.speculation.rested_because or REST_REASON

    def _logprob_object(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return log-probabilities as chats, or as completions, have them."""
        if self._asked.top_logprobs is None:
            return None
        if self._asked.chat:
            content = []
            for token, told in zip(tokens, logprobs, strict=True):
                top = [self._entry(*pair) for pair in told.top]
                content.append({**self._entry(token, told.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._token_texts(token)[0] for token in tokens],
            "token_logprobs": [told.logprob for told in logprobs],
            "top_logprobs": [self._by_text(told.top) for told in logprobs],
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by text, as completions have them: the likeliest speaks for tokens of equal text."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._token_texts(token)[0], value)
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, found = self._token_texts(token)
        return {"token": text, "logprob": logprob, "bytes": found}
