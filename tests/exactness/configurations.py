"""The settings in which the distribution of whole texts is tested: everything registered, and all kinds of sampling."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft import operations
from polydraft.certify.reference import next_distributions
from polydraft.draft import DRAFTERS, GRAM_DRAFTERS
from polydraft.engine import Decoder, Generation
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES, WALKS

from .checks import FALSE_ALARM, text_p_values
from .copies import copy_target, make_copy_decoder, network_distributions, poor_copy
from .setups import (
    COMBINATIONS,
    DRAFT,
    FIXTURE_DRAFT,
    FIXTURE_TARGET,
    GRAM_PROMPT,
    PARALLEL,
    PENALTIES,
    PROMPT,
    TARGET,
    TREES,
    make_decoder,
    tree_for,
)
from .shipped import SHIPPED, make_shipped_decoder, shipped_pair


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One setting whose text distribution is tested."""

    label: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    scheme: str = "rrs-wor"
    walk: str = "node"
    tree: str = "3x2x1"
    drafter: str = "model"
    draft_temperature: float | None = None
    prompt: tuple[int, ...] = tuple(PROMPT)
    samples: int = 3_000  # 12,000 tokens, every one of them tested; 2,000 texts miss a wrong draft distribution now and then
    fixture: bool = False
    """Use the models that emit fixture F at every node."""

    new_tokens = 4  # with trees of three levels: one full block with its bonus token

    def decoder(self) -> Decoder:
        """Build it."""
        models: dict[str, Any] = {"target": FIXTURE_TARGET, "draft": FIXTURE_DRAFT} if self.fixture else {}
        return make_decoder(
            scheme=self.scheme,
            walk=self.walk,
            tree=self.tree,
            drafter=self.drafter,
            draft_temperature=self.draft_temperature,
            **models,
        )

    def generate(self) -> list[Generation]:
        """Continue the prompt many times, as one batch whose rows have generators of their own."""
        prompts = [list(self.prompt)] * self.samples
        seed = zlib.crc32(self.label.encode())  # of its own: tests on shared random numbers would fail together
        return self.decoder().generate(prompts, sampling=self.sampling, max_new_tokens=self.new_tokens, seed=seed)

    def p_values(self, results: list[Generation]) -> list[float]:
        """Test the texts against the exact distributions."""
        tokens_NL = np.array([result.token_ids for result in results])
        return text_p_values(tokens_NL, self._target_distributions, self._draft_distributions)

    def _target_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        target = FIXTURE_TARGET if self.fixture else TARGET
        return next_distributions(target, list(self.prompt), new_NL, self.sampling)

    def _draft_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        draft = FIXTURE_DRAFT if self.fixture else DRAFT
        return next_distributions(draft, list(self.prompt), new_NL, SamplingParams())


@dataclass(frozen=True, kw_only=True)
class CopyConfiguration(Configuration):
    """One whose draft is a copy of the target, at work in the target's own memory; that takes real networks."""

    samples: int = 1_500

    def decoder(self) -> Decoder:
        """Build it."""
        return make_copy_decoder(scheme=self.scheme, walk=self.walk, tree=self.tree, drafter=self.drafter)

    def generate(self) -> list[Generation]:
        """Continue the prompt many times, by compiled code: a copy is for that."""
        with operations.using(*operations.BACKENDS):
            return super().generate()

    def _target_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        return network_distributions(copy_target(), self.prompt, new_NL, self.sampling)

    def _draft_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        return network_distributions(poor_copy(), self.prompt, new_NL, SamplingParams())


@dataclass(frozen=True, kw_only=True)
class ShippedConfiguration(Configuration):
    """One whose draft is published for the target: an MTP layer of its checkpoint, or an assistant."""

    samples: int = 1_000
    drafter: str = "head"
    kind: str = "layer"

    def decoder(self) -> Decoder:
        """Build it."""
        return make_shipped_decoder(scheme=self.scheme, walk=self.walk, tree=self.tree, drafter=self.drafter, kind=self.kind)

    def _target_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        return network_distributions(shipped_pair(self.kind)[0], self.prompt, new_NL, self.sampling)

    def _draft_distributions(self, new_NL: NDArray[Any]) -> NDArray[Any]:
        return network_distributions(poor_copy(), self.prompt, new_NL, SamplingParams())


SCHEMES_AND_WALKS = [(scheme, walk) for scheme in SCHEMES for walk in WALKS if WALKS.get(walk).fits(SCHEMES.get(scheme))]

TREE_DRAFTERS = [name for name in DRAFTERS if name not in GRAM_DRAFTERS] + PARALLEL

