"""`polydraft train corpus-cache`."""

from pathlib import Path
from typing import Any

import click

from polydraft.cli.machine import THREADS, set_threads

_FILE = click.Path(path_type=Path)


@click.command("corpus-cache", short_help="Count the n-grams of a corpus.")
@click.argument("more_texts", metavar="[FILE]...", nargs=-1, type=_FILE)
@click.option(
    "--tokenizer",
    default="smollm2",
    show_default=True,
    help="Tokenizer of the target: smollm2 (bundled), a folder, or a hub name.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=_FILE,
    help="File of UTF-8 text, .txt or .txt.gz, of any size; may be given several times, or followed by further files.",
)
@click.option(
    "--generate",
    type=int,
    default=0,
    metavar="TOKENS",
    help="Let the model that --tokenizer names write so many tokens of text itself.",
)
@click.option("--out", required=True, type=_FILE, help="File for the cache.")
@click.option(
    "--max-bytes",
    type=int,
    default=32_000_000,
    show_default=True,
    help="Keep the most frequent n-grams that fit into a file of this size.",
)
@click.option("--gram", type=int, default=4, show_default=True, help="Tokens of a continuation.")
@click.option("--max-prefix", type=int, default=3, show_default=True, help="Most tokens of the text's end to match.")
@click.option("--min-count", type=int, default=2, show_default=True, help="Leave out n-grams seen less often.")
@click.option("--length", type=int, default=512, show_default=True, help="With --generate: tokens of one text.")
@click.option("--sampling-rows", type=int, default=256, show_default=True, help="With --generate: texts written side by side.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="With --generate: same seed, same text (on the same machine)."
)
@click.option("--device", default="auto", show_default=True, help="With --generate: auto, cpu, cuda, cuda:1, ...")
@click.option("--dtype", default="auto", show_default=True, help="With --generate: auto, float32, bfloat16.")
@THREADS
def command(
    texts: tuple[Path, ...],
    more_texts: tuple[Path, ...],
    out: Path,
    device: str,
    dtype: str,
    threads: int | None,
    **options: Any,
) -> None:
    """Count what usually follows a few tokens, for drafting from n-grams (--drafter self-draft or corpus).

    A corpus need not fit into memory. The file is tied to the tokenizer, and mapped into memory when it is used.

    \b
    Examples:
      polydraft train corpus-cache --tokenizer smollm2 --text news.txt.gz code.txt --out my.grams
      polydraft train corpus-cache --generate 2000000 --sampling-rows 4096 --max-bytes 3000000 --out my.grams
    """  # noqa: D301 (\b keeps click from filling the lines)
    from polydraft.cli.options import arrange_messages
    from polydraft.cli.progress import PhaseProgress
    from polydraft.models.placement import resolve_device, resolve_dtype
    from polydraft.train.corpus_cache import CorpusCacheSettings, make_corpus_cache

    set_threads(threads)
    settings = CorpusCacheSettings(texts=(*texts, *more_texts), **options)
    settings.check(out)
    arrange_messages()
    place = resolve_device(device)
    with PhaseProgress() as progress:
        trie = make_corpus_cache(settings, out, progress, place, resolve_dtype(dtype, place))
    click.echo(
        f"corpus cache written to {out}: {len(trie.tokens_N):,} n-grams of up to {len(trie.level_sizes)} tokens, of "
        f"{trie.corpus_tokens:,} tokens of text, {out.stat().st_size:,} bytes; use it with: --drafter self-draft --corpus {out}"
    )
