"""The object users hold: a target, a drafter, and text in and out."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from polydraft.drafters import Drafter, Plain
from polydraft.engine.result import Generation, StopReason, TokenEvent
from polydraft.engine.run import Run, Workspace
from polydraft.engine.stats import Stats
from polydraft.engine.text import TextAssembler
from polydraft.errors import UsageError
from polydraft.models import LanguageModel, check_prompts
from polydraft.sampling import SamplingParams
from polydraft.sampling.noise import row_generator
from polydraft.walks import WALKS

Prompt = str | Sequence[int]


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
    walk : str
        How trees are verified.

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
        walk: str = "node",
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter or Plain(), tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.walk = WALKS.get(walk)()
        self._kept: tuple[Drafter, SamplingParams, Workspace] | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 128,
        seed: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        cancel: threading.Event | None = None,
    ) -> Any:
        """Generate to the end.

        Parameters
        ----------
        prompts : str, token ids, or a list of either
            A list gives a list of results, generated as one batch.
        sampling : SamplingParams, optional
            Temperature 1 without truncation if not given.
        max_new_tokens : int
            Exact upper limit for each text.
        seed : int or one for each prompt, optional
            Same seed, same text; drawn at random, and reported in `settings`, if not given.
        stop : str or list of str
            Strings that end a text.
        chat : bool
            Put text prompts into the tokenizer's chat template first.
        cancel : threading.Event, optional
            Set it to stop after the current round.

        Returns
        -------
        Generation, or a list of them
        """
        single = _is_single(prompts)
        batch = [prompts] if single else list(prompts)
        stream = Stream(self, batch, sampling, max_new_tokens, seed, stop, chat, cancel)  # type: ignore[arg-type]
        for _ in stream:
            pass
        results = stream.results()
        return results[0] if single else results

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 128,
        seed: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        cancel: threading.Event | None = None,
        keep: bool = False,
    ) -> "Stream":
        """Generate token by token; parameters as for `generate`.

        Parameters
        ----------
        keep : bool
            Keep the memory for the next call with `keep`, which then only reads what its prompt adds to the text so far.

        Returns
        -------
        Stream
            An iterator of `TokenEvent`; its `results()` are complete once it is exhausted.
        """
        batch = [prompts] if _is_single(prompts) else list(prompts)
        return Stream(self, batch, sampling, max_new_tokens, seed, stop, chat, cancel, keep)  # type: ignore[arg-type]

    def encode(self, prompt: Prompt, chat: bool = False) -> list[int]:
        """Turn a prompt into token ids."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise UsageError("text prompts need a tokenizer; pass token ids, or tokenizer=... to the Decoder")
        if not prompt:
            raise UsageError("empty prompt: it has no tokens; give at least one character")
        if chat and getattr(self.tokenizer, "chat_template", None):
            return self.encode_chat([{"role": "user", "content": prompt}])
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Turn a conversation into token ids that an answer follows, by the tokenizer's chat template."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template; use a plain prompt (--raw on the command line)")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def workspace(self, batch_size: int, params: SamplingParams, keep: bool) -> Workspace:
        """Return memories for a batch: kept ones where they fit, else new ones."""
        if keep and self._kept is not None:
            drafter, kept_params, workspace = self._kept
            if drafter is self.drafter and kept_params == params and workspace.batch_size == batch_size:
                return workspace
        workspace = Workspace(self.target, self.drafter, batch_size, params)
        self._kept = (self.drafter, params, workspace) if keep else None
        return workspace


class Stream(Iterator[TokenEvent]):
    """Tokens of a batch as they become certain; `close` or a `cancel` event ends it early."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None,
        max_new_tokens: int,
        seed: int | Sequence[int] | None,
        stop: str | Sequence[str],
        chat: bool,
        cancel: threading.Event | None,
        keep: bool = False,
    ) -> None:
        params = sampling or SamplingParams()
        stop_strings = [stop] if isinstance(stop, str) else list(stop)
        if stop_strings and decoder.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; pass tokenizer=... to the Decoder")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UsageError(f"max_new_tokens={max_new_tokens!r} is out of range; allowed: whole numbers from 1")
        if params.top_k > decoder.target.vocab_size:
            raise UsageError(
                f"top_k={params.top_k} is larger than the vocabulary; allowed: 0 (keep all) to {decoder.target.vocab_size}"
            )
        texts = [decoder.encode(prompt, chat) for prompt in prompts]
        check_prompts(texts, decoder.target.max_positions, decoder.target.vocab_size)
        seeds = _seeds(seed, len(texts))
        self.settings: dict[str, Any] = {"seeds": seeds, "max_new_tokens": max_new_tokens}
        self._cancel = cancel
        self._assemblers = [TextAssembler(decoder.tokenizer, stop_strings) for _ in texts]
        self._sources: list[list[str]] = [[] for _ in texts]
        self._prompt_lengths = [len(text) for text in texts]
        self._queue: list[TokenEvent] = []
        workspace = decoder.workspace(len(texts), params, keep)
        self.settings["scheme"] = workspace.session.scheme.name if workspace.session.depth else None
        self._run = Run(
            target=decoder.target,
            drafter=decoder.drafter,
            workspace=workspace,
            walk=decoder.walk,
            prompts=texts,
            params=params,
            generators=[row_generator(value, row if isinstance(seed, int) else 0) for row, value in enumerate(seeds)],
            max_new_tokens=max_new_tokens,
            eos_token_ids=frozenset(decoder.eos_token_ids),
        )

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        return self._run.stats

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> TokenEvent:
        while not self._queue:
            if self._run.done:
                raise StopIteration
            if self._cancel is not None and self._cancel.is_set():
                self.close()
                raise StopIteration
            self._advance()
        return self._queue.pop(0)

    def _advance(self) -> None:
        """Run one round and queue its tokens."""
        for emitted in self._run.step():
            assembler, sources = self._assemblers[emitted.row], self._sources[emitted.row]
            last = len(emitted.token_ids) - 1
            for index, (token, source) in enumerate(zip(emitted.token_ids, emitted.sources, strict=True)):
                piece = assembler.add(token)
                sources.append(source)
                reason = emitted.stop_reason if index == last else None
                if assembler.stopped and reason is not StopReason.EOS:
                    reason = StopReason.STOP
                    self._run.end_row(emitted.row, reason, len(sources))
                if reason:
                    piece += assembler.finish()
                self._queue.append(TokenEvent(emitted.row, token, piece, source, reason))
                if reason:
                    break

    def close(self) -> None:
        """Stop generating; what is there so far stays in `results()`."""
        for row, reason in enumerate(self._run.stop_reasons):
            if reason is None:
                self._run.end_row(row, StopReason.CANCELLED, len(self._sources[row]))
                self._assemblers[row].finish()

    def results(self) -> list[Generation]:
        """Return the texts so far, complete once the stream is exhausted."""
        results = []
        for row, assembler in enumerate(self._assemblers):
            token_ids = self._run.texts[row][self._prompt_lengths[row] :]
            reason = self._run.stop_reasons[row] or StopReason.CANCELLED
            results.append(
                Generation(assembler.text, token_ids, self._sources[row], reason, self._run.stats, dict(self.settings))
            )
        return results


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    if seed is None:
        return [secrets.randbits(31) for _ in range(count)]
    if isinstance(seed, int):
        return [seed] * count
    if len(seed) != count:
        raise UsageError(f"{len(seed)} seeds for {count} prompts; give one seed, or one for each prompt")
    return list(seed)
