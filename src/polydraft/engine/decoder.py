"""`Decoder`, the object that users hold: a target and a drafter, text in and text out."""

import inspect
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack, cast, overload

from polydraft.draft import Drafter, Plain
from polydraft.draft.forced import with_forced
from polydraft.draft.predicted import with_prediction
from polydraft.engine.loop import Engine
from polydraft.engine.request import Options, Request, rows_of, token_ids
from polydraft.engine.sequence import Generation, SequenceOptions, TokenSequence
from polydraft.engine.stream import Stream
from polydraft.engine.text import TextAssembler
from polydraft.engine.warm_up import USUAL_LENGTH, groups_to_read, rehearse
from polydraft.engine.workspace import Workspace
from polydraft.errors import UsageError, unknown_name
from polydraft.models import LanguageModel, check_prompts
from polydraft.models.generation_defaults import GenerationDefaults
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.prompts import check_text
from polydraft.sampling import RowParams, SamplingParams, check_params
from polydraft.sampling.categorical import row_generator
from polydraft.sampling.grammar import GrammarProcessor, Grammars
from polydraft.sampling.params import CoupledParams
from polydraft.verify import AUTO, WALKS

Prompt = str | Sequence[int]
_MOST_SPARE = 2
_PLAIN_SAMPLING = SamplingParams()


