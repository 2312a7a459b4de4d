"""Checks of whole texts through the whole engine: draft tree, target pass, walk, commit."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.certify._certificate import CounterExample, Trial
from polydraft.certify._subject import Sizes, Subject
from polydraft.certify.chi_square import LEAST_EXPECTED, joint_distribution, joint_p_value, text_p_values
from polydraft.certify.enumeration import tree_for
from polydraft.certify.reference import (
    ECHO_VOCABULARY,
    ModelPair,
    echo_pair,
    fixture_pair,
    greedy_text,
    next_distributions,
    small_pair,
)
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine
from polydraft.engine.workspace import Workspace
from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.categorical import row_seed
from polydraft.trees import parse_tree

GREEDY = SamplingParams(temperature=0)
_SPARSE = "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0],[0,1,0],[0,1,1]]"
_GREEDY_TREES = ("3x2x1", "chain:4", _SPARSE)


def generate(
    subject: Subject,
    pair: ModelPair,
    tree: str,
    prompts: list[list[int]],
    params: SamplingParams,
    new_tokens: int,
    seed: int,
    draft_temperature: float | None = None,
) -> tuple[list[list[int]], float]:
    """Generate as `Decoder` does, with a scheme and a walk that need not be registered.

    Returns the new tokens of each prompt, and the share of offered tokens that were accepted.
    """
    drafter = TreeDrafter(
        pair.draft, parse_tree(tree_for(subject.scheme, tree)), subject.scheme, draft_temperature=draft_temperature
    )
    workspace = Workspace(pair.target, drafter, RowParams.of(params, len(prompts)))
    decoder = Decoder(pair.target, drafter)
    sequences = [
        decoder.sequence(prompt, params, seed=row_seed(seed, row), max_new_tokens=new_tokens, row=row)
        for row, prompt in enumerate(prompts)
    ]
    engine = Engine(workspace, walk=subject.walk, sequences=sequences)
    while not engine.done:
        engine.step()
    return [sequence.new_tokens for sequence in sequences], engine.stats.acceptance_rate


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A pair of models with a prompt, and how many texts to sample."""

    label: str
    pair: ModelPair
    tree: str
    texts: int
    tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    whole: bool = False
    """True to test each text as one event, for short texts over few tokens; false to test token by token."""

    def generate(self, subject: Subject) -> tuple[NDArray[Any], float]:
        """Return texts [N, L], and the share of offered tokens that were accepted."""
        seed = zlib.crc32(self.label.encode())  # settings that shared random numbers would fail together
        prompts = [list(self.pair.prompt)] * self.texts
        texts, acceptance = generate(subject, self.pair, self.tree, prompts, self.sampling, self.tokens, seed)
        return np.array(texts), acceptance

    def target_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        """Return the target's distributions after some new tokens."""
        return next_distributions(self.pair.target, list(self.pair.prompt), new_NL, self.sampling)

    def draft_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        """Return the draft's distributions, which only determine the order of tokens in a test."""
        return next_distributions(self.pair.draft, list(self.pair.prompt), new_NL, SamplingParams())

    def p_values(self, tokens_NL: NDArray[Any]) -> list[float]:
        """Test texts; a missing token is impossible and gives 0."""
        if (tokens_NL < 0).any():
            return [0.0]
        if self.whole:
            return [joint_p_value(tokens_NL, self.target_distributions)]
        return text_p_values(tokens_NL, self.target_distributions, self.draft_distributions)


def settings_of(sizes: Sizes) -> list[Setting]:
    """Return the settings to generate texts with."""
    return [
        Setting(label="three tokens", pair=small_pair(), tree="2x2", texts=sizes.small_texts, tokens=3, whole=True),
        Setting(label="fixture F", pair=fixture_pair(), tree="2x2x2", texts=sizes.texts, tokens=4),
        Setting(label="32 tokens", pair=echo_pair(), tree="3x2x1", texts=sizes.texts, tokens=4),
        # Here the draft's distribution has fewer tokens than the tree has children.
        Setting(
            label="top-k below width",
            pair=echo_pair(),
            tree="3x2x1",
            texts=sizes.texts,
            tokens=4,
            sampling=SamplingParams(top_k=2),
        ),
    ]


