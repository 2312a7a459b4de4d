"""How much is tried."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of cases and samples."""

    vocabularies: tuple[int, ...] = (2, 3, 4, 6)
    counts: tuple[int, ...] = (1, 2, 3)
    """Numbers of drafts at a node."""
    cases: int = 120
    """Random pairs of laws for each vocabulary and number of drafts; awkward ones come on top."""
    node_samples: int = 20_000
    texts: int = 4_000
    """Of four tokens, from 32 tokens and from fixture F."""
    small_texts: int = 20_000
    """Of three tokens, from a vocabulary of three."""
    prompts: int = 40
    greedy_tokens: int = 20


FULL = Sizes()
QUICK = Sizes(
    vocabularies=(2, 3, 4),
    counts=(1, 2),
    cases=40,
    node_samples=12_000,
    texts=400,
    small_texts=1_500,
    prompts=6,
    greedy_tokens=10,
)
"""For a first look, and for tests of the kit itself."""
