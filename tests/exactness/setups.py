"""Models, prompts and decoders of the end-to-end tests."""

from collections.abc import Sequence

import torch

from polydraft.certify.own_tree import tree_for as narrowed
from polydraft.certify.pairs import ECHO_VOCABULARY, echo_pair, fixture_pair
from polydraft.drafters import DRAFTERS, Parts
from polydraft.engine import Decoder
from polydraft.models import FeatureHead, HeadShape, TabularModel
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.schemes import SCHEMES
from polydraft.trees import parse_tree

VOCABULARY = ECHO_VOCABULARY
TARGET, DRAFT = echo_pair().target, echo_pair().draft


def _random_head() -> FeatureHead:
    """Make a head over the table's features (its logits) that knows three quarters of the tokens, attention cut short."""
    shape = HeadShape(hidden_size=VOCABULARY, num_heads=2, num_key_heads=1, head_size=8, mlp_size=32, window=6)
    known = PartialVocabulary(torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 4 != 1], VOCABULARY)
    identity_VH = torch.eye(VOCABULARY)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FeatureHead(shape, identity_VH, 2 * identity_VH, known).requires_grad_(False)


HEAD = _random_head()
PROMPT = list(echo_pair().prompt)
RAGGED_PROMPTS = [[4, 17], PROMPT, [30, 2, 2, 8, 11, 25, 6, 19]]

FIXTURE_TARGET, FIXTURE_DRAFT = fixture_pair().target, fixture_pair().draft

TREES = ["3x2x1", "chain:4", "fork:3x3", "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0],[0,1,0],[0,1,1]]"]
PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.9)


def tree_for(scheme: str, wanted: str = "3x2x1") -> str:
    """Return the wanted tree, or a chain as deep where the scheme takes fewer children."""
    return narrowed(SCHEMES.get(scheme), wanted)


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
    proposer = HEAD if drafter.endswith("head") else draft
    parts = Parts(target=target, draft=proposer, topology=parse_tree(tree), scheme=scheme, draft_temperature=draft_temperature)
    return Decoder(target, DRAFTERS.get(drafter)(parts), walk=walk, eos_token_ids=eos_token_ids)
