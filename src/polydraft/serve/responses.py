"""The JSON of answers: complete ones, chunks of streams, log-probabilities."""

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from polydraft.draft.policy import REST_REASON
from polydraft.engine import StopReason, TokenSequence
from polydraft.engine.logprobs import TokenLogprob
from polydraft.engine.stats import TARGET
from polydraft.ngrams.prediction import PREDICTION
from polydraft.serve.errors import error_object
from polydraft.serve.parsing import CALL, CONTENT, REASONING, Piece
from polydraft.serve.protocol import CompletionRequest
from polydraft.serve.request import OFF, Progress, Request
from polydraft.serve.token_texts import TokenTexts

_FINISH = {StopReason.EOS: "stop", StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.CONTEXT: "length"}


class ResponseBuilder:
    """Build the answer to one request.

    Parameters
    ----------
    wanted : CompletionRequest
    request : Request
    model : str
        The name that clients know.
    token_texts : TokenTexts
    drafts : bool
        Whether the server drafts at all.
    """

    last = b"data: [DONE]\n\n"
    """Ends a stream, after its events."""

    def __init__(
        self, wanted: CompletionRequest, request: Request, *, model: str, token_texts: TokenTexts, drafts: bool
    ) -> None:
        self._wanted, self._sequences, self._token_texts, self._drafts = wanted, request.sequences, token_texts, drafts
        kind = "chat.completion" if wanted.chat else "text_completion"
        prefix = "chatcmpl" if wanted.chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._sequences]
        self._parsers = request.parsers
        self._pieces: list[list[Piece]] = [[] for _ in self._sequences]
        """Pieces of each answer: of the last round for streams, of all rounds for complete answers."""
        self._offsets = [0] * len(self._sequences)
        """Characters of each text reported so far, for offsets beside log-probabilities."""
        self._unechoed = set(range(len(self._sequences))) if wanted.echo else set()
        """Texts whose prompts have not been echoed yet."""

    def add(self, progress: Progress) -> None:
        """Record an event."""
        self._logprobs[progress.index] += progress.emitted.logprobs
        if self._parsers:
            text, last = "".join(progress.emitted.pieces), progress.emitted.stop_reason is not None
            found = self._parsers[progress.index].add(text, last)
            self._pieces[progress.index] = found if self._wanted.stream else self._pieces[progress.index] + found

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers; a prompt counts once, even for several texts."""
        read = sum(len(sequence.prompt) for sequence in self._sequences[:: self._wanted.n])
        written = sum(len(sequence.new_tokens) for sequence in self._sequences)
        cached = sum(sequence.cached for sequence in self._sequences[:: self._wanted.n])
        found: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        found["prompt_tokens_details"] = {"cached_tokens": cached}
        if self._wanted.prediction is None:
            return found
        accepted = [sequence.sources.count(PREDICTION) for sequence in self._sequences]
        predicted = [len(sequence.params.predicted) for sequence in self._sequences]
        rejected = sum(max(most - count, 0) for most, count in zip(predicted, accepted, strict=True))
        details = {"accepted_prediction_tokens": sum(accepted), "rejected_prediction_tokens": rejected}
        return found | {"completion_tokens_details": details}

    def complete(self) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for index, sequence in enumerate(self._sequences):
            text, logprobs = self._reported(index, sequence.assembler.text, sequence.new_tokens, self._logprobs[index])
            parts = self._parts(index) if self._parsers else {"content": text}
            body = {"message": {"role": "assistant", "content": None, **parts}} if self._wanted.chat else {"text": text}
            choices.append({"index": index, **body, "logprobs": logprobs, **self._end(index)})
        return {**self._head, "choices": choices, "usage": self.usage}

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream."""
        if not self._wanted.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": index, "delta": delta}) for index in range(len(self._sequences))]

    def events(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events of a stream for what one round added."""
        emitted = progress.emitted
        text, logprobs = self._reported(progress.index, "".join(emitted.pieces), emitted.token_ids, emitted.logprobs)
        choice: dict[str, Any] = {"index": progress.index}
        delta = self._parts(progress.index) if self._parsers else {"content": text}
        choice |= {"delta": delta} if self._wanted.chat else {"text": text}
        choice["logprobs"] = logprobs
        if self._wanted.trace:
            pairs = zip(emitted.pieces, emitted.sources, strict=True)
            choice["trace"] = {
                "tokens": [{"text": piece, "source": source} for piece, source in pairs],
                "drafted": emitted.drafted,
                "accepted": emitted.accepted,
                "tree": [[parent, None if token < 0 else self._token_texts(token)[0]] for parent, token in emitted.tree],
            }
        return [self._chunk(choice | (self._end(progress.index) if emitted.stop_reason is not None else {}))]

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that end a stream."""
        return [{**self._chunk_head, "choices": [], "usage": self.usage}] if self._wanted.include_usage else []

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return the event that ends a failed stream."""
        return error_object(error)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._wanted.include_usage else {}
        return {**self._chunk_head, "choices": [{"finish_reason": None, **choice}], **usage}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._wanted.chat else "text_completion"}

    def _parts(self, index: int) -> dict[str, Any]:
        """Return the pieces of an answer in the API's format, for a message or a delta."""
        parts: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in self._pieces[index]:
            if piece.kind in (CONTENT, REASONING):
                parts[piece.kind] = parts.get(piece.kind, "") + piece.text
                continue
            call = calls.setdefault(piece.call, {"index": piece.call} if self._wanted.stream else {})
            if piece.kind == CALL:
                call |= {"id": call_id(), "type": "function", "function": {"name": piece.text, "arguments": ""}}
            else:
                function = call.setdefault("function", {"arguments": ""})
                function["arguments"] += piece.text
        return parts | ({"tool_calls": list(calls.values())} if calls else {})

    def _end(self, index: int) -> dict[str, Any]:
        sequence = self._sequences[index]
        assert sequence.stop_reason is not None
        reason = _FINISH.get(sequence.stop_reason, "stop")
        if reason == "stop" and self._parsers and self._parsers[index].calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "speculation": self._speculation(sequence)}

    def _speculation(self, sequence: TokenSequence) -> dict[str, Any]:
        """Return statistics of speculation for a sequence."""
        counts = sequence.speculation
        resting = counts.resting_passes if counts.candidates else counts.passes
        return {
            "mean_acceptance_length": round(counts.tokens_per_pass, 4),
            "acceptance_histogram": counts.acceptance_histogram,
            "rounds": counts.passes,
            "drafted_tokens": counts.candidates,
            "accepted_tokens": Counter(source for source in sequence.sources if source != TARGET),
            "resting_rounds": resting,
            "rested_because": self._rest_reason(sequence) if resting else None,
        }

    def _rest_reason(self, sequence: TokenSequence) -> str:
        if self._wanted.speculative == OFF:
            return "the request turned speculation off"
        if not self._drafts:
            return "this server has no draft"
        return sequence.speculation.rested_because or REST_REASON

    def _reported(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> tuple[str, dict[str, Any] | None]:
        """Return the new text and its log-probabilities, preceded by the prompt if it is still to be echoed."""
        if index in self._unechoed:
            self._unechoed.remove(index)
            sequence = self._sequences[index]
            sent = self._wanted.prompts[index // self._wanted.n]
            prompt = sent if isinstance(sent, str) else self._token_texts.decoded(sequence.prompt)
            # Tokens that the tokenizer puts before a text have negative offsets, which are reported as 0.
            self._offsets[index] = len(prompt) - sum(self._token_texts.length(token) for token in sequence.prompt)
            text, tokens = prompt + text, sequence.tokens[: len(sequence.prompt) + len(tokens)]
            logprobs = [None, *sequence.prompt_logprobs, *logprobs]
        return text, self._logprob_object(index, tokens, logprobs)

    def _logprob_object(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any] | None:
        """Return log-probabilities in the format of chats or of completions; None if they were not requested."""
        if self._wanted.top_logprobs is None:
            return None
        if self._wanted.chat:
            content = []
            for token, one in zip(tokens, logprobs, strict=True):
                assert one is not None, "chats do not echo prompts"
                top = [self._entry(*pair) for pair in one.top]
                content.append({**self._entry(token, one.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        lengths = [self._token_texts.length(token) for token in tokens]
        ends = list(accumulate(lengths, initial=self._offsets[index]))
        self._offsets[index] = ends.pop()
        return {
            "tokens": [self._token_texts(token)[0] for token in tokens],
            "token_logprobs": [None if one is None else one.logprob for one in logprobs],
            "top_logprobs": [None if one is None else self._by_text(one.top) for one in logprobs],
            "text_offset": [max(end, 0) for end in ends],
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by text, as in completions; of tokens with the same text, the likeliest counts."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._token_texts(token)[0], value)
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, found = self._token_texts(token)
        return {"token": text, "logprob": logprob, "bytes": found}


def call_id() -> str:
    """Return a new id of a call. It has nine characters, because Mistral's templates accept no other ids."""
    return secrets.token_hex(5)[:9]