class Decoder:
    """Generate text with a target model, several tokens per forward pass, without changing its output.

    Parameters
    ----------
    target : LanguageModel
    drafter : Drafter, optional
        Proposes tokens; plain decoding without one.
    tokenizer : Hugging Face tokenizer, optional
        Needed for text prompts, text output and stop strings.
    eos_token_ids : sequence of int
        Tokens that end a text.
    defaults : GenerationDefaults, optional
        The model's generation config: it decides what `sampling` leaves unset.
    walk : str
        How trees are verified: a registered walk, or ``"auto"`` for the best one that fits the scheme.
    coupled : bool, optional
        Whether a seed gives the same text above temperature 0, whatever the draft and the other texts
        (docs/decisions/066-a-seed-decides-the-text.md); schemes and walks are then not used. By default, if the trees are
        dynamic.
    graphs : bool
        On a GPU, replay whole rounds as CUDA graphs; for beams, the target's passes.
    ahead : bool
        On a GPU, launch the next replayed round before the last one's outcome is known, where nothing depends on it. The text
        is the same.
    lossless : bool
        Whether to refuse drafters that change the distribution of the text.

    Notes
    -----
    Several threads may call one decoder. Each call has its own caches, except calls with ``keep=True``, which share one set:
    `generate` waits for its turn, and a stream fails once a later call has taken the caches over. Use a stream from one thread
    at a time.

    Examples
    --------
    >>> decoder = polydraft.load("smollm2", draft="early-exit:6")        # doctest: +SKIP
    >>> decoder.generate("Why is the sky blue?", max_new_tokens=64).text  # doctest: +SKIP
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        defaults: GenerationDefaults | None = None,
        walk: str = AUTO,
        coupled: bool | None = None,
        graphs: bool = True,
        ahead: bool = True,
        lossless: bool = True,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter or Plain(), tokenizer
        self.lossless = self.drafter.lossless
        if lossless and not self.drafter.lossless:
            raise UsageError(
                f"drafter {self.drafter.name!r} changes the distribution of the text; pass lossless=False if you want that"
            )
        self.eos_token_ids, self.defaults = tuple(eos_token_ids), defaults
        self.walk = walk if walk == AUTO else WALKS.get(walk).name
        self.coupled = self.drafter.ranked if coupled is None else coupled
        self.graphs, self.ahead = graphs, ahead
        self._grammars: Grammars | None = None
        """Built on first use, which takes a second."""
        self._drafters: dict[tuple[bool, bool], Drafter] = {(False, False): self.drafter}
        """Drafters by whether texts have grammars, and predictions."""
        self._kept: tuple[Drafter, Workspace] | None = None
        self._spare: deque[tuple[Drafter, Workspace]] = deque(maxlen=_MOST_SPARE)
        """Workspaces on a GPU, kept for their captured rounds."""
        self._lending = threading.Lock()
        """Held while a workspace is lent or put back, and while grammars are built."""
        self._turn = threading.RLock()
        """Held while a call with ``keep=True`` starts; `generate` holds it until its texts are done."""

    def replace(self, **changes: Any) -> "Decoder":
        """Return a decoder with its own caches and these constructor arguments changed.

        To give a lossless decoder a lossy drafter, pass ``lossless=False`` as well.

        Examples
        --------
        >>> plain = decoder.replace(drafter=None)  # doctest: +SKIP
        """
        fields = {name: getattr(self, name) for name in list(inspect.signature(Decoder.__init__).parameters)[1:]}
        for name in changes:
            if name not in fields:
                raise unknown_name("decoder argument", name, fields)
        return type(self)(**{**fields, **changes})

    @overload
    def generate(self, prompts: str, **options: Unpack[Options]) -> Generation: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Sequence[int], **options: Unpack[Options]) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Unpack[Options]) -> list[Generation]: ...

    def generate(self, prompts: Any, **options: Unpack[Options]) -> Generation | list[Generation]:
        """Generate until every text has ended.

        Parameters
        ----------
        prompts : str, token ids, or a list of either
            A list gives a list of results, generated as one batch.
        sampling : SamplingParams or one for each prompt, optional
            What you leave unset comes from the model's generation config (see `defaults`); without one, it is temperature 1
            without truncation. A batch may mix any parameters, temperature 0 included.
        max_new_tokens : int or one for each prompt, default 128
            Hard limit for each text.
        seed : int or one for each prompt, optional
            Same seed, same text. Drawn at random if not given, and reported in `settings`. If texts are not coupled, above
            temperature 0, the text also depends on the trees, and so on other texts if trees follow the load.
        stop : str or list of str, or one list for each prompt, optional
            Strings that end a text.
        chat : bool, default False
            Apply the tokenizer's chat template to text prompts.
        cancel : threading.Event, optional
            Set it to stop after the current round.
        keep : bool, default False
            Keep the caches for the next call with `keep`, which then reads only what its prompt adds to this text.

        Returns
        -------
        Generation, or a list of them
        """
        with self._turn if options.get("keep") else nullcontext():
            stream = self.stream(prompts, **options)
            for _ in stream:
                pass
        results = stream.results()
        return results[0] if rows_of(prompts)[1] else results

    def stream(self, prompts: Any, **options: Unpack[Options]) -> Stream:
        """Generate token by token; parameters as for `generate`.

        Returns
        -------
        Stream
            An iterator of `TokenEvent`; its `results()` are complete once it is exhausted.
        """
        request = Request.from_options(options)
        texts = [self.encode(prompt, request.chat) for prompt in rows_of(prompts)[0]]
        check_prompts(texts, self.target.max_positions, self.target.vocab_size)
        asked, seeds = request.row_params(len(texts)).map(self.with_prediction_read), request.seeds(len(texts))
        limits, stops = request.row_limits(len(texts)), request.row_stops(len(texts))
        grammars = self._grammar_processors(asked, texts)
        drafter = self._drafter_for(forced=any(grammars), predicted=any(own.predicted for own in asked))
        sequences = [
            self.sequence(
                text,
                own,
                seed=seed,
                max_new_tokens=limit,
                stop=stop,
                grammar=grammar,
                row=row,
            )
            for row, (text, own, grammar, seed, limit, stop) in enumerate(
                zip(texts, asked, grammars, seeds, limits, stops, strict=True)
            )
        ]
        params = RowParams(tuple(one.params for one in sequences))
        for own in params:
            check_params(own, self.target.vocab_size)
        with self._turn if request.keep else nullcontext():
            workspace = self._lend(drafter, params, request.keep)
            engine = Engine(workspace, walk=self.walk, sequences=sequences, keep=request.keep, elastic=not request.keep)
            self._put_back(drafter, workspace, request.keep)
        settings = {
            "seeds": seeds,
            "max_new_tokens": request.max_new_tokens,
            "scheme": ("coupled" if any(params.coupled) else workspace.session.scheme.name)
            if workspace.session.depth
            else None,
            "walk": engine.walk.name if engine.walk is not None and workspace.session.depth else None,
        }
        return Stream(engine, sequences, settings, request.cancel)

    def sequence(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        markers: Collection[int] = (),
        grammar: GrammarProcessor | None = None,
        **options: Unpack[SequenceOptions],
    ) -> TokenSequence:
        """Make a `TokenSequence` from what a request asks for; every text of every request is made here.

        Parameters
        ----------
        prompt : sequence of int
        params : SamplingParams
            What they leave unset comes from the model's generation config.
        seed : int
            For this text alone.
        max_new_tokens : int
        stop : sequence of str
            Strings that end the text.
        markers : collection of int
            Special tokens to show in the text.
        grammar : GrammarProcessor, optional
            Restricts the text to a grammar; runs after all other processors.
        **options
            Other fields of `TokenSequence`.
        """
        params, generator = self.with_defaults(params, prompt), row_generator(seed)
        if self.coupled and params.temperature > 0:
            params = CoupledParams.of(params, key=generator.initial_seed())
        options.setdefault("eos_token_ids", frozenset(self.eos_token_ids))
        options.setdefault("max_positions", self.target.max_positions)
        return TokenSequence(
            prompt=prompt,
            params=params if grammar is None else params.following(grammar),
            generator=generator,
            max_new_tokens=max_new_tokens,
            assembler=self.assembler(stop, markers),
            **options,
        )

    def warm_up(
        self,
        *,
        sampling: SamplingParams = _PLAIN_SAMPLING,
        batch_size: int = 1,
        longest: int = USUAL_LENGTH,
    ) -> float:
        """Do now what the first requests would otherwise wait for; return the seconds it took.

        Compiles kernels, measures costs if the tree depends on them, and on a GPU captures rounds for texts of all lengths up
        to `longest`, for requests with these sampling parameters and this batch size. On a CPU, texts are short whatever
        `longest` says.

        Parameters
        ----------
        sampling : SamplingParams
            Those of the requests to come; temperature 1 without truncation if not given.
        batch_size : int
        longest : int
            Most tokens of a text, prompt included.

        Examples
        --------
        >>> decoder.warm_up(sampling=SamplingParams(temperature=0.7))  # doctest: +SKIP
        4.1
        """
        if batch_size < 1 or longest < 2:
            raise UsageError(f"batch_size={batch_size}, longest={longest} is out of range; allowed: from 1, and from 2")
        start = time.perf_counter()
        longest = min(longest, self.target.max_positions or longest)
        # The prompts of a batch are read by passes that are not captured.
        groups = groups_to_read(longest, PREFILL_CHUNK, 1, self.target.vocab_size, self.target.device, behind=PREFILL_CHUNK)
        params = self.sequence([0], sampling, seed=0, max_new_tokens=1).params
        workspace = self._lend(self.drafter, RowParams((params,) * batch_size), keep=False)
        engine = Engine(workspace, walk=self.walk, elastic=True)
        rehearse(self, engine, [sampling], longest=longest, groups=groups if batch_size == 1 else ())
        self._put_back(self.drafter, workspace, keep=False)
        return time.perf_counter() - start

    def with_defaults(self, params: SamplingParams, prompt: Sequence[int], *, draws: bool = True) -> SamplingParams:
        """Return sampling parameters, unset ones filled in from the model's generation config.

        `prompt` is what the text continues. Beam search never draws: it passes ``draws=False`` to leave out what only sampling
        uses.
        """
        return params if self.defaults is None else self.defaults.fill(params, len(prompt), draws=draws)

    def with_prediction_read(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with the prediction as token ids."""
        if not isinstance(params.prediction, str):
            return params
        if self.tokenizer is None:
            raise UsageError("a prediction given as text needs a tokenizer; pass token ids, or tokenizer=... to the Decoder")
        check_text(params.prediction)
        return replace(params, prediction=self.tokenizer(params.prediction, add_special_tokens=False)["input_ids"])

    def assembler(self, stop: Sequence[str], markers: Collection[int] = ()) -> TextAssembler:
        """Return a `TextAssembler` that ends the text before the first of these stop strings and shows these markers."""
        if stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; pass tokenizer=... to the Decoder")
        return TextAssembler(self.tokenizer, stop, markers)

    def encode(self, prompt: Prompt | Sequence[Mapping[str, Any]], chat: bool = False) -> list[int]:
        """Turn a prompt into token ids: text, or the messages of a conversation."""
        if not isinstance(prompt, str):
            said = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
            return self.encode_chat(cast(Sequence[dict[str, str]], prompt)) if said else token_ids(prompt)
        if self.tokenizer is None:
            raise UsageError("text prompts need a tokenizer; pass token ids, or tokenizer=... to the Decoder")
        if not prompt:
            raise UsageError("empty prompt: it has no tokens; give at least one character")
        check_text(prompt)
        if chat and getattr(self.tokenizer, "chat_template", None):
            return self.encode_chat([{"role": "user", "content": prompt}])
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, Any]] | str) -> list[int]:
        """Turn a conversation, or the text that `chat_text` made of it, into the token ids of a prompt."""
        text = messages if isinstance(messages, str) else self.chat_text(messages)
        assert self.tokenizer is not None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """Apply the chat template to a conversation, up to where the answer starts; `tools` are those the model may call."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template; use a plain prompt (--raw on the command line)")
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools and list(tools), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs, and raise whatever they like
            raise UsageError(f"the chat template refuses these messages ({error}); change their roles or order") from None
        check_text(text)
        return text

    def _drafter_for(self, *, forced: bool, predicted: bool) -> Drafter:
        """Return the drafter for texts with grammars, predictions, or both; made on first use."""
        if (forced, predicted) not in self._drafters:
            drafter = with_forced(self.drafter) if forced else self.drafter
            self._drafters[forced, predicted] = with_prediction(drafter) if predicted else drafter
        return self._drafters[forced, predicted]

    def _grammar_processors(self, params: RowParams, texts: Sequence[Sequence[int]]) -> list[GrammarProcessor | None]:
        """Return the processor that restricts each text to its grammar; None for texts without a grammar."""
        wanted = [own.grammar for own in params]
        if not any(wanted):
            return [None] * len(texts)
        with self._lending:
            if self._grammars is None:
                if self.tokenizer is None:
                    raise UsageError("grammars need a tokenizer; pass tokenizer=... to the Decoder")
                self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self.eos_token_ids)
        return self._grammars.processors(wanted, [len(text) for text in texts])

    def _lend(self, drafter: Drafter, params: RowParams, keep: bool) -> Workspace:
        """Return a workspace that no other batch uses until it is put back: the kept one, a spare one, or a new one."""
        with self._lending:
            if keep and self._kept is not None and _fits(self._kept, drafter, params):
                return self._kept[1]
            for found in self._spare:
                if _fits(found, drafter, params) and found[1].ownership.idle:
                    self._spare.remove(found)
                    return found[1]
        return Workspace(self.target, drafter, params, self.graphs, self.ahead)

    def _put_back(self, drafter: Drafter, workspace: Workspace, keep: bool) -> None:
        """Let later calls reuse a workspace."""
        with self._lending:
            if keep:
                self._kept = (drafter, workspace)
            elif workspace.captures:
                self._spare.append((drafter, workspace))


def _fits(found: tuple[Drafter, Workspace], drafter: Drafter, params: RowParams) -> bool:
    return found[0] is drafter and found[1].asked == params and found[1].is_current
