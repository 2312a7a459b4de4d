"""Texts so short, of so few tokens, that the distribution of all of them is enumerated and each is counted."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

import polydraft.papers  # noqa: F401 - self-draft's branches
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.certify.reference import next_distributions, small_pair
from polydraft.draft import GramTreeOptions, Parts, RiderOptions, TreeDrafter, make_drafter
from polydraft.engine import Decoder, Generation
from polydraft.ngrams import GramOptions
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import save_trie
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree

from .setups import FREE

TARGET, DRAFT = small_pair().target, small_pair().draft
PROMPT = [2, 0, 1, 2, 2, 0, 1, 0, 0, 2, 0, 1]
"""Its end stood in it before, each time with another continuation."""
NEW_TOKENS = 4
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


class Words:
    """A tokenizer whose tokens are words, with nothing between them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[token] for token in tokens)


@cache
def corpus_file() -> Path:
    """Count texts of a model that agrees with the target in part: candidates that are sometimes right."""
    folder = tempfile.TemporaryDirectory(prefix="polydraft-tests-")
    _FOLDERS.append(folder)
    with GramCounter(3) as counter:
        for row in Decoder(DRAFT).generate([PROMPT] * 40, max_new_tokens=12, seed=1):
            counter.add([*PROMPT, *row.token_ids])
            counter.end_text()
        save_trie(counter.count("0" * 16, max_bytes=1 << 16, min_count=1), Path(folder.name) / "corpus")
    return Path(folder.name) / "corpus"


def small_decoder(
    drafter: str,
    tokenizer: Words | None = None,
    eos_token_ids: Sequence[int] = (),
    *,
    scheme: str = "auto",
    walk: str = "auto",
    tree: str = "2x1x1",
) -> Decoder:
    """Build a decoder of three tokens."""
    if drafter == "dynamic":
        made = TreeDrafter(DRAFT, DynamicShape(nodes=8, depth=3), costs=FREE)
    else:
        caches = GramOptions(corpus=corpus_file() if "corpus" in drafter else "none")
        grams = GramTreeOptions(nodes=6, depth=3, candidates=3, riders=RiderOptions(branches=2, length=2), caches=caches)
        parts = Parts(draft=DRAFT, topology=parse_tree(tree), scheme=scheme, grams=grams)
        made = make_drafter(parts, drafter)
    return Decoder(TARGET, made, tokenizer=tokenizer, eos_token_ids=eos_token_ids, walk=walk)


@dataclass(frozen=True)
class Outcome:
    """How one text can come out, and with what chance."""

    token_ids: tuple[int, ...]
    chance: float


def text_distribution(params: SamplingParams, ends: Callable[[tuple[int, ...]], bool] = lambda tokens: False) -> list[Outcome]:
    """Enumerate all texts of the target, each to its end, by next-token distributions that no code under test has made."""
    running, done = [Outcome((), 1.0)], list[Outcome]()
    for length in range(1, NEW_TOKENS + 1):
        distributions = next_distributions(
            TARGET, PROMPT, np.array([one.token_ids for one in running], dtype=int).reshape(len(running), -1), params
        )
        grown = [
            Outcome((*one.token_ids, token), one.chance * float(distribution_V[token]))
            for one, distribution_V in zip(running, distributions, strict=True)
            for token in np.flatnonzero(distribution_V).tolist()
        ]
        over = [ends(one.token_ids) or length == NEW_TOKENS for one in grown]
        done += [one for one, ended in zip(grown, over, strict=True) if ended]
        running = [one for one, ended in zip(grown, over, strict=True) if not ended]
        if not running:
            break
    return done


def distribution_p_value(results: Sequence[Generation], distribution: Sequence[Outcome]) -> float:
    """Test the texts against their distribution; one that cannot be gives 0."""
    places = {one.token_ids: place for place, one in enumerate(distribution)}
    counts_X = np.zeros(len(distribution) + 1)
    for result in results:
        counts_X[places.get(tuple(result.token_ids), len(distribution))] += 1
    return chi_square_p_value(counts_X, np.array([*(one.chance for one in distribution), 0.0]))


@dataclass(frozen=True)
class Listed:
    """A logits processor that allows the texts of a list, and fails where none of them goes on."""

    texts: tuple[tuple[int, ...], ...]

    def allowed(self, tokens: tuple[int, ...]) -> list[int]:
        found = {text[len(tokens)] for text in self.texts if len(text) > len(tokens) and text[: len(tokens)] == tokens}
        if not found:
            raise KeyError(tokens)
        return sorted(found)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        allowed = self.allowed(tuple(input_ids[0, len(PROMPT) :].tolist()))
        masked[:, allowed] = scores[:, allowed]
        return masked

    def distribution(self) -> list[Outcome]:
        """Enumerate the texts, by next-token distributions that no code under test has made."""
        distribution = []
        for text in self.texts:
            chance = 1.0
            for length, token in enumerate(text):
                before_NL = np.array(text[:length], dtype=int)[None]
                weights_V = next_distributions(TARGET, PROMPT, before_NL, SamplingParams())[0]
                chance *= weights_V[token] / weights_V[self.allowed(text[:length])].sum()
            distribution.append(Outcome(text, float(chance)))
        return distribution