_SHIPPED_SETTINGS: dict[str, dict[str, Any]] = {
    "": {"scheme": "auto", "walk": "block"},
    ", truncated": {"tree": "fork:2x4", "sampling": SamplingParams(top_p=0.85, temperature=0.8)},
    ", dynamic": {"drafter": "dynamic-head", "scheme": "auto"},
    " beside n-grams": {"drafter": "suffix+head", "prompt": GRAM_PROMPT},
}

CONFIGURATIONS = [
    *(
        Configuration(label=f"{scheme} {walk}", scheme=scheme, walk=walk, tree=tree_for(scheme))
        for scheme, walk in SCHEMES_AND_WALKS
    ),
    Configuration(label="sparse", tree=TREES[-1]),
    Configuration(label="top-k", sampling=SamplingParams(top_k=5)),
    # The draft's distribution has fewer tokens than the tree has children.
    Configuration(label="top-k below width", sampling=SamplingParams(top_k=2)),
    Configuration(label="top-p", sampling=SamplingParams(top_p=0.8)),
    Configuration(label="min-p, temperature", sampling=SamplingParams(min_p=0.1, temperature=0.7)),
    Configuration(label="all truncations", sampling=SamplingParams(top_k=12, top_p=0.9, min_p=0.02, temperature=1.4)),
    Configuration(label="penalties", sampling=PENALTIES),
    Configuration(label="logit bias", sampling=SamplingParams(logit_bias={3: 2.0, 7: 1.0, PROMPT[0]: -1.5})),
    Configuration(label="sharp draft", draft_temperature=0.6),
    Configuration(label="flat draft", draft_temperature=1.5),
    Configuration(label="greedy draft", draft_temperature=0.0),
    Configuration(label="one-token prompt", prompt=(21,)),
    *(
        Configuration(label=f"drafter {name}", drafter=name, scheme="auto", samples=1_500 if name in PARALLEL else 3_000)
        for name in TREE_DRAFTERS
    ),
    *(
        Configuration(
            label=f"drafter {name}, truncated",
            drafter=name,
            scheme="auto",
            tree="fork:2x4",
            samples=1_500 if name in PARALLEL else 3_000,
            sampling=SamplingParams(top_p=0.85, temperature=0.8, repetition_penalty=1.3),
        )
        for name in TREE_DRAFTERS
    ),
    # One trie and one walk for all of these: fewer texts each, as their memories are Python's.
    *(
        Configuration(label=f"drafter {name}", drafter=name, scheme="auto", prompt=GRAM_PROMPT, samples=800)
        for name in [*GRAM_DRAFTERS, *COMBINATIONS]
    ),
    Configuration(
        label="drafter self-draft+model, truncated",
        drafter="self-draft+model",
        tree="fork:2x4",
        prompt=GRAM_PROMPT,
        samples=800,
        sampling=SamplingParams(top_p=0.85, temperature=0.8, repetition_penalty=1.3),
    ),
    CopyConfiguration(label="copy"),
    CopyConfiguration(label="copy, truncated", tree="fork:2x4", sampling=SamplingParams(top_p=0.85, temperature=0.8)),
    CopyConfiguration(label="copy, block walk", scheme="auto", walk="block", sampling=PENALTIES),
    CopyConfiguration(label="copy beside n-grams", drafter="suffix+model", prompt=GRAM_PROMPT),
    CopyConfiguration(label="copy, dynamic", drafter="dynamic", scheme="auto"),
    *(
        ShippedConfiguration(label=f"shipped {kind}{label}", kind=kind, **settings)
        for kind in SHIPPED
        for label, settings in _SHIPPED_SETTINGS.items()
    ),
    ShippedConfiguration(label="shipped assistant, one-token prompt", kind="assistant", prompt=(21,)),
]

FIXTURE_CONFIGURATIONS = [
    Configuration(
        label=f"fixture {scheme} {walk}",
        scheme=scheme,
        walk=walk,
        tree=tree_for(scheme, "2x2x2"),
        prompt=(0, 0),
        fixture=True,
    )
    for scheme, walk in SCHEMES_AND_WALKS
]

# All tests of texts are one family, of false alarm 1e-4 by Bonferroni: in every configuration three conditional tests,
# and two transformed ones of each token and of all together. Every configuration is there
# twice, the second time with more texts.
_TESTS = 3 + 2 * (Configuration.new_tokens + 1)
THRESHOLD = FALSE_ALARM / (2 * _TESTS * (len(CONFIGURATIONS) + len(FIXTURE_CONFIGURATIONS)))
