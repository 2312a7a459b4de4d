"""Making a corpus cache: n-grams of text files, of text that the target writes itself, or of both."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polydraft.errors import UsageError, first_line
from polydraft.models.bundled import BUNDLED, bundled_folder
from polydraft.models.finding import hub_options
from polydraft.models.loading import Loaded, check_name, load_model
from polydraft.ngrams import tokenizer_fingerprint
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import GramTrie, save_trie
from polydraft.train.corpus import make_corpus
from polydraft.train.settings import CorpusCacheSettings, check_text_file

Observer = Callable[[str, int, int], None]
"""Called with `(phase, done, total)`."""
_BLOCK = 1 << 18
"""Characters to read at a time."""


def make_corpus_cache(
    settings: CorpusCacheSettings, out: Path, observer: Observer, device: torch.device, dtype: torch.dtype
) -> GramTrie:
    """Count n-grams, write them to a file, completely or not at all, and return them.

    Device and dtype are those of the model that writes text.
    """
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
    """Load a model's tokenizer by the model's name."""
    from transformers import AutoTokenizer

    allowed = f"{BUNDLED}, a folder, or a hub name"
    check_name("tokenizer", name, allowed)
    folder = str(bundled_folder()) if name == BUNDLED else name
    try:
        return AutoTokenizer.from_pretrained(folder, **hub_options(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot load tokenizer {name!r} ({first_line(error)}); allowed: {allowed}") from None


def _count_files(settings: CorpusCacheSettings, tokenizer: Any, counter: GramCounter, observer: Observer) -> None:
    total, before = sum(file.stat().st_size for file in settings.texts), 0
    if total:
        observer("reading", 0, total)
    for file in settings.texts:
        size, start = file.stat().st_size, before

        def advance(done: int, start: int = start) -> None:
            observer("reading", start + done, total)

        for text in blocks_of(file, advance=advance):
            # Not verbose: it would warn that a block is too long for the model.
            counter.add(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        counter.end_text()
        before += size
        observer("reading", before, total)


def _count_written(settings: CorpusCacheSettings, target: Loaded, counter: GramCounter, observer: Observer) -> None:
    (texts,) = make_corpus(settings.written(), target, partial(observer, "writing")).groups
    for tokens in texts.tokens_NL.tolist():
        for stretch in fresh_stretches(tokens, settings.max_prefix + settings.gram):
            counter.add(stretch)
            counter.end_text()


def blocks_of(file: Path, block: int = _BLOCK, advance: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the text of a file in blocks that end at line breaks, or after twice their size if lines are very long.

    `advance` is called with the number of bytes read so far.
    """
    check_text_file(file)
    try:
        with file.open("rb") as raw:
            source = gzip.open(raw) if file.suffix == ".gz" else raw  # noqa: SIM115 (the wrapper closes it)
            # No universal newlines: they would hide carriage returns, which the target sees.
            with io.TextIOWrapper(source, encoding="utf-8", newline="") as opened:
                while text := opened.read(block):
                    yield text if text.endswith("\n") else text + opened.readline(block)
                    if advance:
                        advance(raw.tell())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cannot read {str(file)!r}: it is not UTF-8 text (byte {error.start} of a block); convert it with iconv"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        kind = "gzipped text" if file.suffix == ".gz" else "text"
        raise UsageError(f"cannot read {str(file)!r} as {kind} ({error}); get another copy") from None


def fresh_stretches(tokens: Sequence[int], order: int) -> Iterator[list[int]]:
    """Yield the parts of a text that do not repeat, leaving out tokens that end an n-gram seen before in the text.

    Models, especially small ones, sometimes write the same sentence over and over. One such text would outweigh what a thousand
    others have in common.
    """
    seen: set[tuple[int, ...]] = set()
    stretch: list[int] = []
    for end, token in enumerate(tokens, start=1):
        gram = tuple(tokens[end - order : end]) if end >= order else ()
        if gram in seen:
            if stretch:
                yield stretch
            stretch = []
            continue
        if gram:
            seen.add(gram)
        stretch.append(token)
    if stretch:
        yield stretch
