"""Options of drafters that propose from n-grams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.drafters import GramTreeOptions

NGRAM_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--drafter",
        default="auto",
        show_default=True,
        help="Who proposes: auto (the draft), self-draft, ngram, lookup, suffix, corpus, or several such as lookup+model.",
    ),
    click.option("--ngram-nodes", type=int, default=None, help="Most candidates a round from n-grams."),
    click.option("--ngram-depth", type=int, default=None, help="Most tokens of a continuation from n-grams."),
    click.option("--gram", type=int, default=None, help="Tokens of a continuation that the context cache stores."),
    click.option("--branches", type=int, default=None, help="Branches that ride along in self-draft."),
    click.option("--branch-length", type=int, default=None, help="Most tokens of a branch."),
    click.option("--branch-seeds", default=None, help="Where branches begin: vocabulary or prompt."),
    click.option("--corpus", default=None, help="Corpus cache, made with: polydraft train corpus-cache."),
    click.option("--no-corpus", is_flag=True, help="self-draft without its corpus cache."),
    click.option("--no-context", is_flag=True, help="self-draft without its context cache and branches."),
]


@dataclass(frozen=True, kw_only=True)
class NgramChoices:
    """What these options were set to; None where they were not."""

    drafter: str
    ngram_nodes: int | None
    ngram_depth: int | None
    gram: int | None
    branches: int | None
    branch_length: int | None
    branch_seeds: str | None
    corpus: str | None
    no_corpus: bool
    no_context: bool

    def grams(self) -> "GramTreeOptions":
        """Return them as options of the drafters."""
        from polydraft.drafters import GramTreeOptions, RiderOptions
        from polydraft.ngrams import GramOptions

        if self.corpus is not None and self.no_corpus:
            raise UsageError(f"--corpus {self.corpus} and --no-corpus do not go together; leave one out")
        riders = _given({"branches": self.branches, "length": self.branch_length, "seeds": self.branch_seeds})
        caches = {"gram": self.gram, "corpus": self.corpus}
        sizes = {"nodes": self.ngram_nodes, "depth": self.ngram_depth}
        return GramTreeOptions(
            **_given(sizes),
            riders=RiderOptions(**riders) if riders else None,
            caches=GramOptions(**_given(caches)),
            context=not self.no_context,
            corpus=not self.no_corpus,
        )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