def texts_trial(subject: Subject, sizes: Sizes, settings: list[Setting] | None = None) -> Trial:
    """Test the distribution of whole texts."""
    settings = settings_of(sizes) if settings is None else settings
    p_values: list[float] = []
    details: list[dict[str, Any]] = []
    example, least, size = None, 1.0, 0
    tested, pooled = None, 0.0
    for setting in settings:
        tokens_NL, acceptance = setting.generate(subject)
        found = setting.p_values(tokens_NL)
        size += len(tokens_NL)
        p_values += found
        details.append({"setting": setting.label, "texts": len(tokens_NL), "acceptance": acceptance, "p_value": min(found)})
        if min(found) <= least:
            least, example = min(found), _first_token(setting, tokens_NL, min(found))
        if setting.whole:
            chance_X = joint_distribution(setting.target_distributions, setting.tokens)
            rare_X = chance_X * setting.texts < LEAST_EXPECTED
            tested, pooled = (setting.texts, int(len(chance_X) - rare_X.sum())), float(chance_X[rare_X].sum())
    labels = ", ".join(setting.label for setting in settings)
    return Trial(
        name="texts",
        size=size,
        unit="texts",
        p_values=p_values,
        tested=tested,
        pooled=pooled,
        note=f"through the whole engine ({labels})",
        counter_example=example,
        details=details,
    )


def _first_token(setting: Setting, tokens_NL: NDArray[Any], p_value: float) -> CounterExample:
    """Return a counter-example for a setting that shows the first token's distribution, whichever token is wrong."""
    distribution_V = setting.target_distributions(np.empty((1, 0), dtype=int))[0]
    shares_V = np.bincount(tokens_NL[:, 0].clip(min=0), minlength=len(distribution_V)) / len(tokens_NL)
    return CounterExample(
        reason=f"texts of {setting.label!r} do not follow the target's distribution (p = {p_value:.2g}); their first token:",
        distribution=shares_V.tolist(),
        expected=distribution_V.tolist(),
        details={"setting": setting.label, "texts": len(tokens_NL), "prompt": list(setting.pair.prompt)},
    )


def prompts_of(sizes: Sizes) -> list[list[int]]:
    """Return ragged prompts, one of them a single token."""
    grid = [[first, last] for last in range(1, ECHO_VOCABULARY, 6) for first in range(0, ECHO_VOCABULARY, 5)]
    prompts = [[21], list(echo_pair().prompt), [30, 2, 2, 8, 11, 25, 6, 19], *grid]
    return prompts[: sizes.prompts]


def greedy_trial(subject: Subject, sizes: Sizes) -> Trial:
    """Check that texts at temperature 0 are the target's greedy texts, with greedy and sampled drafts."""
    pair, prompts = echo_pair(), prompts_of(sizes)
    expected = [greedy_text(pair.target, prompt, sizes.greedy_tokens, GREEDY) for prompt in prompts]
    wrong, size, example = 0, 0, None
    for tree in _GREEDY_TREES:
        for draft_temperature in (None, 1.0):
            texts, _ = generate(subject, pair, tree, prompts, GREEDY, sizes.greedy_tokens, 3, draft_temperature)
            size += len(texts)
            for prompt, text, other in zip(prompts, expected, texts, strict=True):
                if text != other:
                    wrong += 1
                    details = {"tree": tree, "prompt": prompt, "expected text": text, "text": other}
                    example = example or CounterExample(reason="a greedy text is not the target's", details=details)
    return Trial(
        name="greedy",
        size=size,
        unit="texts",
        measure="texts that differ",
        worst=float(wrong),
        allowed=0.0,
        note=f"at temperature 0, {len(_GREEDY_TREES)} trees, greedy and sampled drafts",
        counter_example=example,
    )
