"""A corpus cache made to measure: n-grams of text files, or of text that the target writes itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.bundled import BUNDLED, bundled_folder
from polydraft.models.loading import Loaded, check_name, hub_options, load_model
from polydraft.ngrams import tokenizer_fingerprint
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_file import save_trie
from polydraft.ngrams.gram_trie import GramTrie
from polydraft.ngrams.options import check_order
from polydraft.ngrams.reading import blocks_of, check_text_file
from polydraft.ngrams.repeats import fresh_stretches
from polydraft.train.chat_form import chat_form
from polydraft.train.conversations import Writer
from polydraft.train.corpus import make_corpus
from polydraft.train.openings import OPENINGS
from polydraft.train.settings import HeadSize, TrainSettings

Observer = Callable[[str, int, int], None]
"""Told of a phase and how much of it is done."""


@dataclass(frozen=True, kw_only=True)
class CorpusCacheSettings:
    """Text and size of a corpus cache."""

    tokenizer: str
    """The bundled target, a folder, or a hub name."""
    texts: tuple[Path, ...] = ()
    """Files of UTF-8 text, plain or gzipped."""
    generate: int = 0
    """Tokens of text that the model of that name writes itself, besides."""
    max_bytes: int = 32_000_000
    gram: int = 4
    max_prefix: int = 3
    min_count: int = 2
    length: int = 512
    """Tokens of one text that the model writes."""
    sampling_rows: int = 256
    """Texts that it writes side by side."""
    seed: int = 0

    def check(self, out: Path) -> None:
        """Refuse what cannot be made, before anything is loaded."""
        check_order(self.max_prefix, self.gram)
        for option in ("max_bytes", "min_count", "sampling_rows"):
            if getattr(self, option) < 1:
                name = "--" + option.replace("_", "-")
                raise UsageError(f"{name} {getattr(self, option)} is out of range; allowed: whole numbers from 1")
        if self.generate < 0:
            raise UsageError(f"--generate {self.generate} is out of range; allowed: 0 (none) or more tokens")
        if not self.texts and not self.generate:
            raise UsageError("there is no text to count; give files with --text, or let the model write with --generate TOKENS")
        for file in self.texts:
            check_text_file(file)
        if out.is_dir():
            raise UsageError(f"--out {out} is a folder; give the name of a file in it")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: there is no folder {str(out.parent)!r}; make it first")
        if self.generate:
            self.written().check()

    def written(self) -> TrainSettings:
        """Return how a draft's training would ask for the text."""
        return TrainSettings(
            size=HeadSize(),
            target=self.tokenizer,
            tokens=self.generate,
            length=self.length,
            sampling_rows=self.sampling_rows,
            seed=self.seed,
        )


def make_corpus_cache(
    settings: CorpusCacheSettings, out: Path, observer: Observer, device: torch.device, dtype: torch.dtype
) -> GramTrie:
    """Count n-grams and write them into a file, whole or not at all.

    Parameters
    ----------
    settings : CorpusCacheSettings
    out : Path
        The file.
    observer : callable
        Told of progress.
    device, dtype
        Of the model, where it writes.

    Returns
    -------
    GramTrie
        What was written.
    """
    settings.check(out)
    target = load_model(settings.tokenizer, device, dtype) if settings.generate else None
    tokenizer = target.tokenizer if target else load_tokenizer(settings.tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    if target:
        vocab_size = max(vocab_size, target.model.vocab_size)
    with GramCounter(vocab_size, max_prefix=settings.max_prefix, gram=settings.gram) as counter:
        _count_files(settings, tokenizer, counter, observer)
        if target:
            _count_written(settings, target, counter, observer)
        if not counter.size:
            raise UsageError(f"the corpus is empty: no text in {', '.join(map(str, settings.texts))}; give files with text")
        trie = counter.count(
            tokenizer_fingerprint(tokenizer),
            max_bytes=settings.max_bytes,
            min_count=settings.min_count,
            advance=lambda done, total: observer("counting", done, total),
        )
    save_trie(trie, out)
    return trie


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by the name of its model."""
    from transformers import AutoTokenizer

    allowed = f"{BUNDLED}, a folder, or a hub name"
    check_name("tokenizer", name, allowed)
    folder = str(bundled_folder()) if name == BUNDLED else name
    try:
        return AutoTokenizer.from_pretrained(folder, **hub_options(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"cannot load tokenizer {name!r} ({reason}); allowed: {allowed}") from None


def _count_files(settings: CorpusCacheSettings, tokenizer: Any, counter: GramCounter, observer: Observer) -> None:
    total, before = sum(file.stat().st_size for file in settings.texts), 0
    for file in settings.texts:
        size, start = file.stat().st_size, before

        def advance(done: int, start: int = start) -> None:
            observer("reading", start + done, total)

        for text in blocks_of(file, advance=advance):
            # Blocks are longer than any context; the warning that says so is not for us.
            counter.add(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        counter.end_text()
        before += size
        observer("reading", before, total)


def _count_written(settings: CorpusCacheSettings, target: Loaded, counter: GramCounter, observer: Observer) -> None:
    written = 0

    def advance(tokens: int) -> None:
        nonlocal written
        written += tokens
        observer("writing", min(written, settings.generate), settings.generate)

    texts_NL = _written(settings, target, advance)
    observer("writing", settings.generate, settings.generate)
    for tokens in texts_NL.tolist():
        for stretch in fresh_stretches(tokens, settings.max_prefix + settings.gram):
            counter.add(stretch)
            counter.end_text()


def _written(settings: CorpusCacheSettings, target: Loaded, advance: Callable[[int], None]) -> Tensor:
    """Let the model make up conversations: in one half it finds its own topic, in the other it completes a request."""
    form = chat_form(target.tokenizer)
    if form is None:
        return make_corpus(settings.written(), target, advance).texts.tokens_NL
    limit = target.model.max_positions
    if limit is not None and settings.length > limit:
        raise UsageError(f"--length {settings.length} is longer than the target's context; allowed: 16 to {limit}")
    begun = [form.opening + target.tokenizer(words, add_special_tokens=False)["input_ids"] for words in OPENINGS]
    begun = [start for start in begun if len(start) <= settings.length // 2] or [form.opening]
    rows = -(-settings.generate // settings.length)
    if rows > settings.sampling_rows:  # a last few rows by themselves would take as long as many
        rows = -(-rows // settings.sampling_rows) * settings.sampling_rows
    starts = [begun[row // 2 % len(begun)] if row % 2 else form.opening for row in range(rows)]
    writer = Writer(target.model, form, target.eos_token_ids)
    generator = torch.Generator(target.model.device).manual_seed(settings.seed)
    parts = [starts[first : first + settings.sampling_rows] for first in range(0, rows, settings.sampling_rows)]
    return torch.cat([writer.write(part, settings.length, False, generator, advance).tokens_NL for part in parts])
