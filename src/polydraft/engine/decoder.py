"""The object users hold: a target, a drafter, and text in and out."""

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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
from polydraft.verify import AUTO, WALKS

Prompt = str | Sequence[int]
_MOST_SPARE = 2
_PLAIN_SAMPLING = SamplingParams()


class Decoder:
    """Generate from a target model, several tokens a forward pass, without changing what it generates.

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
        What the model's generation config asks for, followed where `sampling` says nothing.
    walk : str
        How trees are verified: a registered walk, or ``"auto"`` for the best one that fits the scheme.
    graphs : bool
        On a GPU, replay whole rounds as CUDA graphs; of beams, their passes.
    ahead : bool
        On a GPU, launch a replayed round before looking at the last one's outcome, where nothing depends on it. Same texts.
    lossless : bool
        Whether to refuse drafters that change the distribution of the text.

    Notes
    -----
    Several threads may call one decoder. Each call has memory of its own, but for calls with ``keep=True``, which share one:
    there `generate` waits for its turn, and a stream is refused once a later call has taken the memory over. One stream belongs
    to one thread at a time.

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
        self.graphs, self.ahead = graphs, ahead
        self._grammars: Grammars | None = None
        """Made when first asked for: that takes a second."""
        self._drafters: dict[tuple[bool, bool], Drafter] = {(False, False): self.drafter}
        """Drafters of texts with or without grammars, and predictions."""
        self._kept: tuple[Drafter, Workspace] | None = None
        self._spare: deque[tuple[Drafter, Workspace]] = deque(maxlen=_MOST_SPARE)
        """Workspaces of a GPU, whose captured rounds are worth keeping."""
        self._lending = threading.Lock()
        """Held while one of the workspaces above is given out or put back."""
        self._turn = threading.RLock()
        """Held while a call with ``keep=True`` begins, and by `generate` until its texts are done."""

    def replace(self, **changes: Any) -> "Decoder":
        """Return a decoder with memories of its own that differs in these arguments of the constructor alone.

        A lossy decoder may become any other; of a lossless one a lossy variant needs ``lossless=False``.

        Examples
        --------
        >>> plain = decoder.replace(drafter=None)  # doctest: +SKIP
        """
        fields = {name: getattr(self, name) for name in list(inspect.signature(Decoder.__init__).parameters)[1:]}
        for name in changes:
            if name not in fields:
                raise unknown_name("part of a decoder", name, fields)
        return type(self)(**{**fields, **changes})

    @overload
    def generate(self, prompts: str, **options: Unpack[Options]) -> Generation: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Sequence[int], **options: Unpack[Options]) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Unpack[Options]) -> list[Generation]: ...

    def generate(self, prompts: Any, **options: Unpack[Options]) -> Generation | list[Generation]:
        """Generate to the end.

        Parameters
        ----------
        prompts : str, token ids, or a list of either
            A list gives a list of results, generated as one batch.
        sampling : SamplingParams or one for each prompt, optional
            What is left out follows the model's generation config, see `defaults`, if it says something of it; it is
            temperature 1 without truncation otherwise. A batch may mix all of them, temperature 0 too.
        max_new_tokens : int or one for each prompt, default 128
            Exact upper limit for each text.
        seed : int or one for each prompt, optional
            Same seed, same text; drawn at random, and reported in `settings`, if not given. Trees that follow the load do not
            do so for texts with a seed, above temperature 0: these have the tree itself alone, and a chain of two in a batch.
        stop : str or list of str, or one list for each prompt, optional
            Strings that end a text.
        chat : bool, default False
            Put text prompts into the tokenizer's chat template first.
        cancel : threading.Event, optional
            Set it to stop after the current round.
        keep : bool, default False
            Keep the memory for the next call with `keep`, which then only reads what its prompt adds to the text so far.

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
                seeded=options.get("seed") is not None,
                follows_load=drafter.by_load,
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
            "scheme": workspace.session.scheme.name if workspace.session.depth else None,
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
        seeded: bool = True,
        follows_load: bool = True,
        **options: Unpack[SequenceOptions],
    ) -> TokenSequence:
        """Make a text for an `Engine` from what a request asks for: the one place where that happens.

        Parameters
        ----------
        prompt : sequence of int
        params : SamplingParams
            What they leave out follows the model's generation config.
        seed : int
            Of this text alone.
        max_new_tokens : int
        stop : sequence of str
            Strings that end it.
        markers : collection of int
            Special tokens that leave text.
        grammar : GrammarProcessor, optional
            Keeps it to a grammar; it comes after all other processors.
        seeded, follows_load : bool
            Whether the seed was asked for, and whether trees may follow the load.
        **options
            Other fields of `TokenSequence`.
        """
        params = self.with_defaults(params, prompt)
        options.setdefault("eos_token_ids", frozenset(self.eos_token_ids))
        options.setdefault("max_positions", self.target.max_positions)
        return TokenSequence(
            prompt=prompt,
            params=params if grammar is None else params.following(grammar),
            generator=row_generator(seed),
            max_new_tokens=max_new_tokens,
            assembler=self.assembler(stop, markers),
            # A seed's text depends on its trees, except at temperature 0, where the likeliest token is the same with any tree.
            steady=not follows_load or (seeded and params.temperature > 0),
            **options,
        )

    def warm_up(
        self,
        *,
        sampling: SamplingParams = _PLAIN_SAMPLING,
        batch_size: int = 1,
        longest: int = USUAL_LENGTH,
        progress: Callable[[int], None] | None = None,
    ) -> float:
        """Do beforehand what first requests would wait for, and return the seconds that it took.

        Kernels are compiled, costs measured where the tree asks for them, and on a GPU rounds are captured for texts of all
        lengths up to `longest`. Later requests with the same sampling parameters and batch size find it done. On a CPU the
        texts are short whatever `longest` says.

        Parameters
        ----------
        sampling : SamplingParams
            As of the requests to come; temperature 1 without truncation if not given.
        batch_size : int
        longest : int
            Of prompt and new text together.
        progress : function, optional
            Called with every length that is about to be tried.

        Examples
        --------
        >>> decoder.warm_up(sampling=SamplingParams(temperature=0.7))  # doctest: +SKIP
        4.1
        """
        if batch_size < 1 or longest < 2:
            raise UsageError(f"batch_size={batch_size}, longest={longest} is out of range; allowed: from 1, and from 2 up")
        start = time.perf_counter()
        longest = min(longest, self.target.max_positions or longest)
        # Prompts of a batch are read in passes that are not captured.
        groups = groups_to_read(longest, PREFILL_CHUNK, 1, self.target.vocab_size, self.target.device, behind=PREFILL_CHUNK)
        params = self.sequence([0], sampling, seed=0, max_new_tokens=1).params
        workspace = self._lend(self.drafter, RowParams((params,) * batch_size), keep=False)
        engine = Engine(workspace, walk=self.walk, elastic=True)
        rehearse(self, engine, [sampling], longest=longest, groups=groups if batch_size == 1 else (), progress=progress)
        self._put_back(self.drafter, workspace, keep=False)
        return time.perf_counter() - start

    def with_defaults(self, params: SamplingParams, prompt: Sequence[int], *, draws: bool = True) -> SamplingParams:
        """Return sampling parameters with what the model's own settings say where they say nothing.

        `prompt` is what the text continues. Beam search never draws, so what only sampling uses is left out there (`draws`).
        """
        return params if self.defaults is None else self.defaults.fill(params, len(prompt), draws=draws)

    def with_prediction_read(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with the prediction as token ids."""
        if not isinstance(params.prediction, str):
            return params
        if self.tokenizer is None:
            raise UsageError("a prediction in words needs a tokenizer; pass token ids, or tokenizer=... to the Decoder")
        check_text(params.prediction)
        return replace(params, prediction=self.tokenizer(params.prediction, add_special_tokens=False)["input_ids"])

    def assembler(self, stop: Sequence[str], markers: Collection[int] = ()) -> TextAssembler:
        """Return what turns new tokens into text, which ends before the first of these strings and shows these markers."""
        if stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; pass tokenizer=... to the Decoder")
        return TextAssembler(self.tokenizer, stop, markers)

    def encode(self, prompt: Prompt | Sequence[Mapping[str, Any]], chat: bool = False) -> list[int]:
        """Turn a prompt into token ids: a text, or the messages of a conversation."""
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
        """Turn a conversation, or what `chat_text` made of it, into token ids that an answer follows."""
        text = messages if isinstance(messages, str) else self.chat_text(messages)
        assert self.tokenizer is not None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """Turn a conversation into the text that an answer follows, by the tokenizer's chat template; `tools` may be called."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template; use a plain prompt (--raw on the command line)")
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools and list(tools), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs, and refuse what they do not like in ways of their own
            raise UsageError(f"the chat template refuses these messages ({error}); change their roles or order") from None
        check_text(text)
        return text

    def _drafter_for(self, *, forced: bool, predicted: bool) -> Drafter:
        """Return who drafts for texts with grammars, predictions, or both; made when first needed."""
        if (forced, predicted) not in self._drafters:
            drafter = with_forced(self.drafter) if forced else self.drafter
            self._drafters[forced, predicted] = with_prediction(drafter) if predicted else drafter
        return self._drafters[forced, predicted]

    def _grammar_processors(self, params: RowParams, texts: Sequence[Sequence[int]]) -> list[GrammarProcessor | None]:
        """Return what keeps each text to its grammar; None for texts without one."""
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
        """Return a workspace for a batch, for its use alone until it is put back: a kept or spare one, else a new one."""
        with self._lending:
            if keep and self._kept is not None and _fits(self._kept, drafter, params):
                return self._kept[1]
            for found in self._spare:
                if _fits(found, drafter, params) and found[1].ownership.idle:
                    self._spare.remove(found)
                    return found[1]
        return Workspace(self.target, drafter, params, self.graphs, self.ahead)

    def _put_back(self, drafter: Drafter, workspace: Workspace, keep: bool) -> None:
        """Let later calls find memories that a run has taken."""
        with self._lending:
            if keep:
                self._kept = (drafter, workspace)
            elif workspace.captures:
                self._spare.append((drafter, workspace))


def _fits(found: tuple[Drafter, Workspace], drafter: Drafter, params: RowParams) -> bool:
    return found[0] is drafter and found[1].asked == params and found[1].is_current
