"""What a server does with a request, whatever brings it: prompts to tokens, tokens to a ticket."""

import asyncio
import copy
import secrets
import threading
from typing import Any

from polydraft.drafters import Plain
from polydraft.engine import Decoder, TokenSequence
from polydraft.errors import UsageError
from polydraft.models import check_prompts
from polydraft.models.placement import is_shared
from polydraft.sampling import SamplingParams, check_params
from polydraft.sampling.categorical import row_generator, row_seed
from polydraft.sampling.grammar import Grammar, Grammars
from polydraft.serve.answers import Answer
from polydraft.serve.asked import Asked
from polydraft.serve.company import Company
from polydraft.serve.lane import LaneOptions
from polydraft.serve.metrics import Metrics
from polydraft.serve.options import ServeOptions
from polydraft.serve.problems import RequestError
from polydraft.serve.scheduler import Scheduler, drafting
from polydraft.serve.ticket import AUTO, OFF, Ticket
from polydraft.serve.token_texts import TokenTexts

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

    @property
    def drafts(self) -> bool:
        """Whether there is anything to draft with."""
        return not isinstance(self.decoder.drafter, Plain)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model."""
        if name is not None and name != self.model:
            message = f"model {name!r} is not served here; allowed: {self.model!r}, or leave it out"
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

    def tokens_of(self, asked: Asked) -> list[list[int]]:
        """Return the prompts as token ids."""
        with self._encoding:
            try:
                if asked.chat:
                    return [self._encoder.encode_chat(asked.messages)]
                return [self._encoder.encode(prompt) for prompt in asked.prompts]
            except UsageError as error:
                raise RequestError(str(error), param=_prompt(asked)) from None
            except Exception as error:  # templates are programs, and refuse what they do not like in ways of their own
                if not asked.chat:
                    raise
                message = f"the model's chat template refuses these messages ({error}); change their roles or order"
                raise RequestError(message, param="messages") from None

    def pieces_of(self, tokens: list[int]) -> list[str]:
        """Return the text of each token; in the event loop only."""
        return [self._token_texts(token)[0] for token in tokens]

    def _ticket(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> Ticket:
        prompts = self.tokens_of(asked)
        count, most = len(prompts) * asked.n, self.options.max_choices
        if count > most:
            raise RequestError(f"{count} texts in one request; allowed: at most {most} (n times prompts)", param="n")
        target = self.decoder.target
        try:
            check_prompts(prompts, None, target.vocab_size)
            check_params(asked.params, target.vocab_size)
        except UsageError as error:
            raise RequestError(str(error), param=_sampling_name(str(error)) or _prompt(asked)) from None
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

    def _limit(self, length: int, asked: Asked) -> int:
        """Return the most new tokens of a text, refusing what does not fit into a slot."""
        room = self.slot_tokens - length
        if room < 1 or (asked.max_new_tokens is not None and asked.max_new_tokens > room):
            new = "" if asked.max_new_tokens is None else f" and {asked.max_new_tokens} new ones"
            raise RequestError(
                f"a prompt of {length} tokens{new} does not fit into {self.slot_tokens}; shorten it, or ask for fewer",
                param=_prompt(asked),
                code="context_length_exceeded",
            )
        return room if asked.max_new_tokens is None else asked.max_new_tokens

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
            raise RequestError(str(error), param=name) from None

    def _sequence(self, prompt: list[int], limit: int, seed: int, asked: Asked, grammar: str | None) -> TokenSequence:
        params = asked.params
        if grammar is not None:
            assert self._grammars is not None
            params = params.following(self._grammars.processor(grammar, len(prompt)))
        # The likeliest token is the likeliest whatever was drafted; what a seed gives depends on the trees.
        steady = asked.seed is not None and asked.params.temperature > 0
        options: dict[str, Any] = {
            "steady": steady,
            "traced": asked.trace,
            "max_positions": self.slot_tokens,
            "top_logprobs": asked.top_logprobs,
        }
        return TokenSequence(
            prompt=prompt,
            params=params,
            generator=row_generator(seed),
            max_new_tokens=limit,
            eos_token_ids=frozenset(self.decoder.eos_token_ids),
            assembler=self.decoder.assembler(asked.stop),
            **options,
        )


def _prompt(asked: Asked) -> str:
    return "messages" if asked.chat else "prompt"


def _sampling_name(message: str) -> str | None:
    """Return which sampling parameter a message begins with."""
    return next((name for name in SamplingParams.__dataclass_fields__ if message.startswith(name)), None)
