"""Turn checked requests into sequences in the scheduler."""

import asyncio
import copy
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polydraft.devices import captures
from polydraft.draft import Plain
from polydraft.draft.predicted import with_prediction
from polydraft.engine import Decoder
from polydraft.errors import UsageError, shown
from polydraft.models import check_prompts
from polydraft.models.placement import is_follower, is_shared
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import SamplingParams, check_params
from polydraft.sampling.categorical import row_seed
from polydraft.sampling.grammar import Grammar, Grammars
from polydraft.serve.errors import RequestError, from_library, unsupported
from polydraft.serve.forms import ChatForms, marker_tokens
from polydraft.serve.lane import LaneOptions, with_speculation
from polydraft.serve.memory import fitting_pool, fitting_prefixes, fitting_tokens
from polydraft.serve.metrics import Metrics
from polydraft.serve.options import ServeOptions
from polydraft.serve.parsing import Parser
from polydraft.serve.protocol import CompletionRequest, sampling_name
from polydraft.serve.request import AUTO, OFF, Lockstep, Request
from polydraft.serve.responses import ResponseBuilder
from polydraft.serve.scheduler import Scheduler
from polydraft.serve.token_texts import TokenTexts
from polydraft.serve.tools import grammar_of, parser_of

_USUAL_CHARACTERS = 16
"""More characters per token than real texts have: reading this many per allowed token shows whether a text is too long."""
_USUAL_PARAMS = (SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0))

Builds = Callable[..., ResponseBuilder]


