"""What a server does with a request, whatever brings it: prompts to tokens, tokens to a ticket."""

import asyncio
import copy
import json
import secrets
import threading
from typing import Any

from polydraft.draft import Plain
from polydraft.engine import Decoder, TokenSequence
from polydraft.errors import UsageError, shown
from polydraft.models import check_prompts
from polydraft.models.placement import is_shared
from polydraft.sampling import SamplingParams, check_params
from polydraft.sampling.categorical import row_seed
from polydraft.sampling.grammar import Grammar, Grammars
from polydraft.serve.answers import Answer
from polydraft.serve.errors import RequestError
from polydraft.serve.followers import Company
from polydraft.serve.lane import LaneOptions
from polydraft.serve.metrics import Metrics
from polydraft.serve.options import ServeOptions
from polydraft.serve.protocol import Asked
from polydraft.serve.scheduler import Scheduler, drafting
from polydraft.serve.ticket import AUTO, OFF, Ticket
from polydraft.serve.token_texts import TokenTexts

_USUAL_CHARACTERS = 16
"""Per token, and more than texts have where it matters: a beginning of so many shows that a text is too long."""
_USUAL_PARAMS = (SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0))


class Service:
    """A decoder at the service of many.

    Parameters
    ----------
    decoder : Decoder
    options : ServeOptions
    """

    def __init__(self, decoder: Decoder, options: ServeOptions) -> None:
        if decoder.tokenizer is None:
            raise UsageError("a server needs a tokenizer; load the target with one")
        self.decoder, self.options = decoder, options
        self.model = options.model_name or decoder.target.name
        self.slot_tokens = min(options.slot_tokens, decoder.target.max_positions or options.slot_tokens)
        self.metrics = Metrics()
        lanes = LaneOptions(
            slots=options.slots,
            slot_tokens=self.slot_tokens,
            chunk_tokens=options.chunk_tokens,
            stall_seconds=None if is_shared() else options.stall_seconds,  # each process would measure its own
        )
        warm_up = decoder.target.device.type == "cuda" if options.warm_up is None else options.warm_up
        self.scheduler = Scheduler(
            decoder,
            lanes,
            other_slots=options.other_slots,
            own_trees=options.own_trees,
            max_queue=options.max_queue,
            observer=self.metrics.saw,
            warm_up=_USUAL_PARAMS if warm_up else (),
            company=Company(decoder) if is_shared() else None,
        )
        self.scheduler.reserve()
        self.metrics.watch(self.scheduler)
        # A tokenizer may not encode in one thread while it decodes in another: the engine's thread and the event loop have
        # theirs.
        self._encoder = Decoder(decoder.target, tokenizer=copy.deepcopy(decoder.tokenizer))
        self._encoding = threading.Lock()
        self._grammars: Grammars | None = None
        """Made when first asked for: that takes a second."""
        self._token_texts = TokenTexts(copy.deepcopy(decoder.tokenizer))
        self._counting = asyncio.Lock()
        self._counter: tuple[Decoder, TokenTexts] | None = None
        """One tokenizer more, for `tokenized`; made when first asked for."""

    @property
    def drafts(self) -> bool:
        """Whether there is anything to draft with."""
        return not isinstance(self.decoder.drafter, Plain)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model."""
        if name is not None and name != self.model:
            message = f"model {shown(name)} is not served here; allowed: {self.model!r}, or leave it out"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    async def submit(self, asked: Asked) -> tuple[Ticket, Answer]:
        """Take a request on."""
        self.check_model(asked.model)
        if asked.speculative not in (AUTO, OFF):
            if not self.options.own_trees:
                message = f"speculative tree {asked.speculative!r}: this server runs with --no-own-trees; allowed: auto, off"
                raise RequestError(message, param="speculative")
            try:
                drafting(self.decoder, asked.speculative)
            except UsageError as error:
                raise RequestError(f"speculative: {error}", param="speculative") from None
        ticket = await asyncio.to_thread(self._ticket, asked, asyncio.get_running_loop())
        self.scheduler.submit(ticket)
        answer = Answer(asked, ticket, model=self.model, token_texts=self._token_texts, drafts=self.drafts)
        return ticket, answer

    def leave(self, ticket: Ticket) -> None:
        """Let a request go whose client has left, or whose time is up."""
        self.scheduler.cancel(ticket)

    async def tokenized(self, asked: Asked) -> bytes:
        """Return a prompt's tokens with their texts as JSON, however many; one request at a time, in no other's way."""
        async with self._counting:
            return await asyncio.to_thread(self._tokenized, asked)

    def _tokenized(self, asked: Asked) -> bytes:
        if self._counter is None:
            with self._encoding:
                own = copy.deepcopy(self._encoder.tokenizer)
            self._counter = Decoder(self.decoder.target, tokenizer=own), TokenTexts(own)
        encoder, texts = self._counter
        if len(asked.prompts) > 1:
            raise RequestError("several prompts; allowed: one", param="prompt")
        prompts = self._tokens(encoder, asked)
        self._check_prompts(prompts, asked)
        (tokens,) = prompts
        found = {"tokens": tokens, "count": len(tokens), "pieces": [texts(token)[0] for token in tokens]}
        return json.dumps(found | {"max_model_len": self.slot_tokens}, ensure_ascii=False).encode()

    def _tokens(self, encoder: Decoder, asked: Asked, most: int | None = None) -> list[list[int]]:
        """Return the prompts as token ids, refusing those that are seen at their beginnings to have more than `most`."""
        try:
            texts = (
                [encoder.chat_text(asked.messages)] if asked.chat else [one for one in asked.prompts if isinstance(one, str)]
            )
            if most is not None and any(surely_exceeds(text, most, encoder.tokenizer) for text in texts):
                raise self._too_long(f"more than {most}", asked)
            return [encoder.encode_chat(texts[0])] if asked.chat else [encoder.encode(prompt) for prompt in asked.prompts]
        except RequestError:
            raise
        except UsageError as error:
            raise RequestError(str(error), param=_prompt(asked)) from None

    def _ticket(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> Ticket:
        count, most = (1 if asked.chat else len(asked.prompts)) * asked.n, self.options.max_choices
        if count > most:
            raise RequestError(f"{count} texts in one request; allowed: at most {most} (n times prompts)", param="n")
        with self._encoding:
            prompts = self._tokens(self._encoder, asked, self.slot_tokens)
        self._check_prompts(prompts, asked)
        if asked.grammar is not None and self.scheduler.company is not None:
            name = "response_format" if asked.grammar.kind.startswith("json") else asked.grammar.kind
            raise RequestError(f"{name} is not offered by a model that several processes share; leave it out", param=name)
        grammar = None if asked.grammar is None else self._compiled(asked.grammar)
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        texts = [prompt for prompt in prompts for _ in range(asked.n)]
        limits = {id(prompt): self._limit(len(prompt), asked) for prompt in prompts}
        return Ticket(
            [self._sequence(text, limits[id(text)], row_seed(seed, row), asked, grammar) for row, text in enumerate(texts)],
            asked.speculative,
            loop,
            constrained=grammar is not None,
        )

    def _check_prompts(self, prompts: list[list[int]], asked: Asked) -> None:
        vocab_size = self.decoder.target.vocab_size
        try:
            check_prompts(prompts, None, vocab_size)
            check_params(asked.params, vocab_size)
        except UsageError as error:
            raise RequestError(str(error), param=_sampling_name(str(error)) or _prompt(asked)) from None

    def _limit(self, length: int, asked: Asked) -> int:
        """Return the most new tokens of a text, refusing what does not fit into a slot."""
        room = self.slot_tokens - length
        if room < 1 or (asked.max_new_tokens is not None and asked.max_new_tokens > room):
            raise self._too_long(str(length), asked)
        return room if asked.max_new_tokens is None else asked.max_new_tokens

    def _too_long(self, length: str, asked: Asked) -> RequestError:
        new = "" if asked.max_new_tokens is None else f" and {asked.max_new_tokens} new ones"
        return RequestError(
            f"a prompt of {length} tokens{new} does not fit into {self.slot_tokens}; shorten it, or ask for fewer",
            param=_prompt(asked),
            code="context_length_exceeded",
        )

    def _compiled(self, wanted: Grammar) -> str:
        """Check a grammar."""
        try:
            with self._encoding:
                if self._grammars is None:
                    decoder = self.decoder
                    self._grammars = Grammars(self._encoder.tokenizer, decoder.target.vocab_size, decoder.eos_token_ids)
            return self._grammars.compiled(wanted)
        except UsageError as error:
            name = "response_format" if wanted.kind.startswith("json") else wanted.kind
            raise RequestError(str(error), param=name, reason=f"{name} cannot be used") from None

    def _sequence(self, prompt: list[int], limit: int, seed: int, asked: Asked, grammar: str | None) -> TokenSequence:
        processor = None if grammar is None or self._grammars is None else self._grammars.processor(grammar, len(prompt))
        return self.decoder.sequence(
            prompt,
            asked.params,
            seed=seed,
            seeded=asked.seed is not None,
            max_new_tokens=limit,
            stop=asked.stop,
            grammar=processor,
            max_positions=self.slot_tokens,
            traced=asked.trace,
            top_logprobs=asked.top_logprobs,
        )


def surely_exceeds(text: str, most: int, tokenizer: Any) -> bool:
    """Whether a text has many more tokens than allowed, as its beginnings show: to read all of a megabyte takes seconds.

    Where a text is cut, its last tokens may be others than in the whole: only twice as many as allowed are too many.
    """
    size = _USUAL_CHARACTERS * most
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > 2 * most:
            return True
        size *= 2
    return False


def _prompt(asked: Asked) -> str:
    return "messages" if asked.chat else "prompt"


def _sampling_name(message: str) -> str | None:
    """Return which sampling parameter a message begins with."""
    return next((name for name in SamplingParams.__dataclass_fields__ if message.startswith(name)), None)
