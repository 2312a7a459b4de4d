"""Models, prompts and decoders of the end-to-end tests."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import polydraft.papers  # noqa: F401 - self-draft's branches
from polydraft.certify.enumeration import tree_for as narrowed
from polydraft.certify.reference import ECHO_VOCABULARY, echo_pair, fixture_pair
from polydraft.draft import DRAFTERS, GRAM_DRAFTERS, GramTreeOptions, Parts, RiderOptions, make_drafter
from polydraft.draft.predicted import with_prediction
from polydraft.draft.speedup import Costs
from polydraft.engine import Decoder, TokenSequence
from polydraft.models import FeatureHead, HeadShape, TabularModel
from polydraft.models.heads.feature_head import ENDLESS
from polydraft.models.heads.parallel_head import DFlashHead, ParallelShape, PEagleHead
from polydraft.ngrams import GramOptions
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import save_trie
from polydraft.ngrams.prediction import PREDICTION
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.trees import parse_tree
from polydraft.verify import SCHEMES

VOCABULARY = ECHO_VOCABULARY
CHEAP = Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes)
FREE = Costs(draft_level=1e-6, tree_pass=lambda nodes: 1 + 1e-6 * nodes)
"""Drafting pays however many rows share a round."""
TARGET, DRAFT = echo_pair().target, echo_pair().draft


SIZES: dict[str, int] = {
    "hidden_size": VOCABULARY, "num_heads": 2, "num_key_heads": 1, "head_size": 8, "mlp_size": 32, "window": 6
}  # fmt: skip
SHAPE = HeadShape(**SIZES)
PLACES: dict[str, bool] = {"joins": False, "normed_output": False, "root_drafts": False, "causal_windows": True}
PARALLEL_SHAPE = ParallelShape(**SIZES, **PLACES, depths=6, mask_token=9, layer_windows=(6, ENDLESS))


THREE_QUARTERS = [token for token in range(VOCABULARY) if token % 4 != 1]


def random_head(
    shape: HeadShape = SHAPE, kind: type[FeatureHead] = FeatureHead, tokens: Sequence[int] = THREE_QUARTERS
) -> FeatureHead:
    """Make a head over the table's features (its logits) that knows some tokens, attention cut short."""
    known = PartialVocabulary(torch.tensor(tokens), VOCABULARY)
    identity_VH = torch.eye(VOCABULARY)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind(shape, identity_VH, 2 * identity_VH, known).requires_grad_(False)


HEAD = random_head()
HEADS = {kind: random_head(PARALLEL_SHAPE, head) for kind, head in (("peagle", PEagleHead), ("dflash", DFlashHead))}
"""Heads of other kinds, by what follows the @ in a drafter's name."""

COMBINATIONS = [
    "lookup+model", "self-draft+head", "corpus+suffix", "lookup+dynamic-head",
    "prediction", "prediction+model", "prediction+suffix+dynamic-head", "suffix+head@peagle",
]  # fmt: skip
PARALLEL = ["head@peagle", "head@dflash", "dynamic-head@dflash"]
EVERY_DRAFTER = [*DRAFTERS, *PARALLEL, *COMBINATIONS]
ADMITTED = ["none", "ngram", "corpus", "model", "head", "dynamic-head"]
"""Those that the default tests let come and go: one of each kind of memory. The others are tried in batches."""


@cache
def gram_options(corpus: bool = True) -> GramTreeOptions:
    """Return n-gram settings: small branches, and a corpus of greedy texts."""
    options = GramTreeOptions(nodes=10, depth=5, candidates=4, riders=RiderOptions(branches=3, length=3, seeds="prompt"))
    if not corpus:
        return options
    folder = tempfile.TemporaryDirectory(prefix="polydraft-tests-")
    _FOLDERS.append(folder)
    file = Path(folder.name) / "corpus"
    with GramCounter(VOCABULARY) as counter:
        for first in range(VOCABULARY):
            counter.add(_greedy([first, *_LAST], 20))
            counter.end_text()
        save_trie(counter.count("0" * 16, max_bytes=1 << 18, min_count=1), file)
    return replace(options, caches=GramOptions(corpus=file))


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
_LAST = [14, 9, 3]


def _greedy(text: list[int], count: int) -> list[int]:
    for _ in range(count):
        text = [*text, int(TARGET.logits_after(text).argmax())]
    return text


def _repetitive_prompt() -> tuple[int, ...]:
    """Make a text whose end stood in it before, each time with another likely continuation."""
    branches = TARGET.logits_after(_LAST).topk(3).indices.tolist()
    return (*(token for branch in branches for token in _greedy([*_LAST, branch], 3)), *_LAST)


PROMPT = list(echo_pair().prompt)
GRAM_PROMPT = _repetitive_prompt()
RAGGED_PROMPTS = [[4, 17], PROMPT, [30, 2, 2, 8, 11, 25, 6, 19]]

FIXTURE_TARGET, FIXTURE_DRAFT = fixture_pair().target, fixture_pair().draft

TREES = ["3x2x1", "chain:4", "fork:3x3", "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0],[0,1,0],[0,1,1]]"]
PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.9)


def tree_for(scheme: str, wanted: str = "3x2x1") -> str:
    """Return the wanted tree, or a chain as deep where the scheme takes fewer children."""
    return narrowed(SCHEMES.get(scheme), wanted)


class Predicting(Decoder):
    """One whose every text is predicted, by its greedy continuation with an error in each five tokens."""

    def sequence(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> TokenSequence:
        """Add the prediction."""
        return super().sequence(prompt, replace(params, prediction=predicted(tuple(prompt))), **options)


@cache
def predicted(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prediction of a text."""
    greedy = _greedy(list(prompt), 25)[len(prompt) :]
    return tuple(token if place % 5 != 3 else (token + 1) % VOCABULARY for place, token in enumerate(greedy))


def make_decoder(
    *,
    scheme: str = "rrs-wor",
    walk: str = "node",
    tree: str = "3x2x1",
    drafter: str = "model",
    draft_temperature: float | None = None,
    target: TabularModel = TARGET,
    draft: TabularModel = DRAFT,
    eos_token_ids: Sequence[int] = (),
) -> Decoder:
    """Build a decoder from names alone, as a newly registered name would be."""
    drafter, _, kind = drafter.partition("@")
    names = drafter.split("+")
    predicts = PREDICTION in names
    names = [name for name in names if name != PREDICTION] or ["none"]
    parts = Parts(
        draft=HEADS.get(kind, HEAD) if any(name.endswith("head") for name in names) else draft,
        topology=parse_tree(tree),
        scheme=scheme,
        draft_temperature=draft_temperature,
        grams=gram_options(corpus=not GRAM_DRAFTERS.keys().isdisjoint(names)),
    )
    proposes = make_drafter(parts, "+".join(names))
    if proposes.ranked:
        getattr(proposes, "tree", proposes).costs = FREE
    if not predicts:
        return Decoder(target, proposes, walk=walk, eos_token_ids=eos_token_ids)
    return Predicting(target, with_prediction(proposes, CHEAP), walk=walk, eos_token_ids=eos_token_ids)