class Service:
    """A decoder, a scheduler and tokenizers behind one model name."""

    def __init__(self, decoder: Decoder, options: ServeOptions) -> None:
        if decoder.tokenizer is None:
            raise UsageError("a server needs a tokenizer; load the target with one")
        self.decoder, self.options = decoder, options
        self.model = options.model_name or decoder.target.name
        self.names = tuple(dict.fromkeys((self.model, *options.model_alias)))
        """Names by which clients may ask for the model; answers use the first."""
        pool = fitting_pool(decoder.target.device, options.cache_gb)
        slots = options.slots + (options.other_slots or options.slots)
        slot_tokens = options.slot_tokens or fitting_tokens(decoder, slots, pool)
        self.slot_tokens = min(slot_tokens, decoder.target.max_positions or slot_tokens)
        self.metrics = Metrics(self.model)
        lanes = LaneOptions(
            slots=options.slots,
            slot_tokens=self.slot_tokens,
            chunk_tokens=options.chunk_tokens,
            stall_seconds=None if is_shared() else options.stall_seconds,  # each process would measure another time
        )
        prefixes = None if options.prefix_gb == 0 else Prefixes(int((options.prefix_gb or 0) * 1e9))
        warm_up = captures(decoder.target.device) if options.warm_up is None else options.warm_up
        self.scheduler = Scheduler(
            decoder,
            lanes,
            other_slots=options.other_slots,
            own_trees=options.own_trees,
            max_queue=options.max_queue,
            observer=self.metrics.observe,
            warm_up=_USUAL_PARAMS if warm_up else (),
            lockstep=Lockstep(decoder, leads=not is_follower()) if is_shared() else None,
            prefixes=prefixes,
            pool=pool,
        )
        self.scheduler.reserve()
        if prefixes is not None and options.prefix_gb is None:
            prefixes.most = fitting_prefixes(decoder.target.device)  # slots have their memory by now
        self.metrics.watch(self.scheduler)
        # Tokenizers are not thread-safe: the engine's thread, the event loop and the encoding threads each have their own.
        self._encoder = Decoder(decoder.target, tokenizer=copy.deepcopy(decoder.tokenizer))
        self._encoding = threading.Lock()
        self._forms = ChatForms.of(decoder.tokenizer)
        self._markers = marker_tokens(decoder.tokenizer, self._forms, decoder.eos_token_ids)
        self._grammars: Grammars | None = None
        """Built at the first request for a grammar; it takes a second."""
        self._token_texts = TokenTexts(copy.deepcopy(decoder.tokenizer))
        self._tokenizing = asyncio.Lock()
        self._counter: tuple[Decoder, TokenTexts] | None = None
        """Encoder and texts of `tokenize`, whose tokenizer is copied at the first request."""

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model."""
        if name is not None and name not in self.names:
            raise RequestError("model_not_found", param="model", name=shown(name), served=", ".join(map(repr, self.names)))

    async def submit(
        self, wanted: CompletionRequest, build: Builds = ResponseBuilder, key: str = "", address: str = ""
    ) -> tuple[Request, ResponseBuilder]:
        """Queue a request, and return it with the builder of its answer.

        Beginnings of texts are shared only among requests with the same API key. Without keys, addresses take turns for slots.
        """
        self.check_model(wanted.model)
        self._check_tree(wanted.speculative)
        space = json.dumps(["" if self.options.share_prefixes else key, wanted.cache_salt])
        request = await asyncio.to_thread(self.prepare, wanted, asyncio.get_running_loop(), space)
        request.client = key or address
        self.scheduler.submit(request)
        drafts = not isinstance(self.decoder.drafter, Plain)
        return request, build(wanted, request, model=self.model, token_texts=self._token_texts, drafts=drafts)

    def _check_tree(self, speculative: str) -> None:
        if speculative in (AUTO, OFF):
            return
        if not self.options.own_trees:
            where = "by a server that runs with --no-own-trees"
            raise RequestError("unsupported_parameter", param="speculative", name="speculative.tree", where=where)
        try:
            with_speculation(self.decoder, speculative)
        except UsageError as error:
            raise from_library(error, "speculative") from None

    async def tokenize(self, wanted: CompletionRequest) -> bytes:
        """Return the tokens of one prompt of any length, and their texts, as JSON.

        Such requests run one at a time, with a tokenizer of their own, so that long texts delay no completion.
        """
        self.check_model(wanted.model)
        async with self._tokenizing:
            return await asyncio.to_thread(self._tokenize, wanted)

    def _tokenize(self, wanted: CompletionRequest) -> bytes:
        if self._counter is None:
            with self._encoding:
                own = copy.deepcopy(self._encoder.tokenizer)
            self._counter = Decoder(self.decoder.target, tokenizer=own), TokenTexts(own)
        encoder, texts = self._counter
        if len(wanted.prompts) > 1:
            raise RequestError("too_many_texts", param="prompt", count=len(wanted.prompts), most=1)
        prompts = self._tokens(encoder, wanted)
        self._check_prompts(prompts, wanted)
        (tokens,) = prompts
        answer = {"tokens": tokens, "count": len(tokens), "pieces": [texts(token)[0] for token in tokens]}
        return json.dumps(answer | {"max_model_len": self.slot_tokens}, ensure_ascii=False).encode()

    def _tokens(self, encoder: Decoder, wanted: CompletionRequest, most: int | None = None) -> list[list[int]]:
        """Return the prompts as token ids; refuse a prompt whose beginning already has far more than `most` tokens."""
        try:
            prompts = [self._chat_text(encoder, wanted)] if wanted.chat else wanted.prompts
            texts = [prompt for prompt in prompts if isinstance(prompt, str)]
            if most is not None and any(surely_exceeds(text, most, encoder.tokenizer) for text in texts):
                raise self._too_long(f"more than {most}", wanted)
            return [encoder.encode_chat(text) for text in texts] if wanted.chat else list(map(encoder.encode, prompts))
        except UsageError as error:
            raise from_library(error, wanted.prompt_name) from None

    def _chat_text(self, encoder: Decoder, wanted: CompletionRequest) -> str:
        """Return the text of a conversation, with its tools."""
        if wanted.tools is None:
            return encoder.chat_text(wanted.messages)
        text = encoder.chat_text(wanted.messages, wanted.tools.rendered)
        if not wanted.tools.forced:
            if text == encoder.chat_text(wanted.messages):
                raise RequestError("tools_unknown", param="tools", why="does not mention tools")
            if self._forms.form is None and self._forms.template is None:
                raise RequestError("tools_unknown", param="tools", why="has calls of an unknown form")
        return text

    def _parsers(self, wanted: CompletionRequest) -> tuple[list[Parser], Grammar | None]:
        """Return a parser for each text of a chat, and the grammar of forced calls."""
        tools = wanted.tools
        only_content = tools is None and self._forms.template is None and self._forms.thought is None
        if not wanted.chat or wanted.grammar is not None or only_content:
            return [], None
        with self._encoding:
            prompt = self._encoder.chat_text(wanted.messages, tools.rendered if tools else None)
            tokens = self._encoder.tokenizer.added_tokens_encoder
        parsers = [parser_of(self._forms, tools, prompt) for _ in range(wanted.n)]
        return parsers, grammar_of(self._forms, tools, prompt, tokens) if tools and tools.forced else None

    def prepare(self, wanted: CompletionRequest, loop: asyncio.AbstractEventLoop, space: str = "") -> Request:
        """Tokenize the prompts of a request, check them against the model, and make its sequences."""
        if wanted.num_texts > self.options.max_choices:
            raise RequestError("too_many_texts", param="n", count=wanted.num_texts, most=self.options.max_choices)
        with self._encoding:
            prompts = self._tokens(self._encoder, wanted, self.slot_tokens)
        self._check_prompts(prompts, wanted)
        parsers, forced = self._parsers(wanted)
        asked = wanted.grammar or forced
        grammar = None if asked is None else self._compiled(asked, "tools" if forced else None)
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed
        wanted = replace(wanted, params=self._with_prediction(wanted))
        sequences = []
        for row, prompt in enumerate(prompt for prompt in prompts for _ in range(wanted.n)):
            follows = None if grammar is None or self._grammars is None else self._grammars.processor(grammar, len(prompt))
            sequences.append(
                self.decoder.sequence(
                    prompt,
                    wanted.params,
                    seed=row_seed(seed, row),
                    max_new_tokens=self._limit(len(prompt), wanted),
                    stop=wanted.stop,
                    markers=self._markers if parsers else frozenset(),
                    grammar=follows,
                    max_positions=self.slot_tokens,
                    traced=wanted.trace,
                    top_logprobs=wanted.top_logprobs,
                    prompt_top_logprobs=wanted.top_logprobs if wanted.echo else None,
                    space=space,
                )
            )
        return Request(
            sequences,
            wanted.speculative,
            loop,
            constrained=grammar is not None,
            predicted=bool(wanted.params.predicted),
            parsers=parsers,
        )

    def _check_prompts(self, prompts: list[list[int]], wanted: CompletionRequest) -> None:
        vocab_size = self.decoder.target.vocab_size
        try:
            check_prompts(prompts, None, vocab_size)
            check_params(wanted.params, vocab_size)
        except UsageError as error:
            raise from_library(error, sampling_name(error) or wanted.prompt_name) from None

    def _with_prediction(self, wanted: CompletionRequest) -> SamplingParams:
        """Return the sampling parameters with the tokens of the prediction, at most as many as fit into a slot."""
        if wanted.prediction is None:
            return wanted.params
        if self.scheduler.lockstep is not None:
            raise unsupported("prediction", "if several processes share a model")
        text = wanted.prediction[: _USUAL_CHARACTERS * self.slot_tokens]
        try:
            with_prediction(self.decoder.drafter)
            with self._encoding:
                read = self._encoder.with_prediction_read(replace(wanted.params, prediction=text))
        except UsageError as error:
            raise from_library(error, "prediction") from None
        return replace(read, prediction=read.predicted[: self.slot_tokens])

    def _limit(self, length: int, wanted: CompletionRequest) -> int:
        """Return how many new tokens fit into a slot and were asked for; refuse a prompt that leaves no room."""
        room = self.slot_tokens - length
        if room < 1:
            raise self._too_long(str(length), wanted)
        return room if wanted.max_new_tokens is None else min(room, wanted.max_new_tokens)

    def _too_long(self, length: str, wanted: CompletionRequest) -> RequestError:
        return RequestError("context_length_exceeded", param=wanted.prompt_name, length=length, most=self.slot_tokens)

    def _compiled(self, grammar: Grammar, name: str | None) -> str:
        """Compile a grammar; errors name the parameter `name`, by default the one for grammars of this kind."""
        name = name or ("response_format" if grammar.kind.startswith("json") else grammar.kind)
        if self.scheduler.lockstep is not None:
            raise unsupported(name, "if several processes share a model")
        try:
            with self._encoding:
                if self._grammars is None:
                    decoder = self.decoder
                    self._grammars = Grammars(self._encoder.tokenizer, decoder.target.vocab_size, decoder.eos_token_ids)
            return self._grammars.compiled(grammar)
        except UsageError as error:
            raise from_library(error, name, private=True) from None


def surely_exceeds(text: str, most: int, tokenizer: Any) -> bool:
    """Whether a text surely has too many tokens, judged by its beginning: tokenizing a whole megabyte takes seconds.

    A cut may change the tokens before it, so only more than twice the limit counts as too many.
    """
    size = _USUAL_CHARACTERS * most
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > 2 * most:
            return True
        size *= 2
    return False
